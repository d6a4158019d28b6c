// sageattn bench: how fast presets are, end to end and kernel by kernel.
#include <algorithm>
#include <ctime>
#include <iostream>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "bench.h"
#include "chart.h"
#include "commands.h"
#include "library.h"
#include "machine.h"
#include "progress.h"
#include "table.h"
#include "tensor_io.h"

namespace sageattn_cli {
namespace {

constexpr Enumerant kBenchMasks[] = {{"full", SAGEATTN_MASK_NONE},
                                     {"causal", SAGEATTN_MASK_CAUSAL_BOTTOM_RIGHT}};

struct BenchFlags {
  std::vector<int32_t> presets, kernels, masks;
  std::vector<int32_t> dims = {64, 128};
  std::vector<int32_t> seqs = {1024, 2048, 4096, 8192, 16384, 32768};
  int32_t batch = 4, heads = 32, kv_heads = 0;
  int32_t dtype = SAGEATTN_BF16;
  bool lse = false;
  FieldFlags numerics;
  int32_t repeat = 30, warmup = 5;
  ContextFlags context;
  std::string json, csv, svg;
};

constexpr const char* kFooter =
    "TOPS = 4 batch heads seq^2 dim / (2 if causal) / time, medians of --repeat executes.\n"
    "TOPS, ms: end to end, from inputs in memory to the output in memory: whole executes, one\n"
    "behind the other on one stream. attn, prep: the launches of attention alone, and all others,\n"
    "each between two events of its own, which forbids overlap. % peak: attn TOPS of what the\n"
    "tensor core reached in a loop of nothing but these products. prep MB: inputs read once and\n"
    "operands of the tensor core written once, the least that must be moved; % copy: bytes a\n"
    "second of a plain copy's. Both shares only for GPUs on which these rates have been measured.\n"
    "Inputs and outputs take turns where they would fit in the L2 cache. The flags from "
    "--qk-format\n"
    "to --pv-model change every preset but EXACT, which takes no --kernel either. Rows that "
    "cannot\n"
    "be run say why below the table. With --backend cpu time is the clock's, and says nothing "
    "about\n"
    "a GPU.";

struct Row {
  int32_t preset, kernel, mask, head_dim, seq;
};

// ---- Measurements ------------------------------------------------------------------------------

std::vector<Row> rows_of(const BenchFlags& flags) {
  std::vector<Row> rows;
  for (const int32_t preset : flags.presets) {
    for (const int32_t kernel : flags.kernels) {
      for (const int32_t head_dim : flags.dims) {
        for (const int32_t mask : flags.masks) {
          for (const int32_t seq : flags.seqs) {
            rows.push_back({preset, kernel, mask, head_dim, seq});
          }
        }
      }
    }
  }
  return rows;
}

// What changes how a preset computes; rows have kernels and masks of their own, and one type.
bool is_numeric(const DescOption& option) {
  return option.info_field && option.desc_field != &sageattn_attn_desc::kernel &&
         option.desc_field != &sageattn_attn_desc::out_dtype;
}

sageattn_attn_desc desc_of(const BenchFlags& flags, const Row& row) {
  sageattn_attn_desc desc = preset_desc(row.preset);
  desc.q_dtype = flags.dtype;
  desc.mask = row.mask;
  desc.head_dim = row.head_dim;
  desc.num_qo_heads = flags.heads;
  desc.num_kv_heads = flags.kv_heads;
  desc.max_batch = flags.batch;
  desc.max_qo_len = desc.max_kv_len = row.seq;
  if (desc.qk_format == SAGEATTN_QK_NONE) return desc;
  desc.kernel = row.kernel;
  flags.numerics.apply(desc);
  return desc;
}

double operations(const BenchFlags& flags, const Row& row) {
  const double seq = row.seq;
  return 4.0 * flags.batch * flags.heads * seq * seq * row.head_dim /
         (row.mask == SAGEATTN_MASK_NONE ? 1 : 2);
}

// Inputs read once, operands of the tensor core written once.
double preparation_bytes(const BenchFlags& flags, const Row& row, const sageattn_plan_info& plan) {
  const double qk = plan.qk_format == SAGEATTN_QK_NONE ? 2
                    : plan.qk_format == SAGEATTN_QK_I4 && plan.kernel != SAGEATTN_KERNEL_WGMMA
                        ? 0.5
                        : 1;  // wgmma takes INT4 codes in bytes
  const double pv = plan.pv_format == SAGEATTN_PV_NONE || plan.pv_format == SAGEATTN_PV_F16 ? 2 : 1;
  const auto input = static_cast<double>(size_of(type_of_dtype(flags.dtype)));
  const double head = 1.0 * flags.batch * row.seq * row.head_dim;
  return head * (flags.heads * (input + qk) + plan.num_kv_heads * (2 * input + qk + pv));
}

Json identity_json(const Row& row) {
  return {{"preset", name_of(kPresets, row.preset)},
          {"kernel", name_of(kKernels, row.kernel)},
          {"mask", name_of(kBenchMasks, row.mask)},
          {"head_dim", row.head_dim},
          {"seq", row.seq}};
}

std::string text_of(const Json& row) {
  return row["preset"].get<std::string>() + ", kernel " + row["kernel"].get<std::string>() + ", " +
         row["mask"].get<std::string>() + ", dim " + row["head_dim"].dump() + ", " +
         row["seq"].dump() + " tokens";
}

Json measure(const BenchFlags& flags, const Machine& machine, const Bench& bench, const Row& row) {
  sageattn_plan_info plan;
  const Timing timing = bench.time(desc_of(flags, row), flags.lse, plan);
  const double work = operations(flags, row);
  const auto tops = [&](double milliseconds) { return work / milliseconds / 1e9; };
  Json json = identity_json(row);
  json["kernel_name"] = plan.kernel_name;
  json["tops"] = tops(timing.milliseconds);
  json["ms"] = timing.milliseconds;
  for (const char* key : {"attention_tops", "attention_ms", "attention_peak_share",
                          "preparation_ms", "preparation_bytes", "preparation_copy_share"}) {
    json[key] = nullptr;
  }
  if (timing.launches) {
    const auto [attention, preparation] = *timing.launches;
    const double bytes = preparation_bytes(flags, row, plan);
    json["attention_tops"] = tops(attention);
    json["attention_ms"] = attention;
    if (const auto peak = tensor_peak(machine, plan)) {
      json["attention_peak_share"] = tops(attention) / *peak;
    }
    json["preparation_ms"] = preparation;
    json["preparation_bytes"] = bytes;
    if (machine.rates) {
      json["preparation_copy_share"] = bytes / (preparation / 1e3) / machine.rates->copy_bytes;
    }
  }
  json["buffers"] = timing.buffers;
  json["plan"] = plan_json(plan);
  return json;
}

// Rows that cannot be run have an "error"; if none can, the first one's is thrown.
Json measure_all(const BenchFlags& flags, const Context& context, const Machine& machine) {
  const std::vector<Row> rows = rows_of(flags);
  const Bench bench(context, flags.dtype, flags.repeat, flags.warmup, machine.l2_bytes);
  Progress progress(static_cast<int64_t>(rows.size()));
  std::optional<Failure> first;
  bool any = false;
  Json results = Json::array();
  for (const Row& row : rows) {
    try {
      results.push_back(measure(flags, machine, bench, row));
      any = true;
    } catch (const LibraryFailure& failure) {
      results.push_back(identity_json(row));
      if (!first) first.emplace(failure.code(), text_of(results.back()) + ": " + failure.what());
      results.back()["error"] = failure.what();
    }
    progress.advance();
  }
  if (!any) throw *first;
  return results;
}

std::string now() {
  const std::time_t time = std::time(nullptr);
  std::tm utc{};
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&time, &utc));
  return text;
}

