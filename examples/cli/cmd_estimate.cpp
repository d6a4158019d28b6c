// sageattn estimate: what faster attention does for a whole model, from measurements of `bench`.
#include <algorithm>
#include <cmath>
#include <fstream>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "commands.h"
#include "table.h"

namespace sageattn_cli {
namespace {

constexpr Enumerant kMaskNames[] = {{"full", SAGEATTN_MASK_NONE},
                                    {"causal", SAGEATTN_MASK_CAUSAL_BOTTOM_RIGHT}};

// How far from what was measured an estimate goes without --extrapolate.
constexpr double kFreeFactor = 2;

struct EstimateFlags {
  int32_t layers = 0, heads = 0, kv_heads = 0, head_dim = 0, seq = 0, batch = 1;
  int32_t mask = SAGEATTN_MASK_CAUSAL_BOTTOM_RIGHT;
  int32_t preset = SAGEATTN_PRESET_SAGE2_8B;
  int32_t baseline_preset = SAGEATTN_PRESET_EXACT;
  std::string bench, baseline_bench;
  std::optional<double> baseline_attention_ms, baseline_tops;
  std::optional<double> other_flops, tflops, attention_share;
  bool extrapolate = false;
  bool json = false;
};

constexpr const char* kFooter =
    "The time of attention is layers * 4 batch heads seq^2 dim / (2 if causal) / TOPS, with TOPS\n"
    "end to end out of a file that `sageattn bench --json` wrote, for this preset, mask and head\n"
    "dimension, and interpolated in log(seq). Before: --baseline-attention-ms (of all layers), or\n"
    "--baseline-tops, or the rows of --baseline-preset in --baseline-bench (default: in --bench).\n"
    "The rest of the model takes --other-flops / --tflops, or what --attention-share leaves. It "
    "is\n"
    "taken to stay as it is, and not to overlap with attention. docs/assess.md has the formulas.";

// ---- Measured speed ----------------------------------------------------------------------------

[[noreturn]] void fail(const std::string& path, const std::string& message) {
  throw Failure(kFileError, path + ": " + message);
}

struct Curve {
  std::string what;                               // "sage2_8b, causal, dim 128"
  std::vector<std::pair<double, double>> points;  // seq, TOPS; ascending
  Json machine, settings;
};

Json read_report(const std::string& path) {
  std::ifstream stream(path);
  if (!stream) fail(path, "cannot be read");
  Json report = Json::parse(stream, nullptr, false);
  if (!report.is_object() || !report.contains("rows") || !report["rows"].is_array()) {
    fail(path, "is not what `sageattn bench --json` writes: it has no list 'rows'");
  }
  return report;
}

// The fastest kernel where several were measured. Rows that could not be run are left out.
Curve read_curve(const std::string& path, int32_t preset, int32_t mask, int32_t head_dim) {
  const Json report = read_report(path);
  const std::string preset_name = name_of(kPresets, preset);
  const std::string mask_name = name_of(kMaskNames, mask);
  Curve curve{preset_name + ", " + mask_name + ", dim " + std::to_string(head_dim), {}, {}, {}};
  std::string known;
  for (const Json& row : report["rows"]) {
    if (!row.is_object() || row.contains("error")) continue;
    try {
      const std::string what = row.at("preset").get<std::string>() + ", " +
                               row.at("mask").get<std::string>() + ", dim " +
                               std::to_string(row.at("head_dim").get<int64_t>());
      if (known.find("\n  " + what + "\n") == std::string::npos) {
        known += (known.empty() ? "\n  " : "  ") + what + "\n";
      }
      if (what != curve.what) continue;
      const auto seq = row.at("seq").get<double>();
      const auto tops = row.at("tops").get<double>();
      if (!(seq >= 1) || !(tops > 0)) {
        fail(path, "a row of " + what + " has seq " + row.at("seq").dump() + " and tops " +
                       row.at("tops").dump() + "; both must be above 0");
      }
      curve.points.emplace_back(seq, tops);
    } catch (const Json::exception&) {
      fail(path, "a row lacks preset, mask, head_dim, seq or tops: " + row.dump().substr(0, 200));
    }
  }
  if (curve.points.empty()) {
    fail(path,
         "holds no rows of " + curve.what + "; it holds:" + (known.empty() ? " none" : known));
  }
  // Of one length the fastest comes first, and stays.
  std::sort(curve.points.begin(), curve.points.end(), [](const auto& one, const auto& other) {
    return one.first != other.first ? one.first < other.first : one.second > other.second;
  });
  curve.points.erase(
      std::unique(curve.points.begin(), curve.points.end(),
                  [](const auto& one, const auto& other) { return one.first == other.first; }),
      curve.points.end());
  if (report.contains("machine") && report["machine"].is_object()) {
    curve.machine = report["machine"].value("name", Json());
  }
  curve.settings = report.value("settings", Json());
  return curve;
}

struct Speed {
  double tops;
  double beyond;  // factor between seq and the nearest that was measured; 1 if it lies among them
};

// Linear in log(seq) among the points; beyond them the nearest point's speed.
Speed speed_at(const Curve& curve, double seq) {
  const auto& points = curve.points;
  if (seq <= points.front().first) return {points.front().second, points.front().first / seq};
  if (seq >= points.back().first) return {points.back().second, seq / points.back().first};
  const auto right = std::find_if(points.begin(), points.end(),
                                  [&](const auto& point) { return point.first >= seq; });
  const auto left = right - 1;
  const double at = std::log(seq / left->first) / std::log(right->first / left->first);
  return {left->second + at * (right->second - left->second), 1};
}

Speed checked_speed(const EstimateFlags& flags, const Curve& curve, const std::string& path) {
  const Speed speed = speed_at(curve, flags.seq);
  if (speed.beyond > kFreeFactor && !flags.extrapolate) {
    fail(path, "--seq " + std::to_string(flags.seq) + " is a factor of " + fixed(speed.beyond, 1) +
                   " beyond what was measured of " + curve.what + " (" +
                   fixed(curve.points.front().first, 0) + ".." +
                   fixed(curve.points.back().first, 0) + "); the limit is " +
                   fixed(kFreeFactor, 0) + ", or give --extrapolate");
  }
  return speed;
}

// ---- The estimate ------------------------------------------------------------------------------

struct Estimate {
  double attention_operations;
  double attention_before, attention_after, other;  // ms
  Json sources = Json::object();
  std::vector<std::string> notes;

