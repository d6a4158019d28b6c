// sageattn compile: the kernels of presets, compiled ahead of time. Needs NVRTC but no GPU.
#include <algorithm>
#include <atomic>
#include <exception>
#include <filesystem>
#include <iostream>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "commands.h"
#include "library.h"
#include "progress.h"
#include "table.h"
#include "tensor_io.h"

namespace sageattn_cli {
namespace {

namespace fs = std::filesystem;

struct CompileFlags {
  std::vector<int32_t> archs = {80, 86, 89, 90, 120};
  std::vector<int32_t> head_dims = {64, 128};
  std::vector<int32_t> presets;  // empty: all that an arch can run
  std::string out;
  bool json = false;
};

constexpr const char* kFooter =
    "Compiles what plans of these presets need, for inputs in f16 and in bf16, every mask and "
    "every\n"
    "layout, and puts it into the kernel cache. With --out, DIR receives one blob for each arch, "
    "to\n"
    "be given to sageattn_context_import_blob where there is no NVRTC (SAGEATTN_CONTEXT_NO_JIT).\n"
    "The first table has a row for each plan: registers, spill_bytes and smem_bytes (a block, "
    "without\n"
    "what is static) are those of its attention kernel. The second has one for each kernel, "
    "however\n"
    "many plans share it: its smem is all of a block, static and dynamic, in the largest of these\n"
    "plans. ms is NVRTC's time, 0 for what was there. A preset that is not named is left out where "
    "it\n"
    "cannot run.";

// The plans of one row of the table.
struct Row {
  const Context* context;
  int32_t arch, preset, head_dim;
  Enumerant dtype;
  sageattn_plan_info info{};                    // the most of any mask
  std::vector<sageattn_kernel_info> kernels{};  // of every mask
  std::string unsupported{};                    // why there is none
  std::exception_ptr failure{};