Json settings_json(const BenchFlags& flags) {
  return {{"batch", flags.batch},       {"heads", flags.heads},
          {"kv_heads", flags.kv_heads}, {"dtype", name_of(kDtypes, flags.dtype)},
          {"lse", flags.lse},           {"numerics", flags.numerics.json()},
          {"repeat", flags.repeat},     {"warmup", flags.warmup}};
}

// ---- Output ------------------------------------------------------------------------------------

std::string title(const Json& report) {
  const Json& settings = report["settings"];
  const Json& name = report["machine"]["name"];
  return (name.is_string() ? name.get<std::string>() : "unknown processor") + ", batch " +
         settings["batch"].dump() + ", heads " + settings["heads"].dump() + "/" +
         settings["kv_heads"].dump() + ", " + settings["dtype"].get<std::string>();
}

void print_table(const Json& report) {
  constexpr auto kLeft = Table::Align::kLeft;
  Table table({{"preset", kLeft},
               {"kernel", kLeft},
               {"mask", kLeft},
               {"dim"},
               {"seq"},
               {"TOPS"},
               {"ms"},
               {"attn TOPS"},
               {"attn ms"},
               {"% peak"},
               {"prep ms"},
               {"prep MB"},
               {"% copy"}});
  const auto number = [](const Json& value, double factor, int digits) {
    return value.is_null() ? "-" : fixed(value.get<double>() * factor, digits);
  };
  const auto tops = [&](const Json& value) {
    return number(value, 1, value.is_number() && value.get<double>() < 10 ? 3 : 1);
  };
  Json errors;  // those of many rows are the same
  for (const Json& row : report["rows"]) {
    if (row.contains("error")) {
      errors[row["error"].get<std::string>()].push_back(text_of(row));
      continue;
    }
    table.add_row({row["preset"], row["kernel_name"], row["mask"], row["head_dim"].dump(),
                   row["seq"].dump(), tops(row["tops"]), number(row["ms"], 1, 3),
                   tops(row["attention_tops"]), number(row["attention_ms"], 1, 3),
                   number(row["attention_peak_share"], 100, 0), number(row["preparation_ms"], 1, 3),
                   number(row["preparation_bytes"], 1e-6, 1),
                   number(row["preparation_copy_share"], 100, 0)});
  }
  std::cout << title(report) << "\n\n";
  table.print(std::cout);
  for (const auto& [error, rows] : errors.items()) {
    std::cout << '\n' << rows[0].get<std::string>();
    if (rows.size() > 1) std::cout << " and " << rows.size() - 1 << " more";
    std::cout << ": " << error << '\n';
  }
}

