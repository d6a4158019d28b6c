// sageattn run: attention from files to a file.
#include <filesystem>
#include <iostream>
#include <memory>
#include <string>
#include <system_error>
#include <vector>

#include "attention.h"
#include "commands.h"
#include "table.h"

namespace sageattn_cli {
namespace {

namespace fs = std::filesystem;

struct RunFlags {
  std::string q, k, v;
  std::string cu_seqlens_q, cu_seqlens_kv, seqused_kv;
  std::string out, lse;
  bool bf16 = false;
  bool json = false;
  DescFlags desc;
  ContextFlags context;
};

constexpr const char* kFooter =
    "Tensors have the dimensions [batch, token, head, channel], or [batch, head, token, channel]\n"
    "with --layout hnd; without batch they are a batch of one or, with --cu-seqlens-q and\n"
    "--cu-seqlens-kv, packed sequences. FILE is a .npy file (<f2, <f4, <f8, and <V2 for bfloat16)\n"
    "or a tensor in a .safetensors file, as in layers.safetensors:layer_00.q.\n"
    "The CPU backend computes; it emulates the arithmetic of the GPU that --arch names. With\n"
    "--backend cuda a GPU does, on copies; time is then that of the execute, without them.";

std::vector<int32_t> read_cu_seqlens(const std::string& source) {
  if (source.empty()) return {};
  std::vector<int32_t> values = read_int32(source);
  if (values.size() < 2) {
    throw Failure(kFileError, source + ": cu_seqlens needs at least 2 entries, where a sequence " +
                                  "starts and where it ends, but has " +
                                  std::to_string(values.size()));
  }
  return values;
}

AttentionInputs read_inputs(const RunFlags& flags) {
  AttentionInputs inputs;
  inputs.q = read_operand(flags.q, flags.bf16);
  inputs.k = read_operand(flags.k, flags.bf16);
  inputs.v = read_operand(flags.v, flags.bf16);
  inputs.cu_seqlens_q = read_cu_seqlens(flags.cu_seqlens_q);
  inputs.cu_seqlens_kv = read_cu_seqlens(flags.cu_seqlens_kv);
  if (!flags.seqused_kv.empty()) inputs.seqused_kv = read_int32(flags.seqused_kv);
  inputs.want_lse = !flags.lse.empty();
  return inputs;
}

// Does nothing if the sequences are not packed.
void warn_of_uncovered_tokens(const std::string& source, const std::vector<int32_t>& cu_seqlens,
                              int64_t tokens) {
  if (cu_seqlens.empty()) return;
  const int64_t uncovered = tokens - (int64_t{cu_seqlens.back()} - cu_seqlens.front());
  if (uncovered == 0) return;
  std::cerr << "sageattn: warning: " << source << ": " << uncovered << " of " << tokens
            << " tokens belong to no sequence\n";
}

bool name_the_same_file(const std::string& one, const std::string& other) {
  std::error_code error;
  const auto resolved = [&](const std::string& path) {
    return fs::weakly_canonical(fs::absolute(path, error), error);
  };
  const fs::path path = resolved(one);
  return !path.empty() && path == resolved(other);
}

void check_targets(const RunFlags& flags) {
  if (name_the_same_file(flags.out, flags.lse)) {
    throw CLI::ValidationError("--lse", "names the same file as --out");
  }
  check_writable(flags.out);
  if (!flags.lse.empty()) check_writable(flags.lse);
}

// Both files or neither.
void write(const RunFlags& flags, const AttentionOutputs& outputs) {
  write_npy(flags.out, outputs.out);
  if (flags.lse.empty()) return;
  try {
    write_npy(flags.lse, outputs.lse);
  } catch (const Failure&) {
    remove_file(flags.out);
    throw;
  }
}

void print(const RunFlags& flags, const AttentionOutputs& outputs) {
  if (flags.json) {
    Json json = {{"out", flags.out}, {"shape", outputs.out.shape}};
    if (!flags.lse.empty()) json["lse"] = flags.lse;
    json["ms"] = outputs.milliseconds;
    json["plan"] = plan_json(outputs.info);
    print_json(json);
    return;
  }
  std::cout << "out: " << flags.out << ' ' << to_string(outputs.out.shape) << '\n'
            << "time: " << fixed(outputs.milliseconds, 3) << " ms\n"
            << "kernel_name: " << outputs.info.kernel_name << '\n';
  for (const auto& [name, value] : plan_numerics(outputs.info)) {
    std::cout << name << ": " << value << '\n';
  }
}

ExitCode run(const RunFlags& flags) {
  check_targets(flags);
  const AttentionInputs inputs = read_inputs(flags);
  const Context context(flags.context.desc());
  const sageattn_attn_desc desc = flags.desc.desc();
  AttentionOutputs outputs = attend(context, desc, inputs);
  warn_of_uncovered_tokens(flags.cu_seqlens_q, inputs.cu_seqlens_q,
                           view_of(inputs.q, desc.layout, "q").tokens);
  warn_of_uncovered_tokens(flags.cu_seqlens_kv, inputs.cu_seqlens_kv,
                           view_of(inputs.k, desc.layout, "k").tokens);
  if (flags.bf16 && outputs.out.type == ElementType::kBF16) outputs.out.type = ElementType::kU16;
  write(flags, outputs);
  print(flags, outputs);
  return kOk;
}

}  // namespace

Command add_run(CLI::App& program) {
  CLI::App* app = program.add_subcommand("run", "Compute attention from files to a file");
  const auto flags = std::make_shared<RunFlags>();
  add_footer(*app, kFooter);
  app->add_option("--q", flags->q, "Queries")->type_name("FILE")->required();
  app->add_option("--k", flags->k, "Keys")->type_name("FILE")->required();
  app->add_option("--v", flags->v, "Values")->type_name("FILE")->required();
  app->add_option("--out", flags->out, "Output to write (.npy)")->type_name("FILE")->required();
  app->add_option("--lse", flags->lse, "Log-sum-exp to write (.npy)")->type_name("FILE");
  auto* cu_q = app->add_option("--cu-seqlens-q", flags->cu_seqlens_q,
                               "Packed sequences: where each starts in q, and the end (int32)");
  auto* cu_kv = app->add_option("--cu-seqlens-kv", flags->cu_seqlens_kv, "The same for k and v");
  cu_q->type_name("FILE")->needs(cu_kv);
  cu_kv->type_name("FILE")->needs(cu_q);
  app->add_option("--seqused-kv", flags->seqused_kv, "Keys of each sequence that exist (int32)")
      ->type_name("FILE");
  app->add_flag("--bf16", flags->bf16, "Read uint16 as bfloat16, and write bfloat16 as uint16");
  flags->context.backend = SAGEATTN_BACKEND_CPU;
  flags->context.add_to(*app);
  flags->desc.add_to(*app);
  add_json_flag(*app, flags->json);
  return {app, [flags] { return run(*flags); }};
}

}  // namespace sageattn_cli