  std::string text() const {
    return "arch " + std::to_string(arch) + ", " + name_of(kPresets, preset) + ", head_dim " +
           std::to_string(head_dim) + ", " + dtype.name;
  }
};

// Adds the plan's kernels to `kernels`.
sageattn_plan_info compile_plan(const Context& context, const sageattn_attn_desc& desc,
                                std::vector<sageattn_kernel_info>& kernels) {
  sageattn_plan* plan = nullptr;
  check([&](sageattn_error* error) {
    return sageattn_plan_create(context.handle(), &desc, &plan, error);
  });
  const std::unique_ptr<sageattn_plan, decltype(&sageattn_plan_destroy)> owner(
      plan, sageattn_plan_destroy);
  auto info = sized<sageattn_plan_info>();
  check([&](sageattn_error* error) { return sageattn_plan_get_info(plan, &info, error); });
  for (int32_t i = 0; i < info.num_kernels; ++i) {
    auto& kernel = kernels.emplace_back(sized<sageattn_kernel_info>());
    check([&](sageattn_error* error) { return sageattn_plan_get_kernel(plan, i, &kernel, error); });
  }
  return info;
}

void compile_row(Row& row) {
  sageattn_attn_desc desc = preset_desc(row.preset);
  desc.q_dtype = row.dtype.value;
  desc.head_dim = row.head_dim;
  desc.num_qo_heads = desc.max_qo_len = desc.max_kv_len = 1;
  for (int32_t mask = SAGEATTN_MASK_NONE; mask <= SAGEATTN_MASK_WINDOW; ++mask) {
    desc.mask = mask;
    const sageattn_plan_info info = compile_plan(*row.context, desc, row.kernels);
    const sageattn_plan_info before = row.info;
    row.info = info;
    row.info.registers = std::max(info.registers, before.registers);
    row.info.spill_bytes = std::max(info.spill_bytes, before.spill_bytes);
    row.info.smem_bytes = std::max(info.smem_bytes, before.smem_bytes);
    row.info.compile_ms += before.compile_ms;
  }
}

void compile_rows(std::vector<Row>& rows, bool skip_unsupported) {
  std::atomic<size_t> next{0};
  std::mutex mutex;
  Progress progress(static_cast<int64_t>(rows.size()));
  const auto work = [&] {
    for (size_t i; (i = next.fetch_add(1)) < rows.size();) {
      Row& row = rows[i];
      try {
        compile_row(row);
      } catch (const LibraryFailure& failure) {
        if (skip_unsupported && failure.status() == SAGEATTN_E_UNSUPPORTED) {
          row.unsupported = failure.what();
        } else {
          row.failure =
              std::make_exception_ptr(Failure(failure.code(), row.text() + ": " + failure.what()));
        }
      } catch (...) {
        row.failure = std::current_exception();
      }
      if (row.failure) next = rows.size();
      const std::lock_guard lock(mutex);
      progress.advance();
    }
  };
  std::vector<std::thread> threads(std::max(std::thread::hardware_concurrency(), 1u));
  for (std::thread& thread : threads) thread = std::thread(work);
  for (std::thread& thread : threads) thread.join();
  for (const Row& row : rows) {
    if (row.failure) std::rethrow_exception(row.failure);
  }
}

// Each kernel once for an arch, with the most that a plan makes of it: ms is 0 for all but the plan
// that compiled it.
std::vector<sageattn_kernel_info> kernels_of(const std::vector<Row>& rows) {
  std::map<std::tuple<int32_t, std::string, std::string>, sageattn_kernel_info> kernels;
  for (const Row& row : rows) {
    for (const sageattn_kernel_info& kernel : row.kernels) {
      sageattn_kernel_info& most =
          kernels.try_emplace({kernel.arch, kernel.name, kernel.macros}, kernel).first->second;
      most.smem_bytes = std::max(most.smem_bytes, kernel.smem_bytes);
      most.compile_ms = std::max(most.compile_ms, kernel.compile_ms);
    }
  }
  std::vector<sageattn_kernel_info> list;
  list.reserve(kernels.size());
  for (const auto& [key, kernel] : kernels) list.push_back(kernel);
  return list;
}

Json kernels_json(const std::vector<sageattn_kernel_info>& kernels) {
  Json json = Json::array();
  for (const sageattn_kernel_info& kernel : kernels) {
    json.push_back({{"kernel", kernel.name},
                    {"macros", kernel.macros},
                    {"arch", kernel.arch},
                    {"registers", kernel.registers},
                    {"spill_bytes", kernel.spill_bytes},
                    {"smem", kernel.smem_bytes},
                    {"ms", kernel.compile_ms}});
  }
  return json;
}

void print_kernels(const std::vector<sageattn_kernel_info>& kernels) {
  constexpr auto kLeft = Table::Align::kLeft;
  Table table({{"arch"},
               {"kernel", kLeft},
               {"macros", kLeft},
               {"registers"},
               {"spill_bytes"},
               {"smem"},
               {"ms"}});
  for (const sageattn_kernel_info& kernel : kernels) {
    table.add_row({std::to_string(kernel.arch), kernel.name, kernel.macros,
                   std::to_string(kernel.registers), std::to_string(kernel.spill_bytes),
                   std::to_string(kernel.smem_bytes), fixed(kernel.compile_ms, 0)});
  }
  table.print(std::cout);
}

Json rows_json(const std::vector<Row>& rows) {
  Json json = Json::array();
  for (const Row& row : rows) {
    Json plan = {{"arch", row.arch},
                 {"preset", name_of(kPresets, row.preset)},
                 {"head_dim", row.head_dim},
                 {"dtype", row.dtype.name}};
    if (!row.unsupported.empty()) {
      plan["error"] = row.unsupported;
    } else {
      plan["kernel_name"] = row.info.kernel_name;
      plan["registers"] = row.info.registers;
      plan["spill_bytes"] = row.info.spill_bytes;
      plan["smem_bytes"] = row.info.smem_bytes;
      plan["ms"] = row.info.compile_ms;
    }
    json.push_back(std::move(plan));
  }
  return json;
}

void print_rows(const std::vector<Row>& rows) {
  constexpr auto kLeft = Table::Align::kLeft;
  Table table({{"arch"},
               {"preset", kLeft},
               {"head_dim"},
               {"dtype", kLeft},
               {"kernel_name", kLeft},
               {"registers"},
               {"spill_bytes"},
               {"smem_bytes"},
               {"ms"}});
  for (const Row& row : rows) {
    if (!row.unsupported.empty()) continue;
    table.add_row({std::to_string(row.arch), name_of(kPresets, row.preset),
                   std::to_string(row.head_dim), row.dtype.name, row.info.kernel_name,
                   std::to_string(row.info.registers), std::to_string(row.info.spill_bytes),
                   std::to_string(row.info.smem_bytes), fixed(row.info.compile_ms, 0)});
  }
  table.print(std::cout);
}

ExitCode compile(const CompileFlags& flags) {
  std::vector<std::string> files;
  for (const int32_t arch : flags.archs) {
    files.push_back((fs::path(flags.out) / ("sageattn-sm_" + std::to_string(arch) + ".blob")));
  }
  if (!flags.out.empty()) {
    make_folder(flags.out);
    for (const std::string& file : files) check_writable(file);
  }

  std::vector<int32_t> presets = flags.presets;
  if (presets.empty()) {
    for (const Enumerant& preset : kPresets) presets.push_back(preset.value);
  }
  std::vector<std::unique_ptr<Context>> contexts;
  std::vector<Row> rows;
  for (const int32_t arch : flags.archs) {
    auto desc = sized<sageattn_context_desc>();
    desc.backend = SAGEATTN_BACKEND_CUDA;
    desc.target_arch = arch;
    contexts.push_back(std::make_unique<Context>(desc));
    for (const int32_t preset : presets) {
      for (const int32_t head_dim : flags.head_dims) {
        for (const Enumerant dtype : {Enumerant{"f16", SAGEATTN_F16}, {"bf16", SAGEATTN_BF16}}) {
          rows.push_back({contexts.back().get(), arch, preset, head_dim, dtype});
        }
      }
    }
  }
  compile_rows(rows, flags.presets.empty());

  if (flags.out.empty()) {
    files.clear();
  } else {
    for (size_t i = 0; i < files.size(); ++i) write_file(files[i], contexts[i]->export_blob());
  }
  const std::vector<sageattn_kernel_info> kernels = kernels_of(rows);
  if (flags.json) {
    print_json({{"plans", rows_json(rows)}, {"kernels", kernels_json(kernels)}, {"files", files}});
  } else {
    print_rows(rows);
    std::cout << '\n';
    print_kernels(kernels);
    for (const std::string& file : files) {
      std::cout << file << ": " << fs::file_size(file) << " bytes\n";
    }
  }
  return kOk;
}

int32_t parse_number(const std::string& flag, const std::string& text) {
  int32_t value;
  if (!CLI::detail::lexical_cast(text, value)) {
    throw CLI::ValidationError(flag, "'" + text + "' is no number");
  }
  return value;
}

int32_t parse_arch(const std::string& flag, const std::string& text) {
  // As people write them, too: sm_90, sm_90a. The kernels of 90 are those of sm_90a where there are any.
  std::string digits = text.starts_with("sm_") ? text.substr(3) : text;
  if (digits.ends_with('a')) digits.pop_back();
  int32_t arch = 0;
  // To the library 0 is whatever the machine's GPU has, which is nothing to name a file after.
  if (!CLI::detail::lexical_cast(digits, arch) || arch == 0) {
    throw CLI::ValidationError(flag, "'" + text + "' is none of 80, 86, 89, 90, 120");
  }
  return arch;
}

// Replaces `values` by those of a list with commas.
void add_numbers_flag(CLI::App& app, const std::string& flag, const std::string& help,
                      std::vector<int32_t>& values,
                      int32_t (*parse)(const std::string& flag, const std::string& text)) {
  const auto set = [flag, parse, &values](const std::vector<std::string>& lists) {
    values.clear();
    for (const std::string& text : split_lists(flag, lists)) values.push_back(parse(flag, text));
  };
  app.add_option_function<std::vector<std::string>>(flag, set, help)->type_name("LIST");
}

}  // namespace

Command add_compile(CLI::App& program) {
  CLI::App* app = program.add_subcommand("compile", "Compile kernels ahead of time, without a GPU");
  const auto flags = std::make_shared<CompileFlags>();
  add_footer(*app, kFooter);
  add_numbers_flag(*app, "--arch",
                   "GPU architectures, with commas between (default: 80,86,89,90,120)",
                   flags->archs, parse_arch);
  add_enumerants_flag(*app, "--preset", "Presets, with commas between (default: all)", kPresets,
                      flags->presets);
  add_numbers_flag(*app, "--head-dim", "Head dimensions, with commas between (default: 64,128)",
                   flags->head_dims, parse_number);
  app->add_option("--out", flags->out, "Folder for one blob of each arch")->type_name("DIR");
  add_json_flag(*app, flags->json);
  return {app, [flags] { return compile(*flags); }};
}

}  // namespace sageattn_cli
