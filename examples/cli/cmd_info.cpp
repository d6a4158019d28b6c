// sageattn info and sageattn selftest: what the library is, and whether it works here.
#include <chrono>
#include <iostream>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "commands.h"
#include "library.h"
#include "table.h"

namespace sageattn_cli {
namespace {

constexpr int32_t kHeadDims[] = {64, 128};

struct InfoFlags {
  ContextFlags context;
  bool json = false;
};

// What a preset becomes on the context's arch, or why it cannot run there.
struct Resolved {
  std::string preset;
  int32_t head_dim;
  sageattn_plan_info info;
  std::string error;  // empty: it can
};

Resolved resolve(const Context& context, const Enumerant& preset, int32_t head_dim) {
  Resolved resolved{preset.name, head_dim, {}, ""};
  sageattn_attn_desc desc = preset_desc(preset.value);
  desc.q_dtype = SAGEATTN_BF16;
  desc.head_dim = head_dim;
  desc.num_qo_heads = 1;
  desc.max_qo_len = 1;
  desc.max_kv_len = 1;
  try {
    resolved.info = context.query(desc);
  } catch (const LibraryFailure& failure) {
    resolved.error = failure.what();
  }
  return resolved;
}

std::vector<Resolved> resolve_presets(const Context& context, int32_t head_dim) {
  std::vector<Resolved> presets;
  for (const Enumerant& preset : kPresets) presets.push_back(resolve(context, preset, head_dim));
  return presets;
}

Json resolved_json(const Resolved& resolved) {
  Json json = {{"preset", resolved.preset}, {"head_dim", resolved.head_dim}};
  if (resolved.error.empty()) {
    json["plan"] = plan_json(resolved.info);
  } else {
    json["error"] = resolved.error;
  }
  return json;
}

void print_json_info(const Context& context) {
  Json presets = Json::array();
  for (const int32_t head_dim : kHeadDims) {
    for (const Resolved& resolved : resolve_presets(context, head_dim)) {
      presets.push_back(resolved_json(resolved));
    }
  }
  print_json({{"version", sageattn_version_string()},
              {"source_id", sageattn_source_id()},
              {"report", report_json(context)},
              {"presets", presets}});
}

void print_presets(const std::vector<Resolved>& presets) {
  std::vector<Table::Column> columns = {{"preset", Table::Align::kLeft}};
  std::vector<std::vector<std::string>> rows;
  for (const auto& [name, value] : plan_numerics({})) rows.push_back({name});
  for (const Resolved& resolved : presets) {
    columns.push_back({resolved.preset, Table::Align::kLeft});
    const auto numerics = plan_numerics(resolved.info);
    for (size_t i = 0; i < rows.size(); ++i) {
      rows[i].push_back(resolved.error.empty() ? numerics[i].second : "-");
    }
  }
  Table table(std::move(columns));
  for (auto& row : rows) table.add_row(std::move(row));
  table.print(std::cout);
  for (const Resolved& resolved : presets) {
    if (!resolved.error.empty()) std::cout << resolved.preset << ": " << resolved.error << '\n';
  }
}

void print_info(const Context& context) {
  std::cout << context.report();  // begins with the version and the source id
  for (const int32_t head_dim : kHeadDims) {
    std::cout << "\nPresets at head_dim " << head_dim << ", bf16\n";
    print_presets(resolve_presets(context, head_dim));
  }
}

ExitCode info(const InfoFlags& flags) {
  const Context context(flags.context.desc());
  flags.json ? print_json_info(context) : print_info(context);
  return kOk;
}

// What the self-test says of each case; printed as it comes, but not where JSON is wanted.
struct SelftestLog {
  bool print;
  std::vector<std::string> cases;

  static void add(void* self, int32_t, const char* message) {
    constexpr std::string_view kPrefix = "selftest: ";
    if (!std::string_view(message).starts_with(kPrefix)) return;
    auto& log = *static_cast<SelftestLog*>(self);
    log.cases.emplace_back(message + kPrefix.size());
    if (log.print) std::cout << log.cases.back() << std::endl;
  }
};

ExitCode selftest(const InfoFlags& flags) {
  SelftestLog log{!flags.json, {}};
  sageattn_context_desc desc = flags.context.desc();
  desc.log = SelftestLog::add;
  desc.log_user = &log;
  const Context context(desc);
  const auto start = std::chrono::steady_clock::now();
  context.selftest();
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  if (flags.json) {
    print_json({{"ok", true}, {"seconds", elapsed.count()}, {"cases", log.cases}});
  } else {
    std::cout << "self-test passed in " << fixed(elapsed.count(), 1) << " s\n";
  }
  return kOk;
}

Command add(CLI::App& program, const char* name, const char* help, ExitCode run(const InfoFlags&)) {
  CLI::App* app = program.add_subcommand(name, help);
  const auto flags = std::make_shared<InfoFlags>();
  flags->context.add_to(*app);
  add_json_flag(*app, flags->json);
  return {app, [flags, run] { return run(*flags); }};
}

}  // namespace

Command add_info(CLI::App& program) {
  return add(program, "info", "Say what was found on this machine and what presets become", info);
}

Command add_selftest(CLI::App& program) {
  return add(program, "selftest", "Check every preset against an exact computation", selftest);
}

}  // namespace sageattn_cli