  double before() const { return attention_before + other; }
  double after() const { return attention_after + other; }
  double share() const { return attention_before / before(); }
};

void note_source(Estimate& estimate, const char* which, const Curve& curve, const Speed& speed) {
  estimate.sources[which] = {{"what", curve.what},
                             {"machine", curve.machine},
                             {"tops", speed.tops},
                             {"extrapolated_by", speed.beyond}};
  if (speed.beyond > 1) {
    estimate.notes.push_back(std::string(which) + ": extrapolated by a factor of " +
                             fixed(speed.beyond, 2) +
                             " in seq, at the speed of the nearest length");
  }
}

void note_settings(const EstimateFlags& flags, Estimate& estimate, const Curve& curve) {
  if (!curve.settings.is_object()) return;
  const auto setting = [&](const char* key) {
    const Json value = curve.settings.value(key, Json());
    return value.is_number_integer() ? value.get<int64_t>() : 0;
  };
  const int64_t measured = setting("batch") * setting("heads");
  const int64_t asked = int64_t{flags.batch} * flags.heads;
  if (measured > 0 && asked < measured) {
    estimate.notes.push_back("measured with batch * heads = " + std::to_string(measured) +
                             ", asked for " + std::to_string(asked) +
                             ": less work may not fill the GPU, and then be slower");
  }
}

double other_time(const EstimateFlags& flags, double attention_before) {
  if (flags.other_flops) return *flags.other_flops / (*flags.tflops * 1e12) * 1e3;
  return attention_before * (1 / *flags.attention_share - 1);
}

Estimate estimate_of(const EstimateFlags& flags) {
  Estimate estimate{};
  const double seq = flags.seq;
  estimate.attention_operations = 4.0 * flags.layers * flags.batch * flags.heads * seq * seq *
                                  flags.head_dim / (flags.mask == SAGEATTN_MASK_NONE ? 1 : 2);
  const auto time = [&](double tops) { return estimate.attention_operations / tops / 1e9; };

  const Curve curve = read_curve(flags.bench, flags.preset, flags.mask, flags.head_dim);
  const Speed speed = checked_speed(flags, curve, flags.bench);
  estimate.attention_after = time(speed.tops);
  note_source(estimate, "after", curve, speed);
  note_settings(flags, estimate, curve);

  if (flags.baseline_attention_ms) {
    estimate.attention_before = *flags.baseline_attention_ms;
  } else if (flags.baseline_tops) {
    estimate.attention_before = time(*flags.baseline_tops);
  } else {
    const std::string& path = flags.baseline_bench.empty() ? flags.bench : flags.baseline_bench;
    const Curve before = read_curve(path, flags.baseline_preset, flags.mask, flags.head_dim);
    const Speed baseline = checked_speed(flags, before, path);
    estimate.attention_before = time(baseline.tops);
    note_source(estimate, "before", before, baseline);
    if (before.machine != curve.machine) {
      estimate.notes.emplace_back("before and after were measured on different machines");
    }
  }
  estimate.other = other_time(flags, estimate.attention_before);
  return estimate;
}

// ---- Output ------------------------------------------------------------------------------------

void print_text(const EstimateFlags& flags, const Estimate& estimate) {
  std::cout << flags.layers << " layers, batch " << flags.batch << ", heads " << flags.heads << '/'
            << flags.kv_heads << ", dim " << flags.head_dim << ", " << flags.seq << " tokens, "
            << name_of(kMaskNames, flags.mask) << "; attention by "
            << name_of(kPresets, flags.preset);
  if (estimate.sources["after"]["machine"].is_string()) {
    std::cout << " on " << estimate.sources["after"]["machine"].get<std::string>();
  }
  std::cout << "\n\n";
  Table table({{"", Table::Align::kLeft}, {"before ms"}, {"after ms"}, {"speed-up"}});
  const auto add = [&](const char* name, double before, double after) {
    table.add_row({name, fixed(before, 3), fixed(after, 3), fixed(before / after, 2)});
  };
  add("attention", estimate.attention_before, estimate.attention_after);
  table.add_row({"everything else", fixed(estimate.other, 3), fixed(estimate.other, 3), "1.00"});
  add("whole", estimate.before(), estimate.after());
  table.print(std::cout);
  std::cout << "\nattention before: " << fixed(100 * estimate.share(), 1) << " % of the time\n"
            << "bound by Amdahl's law, were attention free: "
            << (estimate.other > 0 ? fixed(estimate.before() / estimate.other, 2) : "none") << '\n';
  for (const std::string& note : estimate.notes) std::cout << "note: " << note << '\n';
}

Json json_of(const EstimateFlags& flags, const Estimate& estimate) {
  return {{"layers", flags.layers},
          {"batch", flags.batch},
          {"heads", flags.heads},
          {"kv_heads", flags.kv_heads},
          {"head_dim", flags.head_dim},
          {"seq", flags.seq},
          {"mask", name_of(kMaskNames, flags.mask)},
          {"preset", name_of(kPresets, flags.preset)},
          {"attention_operations", estimate.attention_operations},
          {"attention_before_ms", estimate.attention_before},
          {"attention_after_ms", estimate.attention_after},
          {"attention_speedup", estimate.attention_before / estimate.attention_after},
          {"other_ms", estimate.other},
          {"whole_before_ms", estimate.before()},
          {"whole_after_ms", estimate.after()},
          {"speedup", estimate.before() / estimate.after()},
          {"attention_share", estimate.share()},
          {"amdahl_bound", estimate.other > 0 ? Json(estimate.before() / estimate.other) : Json()},
          {"measured", estimate.sources},
          {"notes", estimate.notes}};
}

// ---- Flags -------------------------------------------------------------------------------------

void require_positive(const char* flag, const std::optional<double>& value) {
  if (!value || (std::isfinite(*value) && *value > 0)) return;
  throw CLI::ValidationError(flag, scientific(*value) + " is not above 0 and finite");
}

void resolve(EstimateFlags& flags) {
  if (flags.kv_heads == 0) flags.kv_heads = flags.heads;
  if (flags.heads % flags.kv_heads != 0) {
    throw CLI::ValidationError(
        "--kv-heads",
        std::to_string(flags.kv_heads) + " does not divide --heads " + std::to_string(flags.heads));
  }
  require_positive("--baseline-attention-ms", flags.baseline_attention_ms);
  require_positive("--baseline-tops", flags.baseline_tops);
  require_positive("--tflops", flags.tflops);
  if (flags.other_flops && !(std::isfinite(*flags.other_flops) && *flags.other_flops >= 0)) {
    throw CLI::ValidationError("--other-flops",
                               scientific(*flags.other_flops) + " is negative or not finite");
  }
  if (flags.attention_share && !(*flags.attention_share > 0 && *flags.attention_share <= 1)) {
    throw CLI::ValidationError("--attention-share",
                               fixed(*flags.attention_share, 6) + " is not above 0 and at most 1");
  }
  if (!flags.other_flops && !flags.attention_share) {
    throw CLI::ValidationError("give --other-flops with --tflops, or --attention-share");
  }
}

ExitCode run_estimate(EstimateFlags& flags) {
  resolve(flags);
  const Estimate estimate = estimate_of(flags);
  if (flags.json) {
    print_json(json_of(flags, estimate));
  } else {
    print_text(flags, estimate);
  }
  return kOk;
}

CLI::Option* add_size(CLI::App& app, const char* flag, int32_t& value, int high, const char* help) {
  return app.add_option(flag, value, help)
      ->check(CLI::Range(1, high).description(""))
      ->type_name("1.." + std::to_string(high));
}

}  // namespace

Command add_estimate(CLI::App& program) {
  CLI::App* app = program.add_subcommand("estimate", "Estimate the speed-up of a whole model");
  const auto flags = std::make_shared<EstimateFlags>();
  add_footer(*app, kFooter);
  add_size(*app, "--layers", flags->layers, 100000, "Layers with attention")->required();
  add_size(*app, "--heads", flags->heads, 65536, "Query heads")->required();
  add_size(*app, "--kv-heads", flags->kv_heads, 65536, "Key heads (default: as --heads)");
  add_size(*app, "--head-dim", flags->head_dim, 256, "Channels of a head")->required();
  add_size(*app, "--seq", flags->seq, 1 << 30, "Tokens of queries and of keys")->required();
  add_size(*app, "--batch", flags->batch, 1 << 24, "Sequences (default: 1)");
  add_enumerant_flag(*app, "--mask", "Mask (default: causal)", kMaskNames,
                     [flags](int32_t value) { flags->mask = value; });
  app->add_option("--bench", flags->bench, "Measured speed, as `bench --json` writes it")
      ->type_name("FILE")
      ->required();
  add_enumerant_flag(*app, "--preset", "Preset after (default: sage2_8b)", kPresets,
                     [flags](int32_t value) { flags->preset = value; });
  auto* ms = app->add_option("--baseline-attention-ms", flags->baseline_attention_ms,
                             "Measured time of attention before, of all layers");
  auto* tops =
      app->add_option("--baseline-tops", flags->baseline_tops, "Speed of attention before");
  auto* file = app->add_option("--baseline-bench", flags->baseline_bench,
                               "Measured speed before (default: --bench)");
  ms->type_name("FLOAT");
  tops->type_name("FLOAT")->excludes(ms);
  file->type_name("FILE")->excludes(ms)->excludes(tops);
  add_enumerant_flag(*app, "--baseline-preset", "Preset before (default: exact)", kPresets,
                     [flags](int32_t value) { flags->baseline_preset = value; });
  auto* flops = app->add_option("--other-flops", flags->other_flops,
                                "Floating-point operations of all but attention");
  auto* rate = app->add_option("--tflops", flags->tflops, "10^12 of them a second");
  auto* share = app->add_option("--attention-share", flags->attention_share,
                                "Share of the time that attention took before, 0..1");
  flops->type_name("FLOAT")->needs(rate);
  rate->type_name("FLOAT")->needs(flops);
  share->type_name("FLOAT")->excludes(flops);
  app->add_flag("--extrapolate", flags->extrapolate,
                "Go more than a factor of 2 beyond the lengths that were measured");
  add_json_flag(*app, flags->json);
  return {app, [flags] { return run_estimate(*flags); }};
}

}  // namespace sageattn_cli