std::string csv(const Json& report) {
  static constexpr const char* kColumns[] = {"preset",
                                             "kernel",
                                             "mask",
                                             "head_dim",
                                             "seq",
                                             "kernel_name",
                                             "tops",
                                             "ms",
                                             "attention_tops",
                                             "attention_ms",
                                             "attention_peak_share",
                                             "preparation_ms",
                                             "preparation_bytes",
                                             "preparation_copy_share",
                                             "buffers",
                                             "error"};
  const auto cell = [](const Json& value) {
    if (value.is_null()) return std::string();
    if (!value.is_string()) return value.dump();
    std::string quoted = "\"";
    for (const char c : value.get<std::string>()) quoted += c == '"' ? "\"\"" : std::string(1, c);
    return quoted + "\"";
  };
  std::string text;
  for (const char* column : kColumns) text += (text.empty() ? "" : ",") + std::string(column);
  for (const Json& row : report["rows"]) {
    const char* separator = "\n";
    for (const char* column : kColumns) {
      text += separator + cell(row.value(column, Json()));
      separator = ",";
    }
  }
  return text + "\n";
}

// A line for each preset, kernel, mask and dimension; the masks of one have one colour.
Chart chart(const Json& report) {
  Chart chart{title(report), "tokens of a sequence", "TOPS, end to end", {}};
  std::vector<std::string> colours;
  for (const Json& row : report["rows"]) {
    if (row.contains("error")) continue;
    const std::string numerics = row["preset"].get<std::string>() + " " +
                                 row["kernel_name"].get<std::string>() + ", dim " +
                                 row["head_dim"].dump();
    const std::string label = numerics + ", " + row["mask"].get<std::string>();
    auto line = std::find_if(chart.lines.begin(), chart.lines.end(),
                             [&](const Line& other) { return other.label == label; });
    if (line == chart.lines.end()) {
      auto colour = std::find(colours.begin(), colours.end(), numerics);
      if (colour == colours.end()) colour = colours.insert(colour, numerics);
      const auto index = static_cast<int>(colour - colours.begin());
      line = chart.lines.insert(line, {label, index, row["mask"] != "full", {}});
    }
    line->points.emplace_back(row["seq"], row["tops"]);
  }
  for (Line& line : chart.lines) std::sort(line.points.begin(), line.points.end());
  return chart;
}

void write_text(const std::string& path, const std::string& text) {
  if (path.empty()) return;
  const auto bytes = std::as_bytes(std::span(text));
  write_file(path, {bytes.begin(), bytes.end()});
}

void resolve(BenchFlags& flags) {
  if (flags.presets.empty()) {
    flags.presets = {SAGEATTN_PRESET_SAGE1, SAGEATTN_PRESET_SAGE2_8B, SAGEATTN_PRESET_SAGE2_4B,
                     SAGEATTN_PRESET_SAGE2PP};
  }
  if (flags.kernels.empty()) flags.kernels = {SAGEATTN_KERNEL_AUTO};
  if (flags.masks.empty()) {
    for (const Enumerant& mask : kBenchMasks) flags.masks.push_back(mask.value);
  }
  if (flags.kv_heads == 0) flags.kv_heads = flags.heads;
  if (flags.heads % flags.kv_heads != 0) {
    throw CLI::ValidationError(
        "--kv-heads",
        std::to_string(flags.kv_heads) + " does not divide --heads " + std::to_string(flags.heads));
  }
}

ExitCode run_bench(BenchFlags& flags, const std::string& command) {
  resolve(flags);
  for (const std::string& path : {flags.json, flags.csv, flags.svg}) {
    if (!path.empty()) check_writable(path);
  }
  const Context context(flags.context.desc());
  const Machine machine = find_machine(context);
  Json report = {{"version", sageattn_version_string()},
                 {"source_id", sageattn_source_id()},
                 {"date", now()},
                 {"command", command},
                 {"machine", machine.json},
                 {"settings", settings_json(flags)}};
  report["rows"] = measure_all(flags, context, machine);
  print_table(report);  // first, should a file fail
  write_text(flags.json, report.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
  write_text(flags.csv, csv(report));
  write_text(flags.svg, flags.svg.empty() ? "" : svg(chart(report)));
  return kOk;
}

// A number or, with commas between, several.
template <typename Value>
CLI::Option* add_number(CLI::App& app, const char* flag, Value& value, int low, int high,
                        const char* help) {
  return app.add_option(flag, value, help)
      ->check(CLI::Range(low, high).description(""))
      ->delimiter(',')
      ->type_name(std::to_string(low) + ".." + std::to_string(high));
}

}  // namespace

Command add_bench(CLI::App& program, const std::string& command) {
  CLI::App* app = program.add_subcommand("bench", "Measure how fast presets are");
  const auto flags = std::make_shared<BenchFlags>();
  add_footer(*app, kFooter);
  add_enumerants_flag(*app, "--preset", "Presets (default: all that quantize)", kPresets,
                      flags->presets);
  add_enumerants_flag(*app, "--kernel", "Kernel families (default: auto)", kKernels,
                      flags->kernels);
  add_enumerants_flag(*app, "--mask", "Masks (default: both)", kBenchMasks, flags->masks);
  add_number(*app, "--dims", flags->dims, 1, 256, "Head dimensions (default: 64,128)");
  add_number(*app, "--seqs", flags->seqs, 1, 1 << 24,
             "Tokens of queries and of keys (default: 1024,2048,..,32768)");
  add_number(*app, "--batch", flags->batch, 1, 4096, "Sequences (default: 4)");
  add_number(*app, "--heads", flags->heads, 1, 4096, "Query heads (default: 32)");
  add_number(*app, "--kv-heads", flags->kv_heads, 1, 4096, "Key heads (default: as --heads)");
  add_enumerant_flag(*app, "--dtype", "Type of inputs and output (default: bf16)", kDtypes,
                     [flags](int32_t value) { flags->dtype = value; });
  app->add_flag("--lse", flags->lse, "Write the log-sum-exp, too");
  flags->numerics.add_to(*app, is_numeric);
  add_number(*app, "--repeat", flags->repeat, 1, 100000, "Executes measured (default: 30)");
  add_number(*app, "--warmup", flags->warmup, 0, 100000, "Executes before them (default: 5)");
  flags->context.backend = SAGEATTN_BACKEND_CUDA;
  flags->context.add_to(*app);
  app->add_option("--json", flags->json, "Everything measured, with machine and versions")
      ->type_name("FILE");
  app->add_option("--csv", flags->csv, "The table")->type_name("FILE");
  app->add_option("--svg", flags->svg, "TOPS end to end against tokens")->type_name("FILE");
  return {app, [flags, command] { return run_bench(*flags, command); }};
}

}  // namespace sageattn_cli
