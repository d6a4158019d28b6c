// The CUDA backend against the CPU backend, on a GPU, through the C API.
//
//   gpu_check [--only selftest|grid|checks|shapes|large]... [--cases N] [--seed N] [--device N]
//             [--numerics TEXT] [--kernel mma_sync|wgmma] [--case N] [--threads N] [--quick] [--verbose]
//
//   selftest  sageattn_selftest, and what its log says
//   grid      many numerics over a grid of small problems; the codes in the workspace, too
//   checks    capture, threads, streams, workspace edges, NaN and Inf, hostile lengths
//   shapes    what users of such libraries reported as wrong; needs some 3 GB
//   large     the same beyond 2^31 and 2^32 elements; needs some 30 GB
// --numerics, --kernel and --case: those whose name contains the text, those that run by wgmma or not,
// and that problem of the grid. --quick:
// three problems for every kind of kernel instead of the grid, for slow tools such as
// compute-sanitizer.
//
// Prints tables and the failures; exits with 0 if there are none, 77 without a usable GPU.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "src/core/error.h"
#include "tests/gpu/check_table.h"
#include "tests/gpu/compare.h"

using namespace sageattn_test;

namespace {

struct Options {
  std::vector<std::string> only;
  int cases, threads, only_case;
  uint64_t seed;
  std::string numerics, kernel;
  bool quick, verbose;

  explicit Options(Flags& flags)
      : only(flags.values("--only")),
        cases(flags.number("--cases", 120)),
        threads(flags.number(
            "--threads", std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 1, 16))),
        only_case(flags.number("--case", -1)),
        seed(static_cast<uint64_t>(flags.number("--seed", 1))),
        numerics(flags.value("--numerics", "")),
        kernel(flags.value("--kernel", "")),
        quick(flags.take("--quick")),
        verbose(flags.take("--verbose")) {
    if (!kernel.empty() && kernel != "mma_sync" && kernel != "wgmma") {
      sageattn::fail(SAGEATTN_E_INVALID_ARGUMENT, "--kernel = %s: must be mma_sync or wgmma",
                     kernel.c_str());
    }
    if (only_case >= 0 || quick) only = {"grid"};
  }
  bool wants(const char* part) const {
    return only.empty() || std::find(only.begin(), only.end(), part) != only.end();
  }
  bool admits(const Numerics& n) const {
    const bool wgmma = n.desc.kernel == SAGEATTN_KERNEL_WGMMA;
    return n.name.find(numerics) != std::string::npos &&
           (kernel.empty() || kernel == (wgmma ? "wgmma" : "mma_sync"));
  }
};

// Counts failures and prints each.
class Failures {
 public:
  void add(const std::string& what, const std::string& message) {
    ++count_;
    std::printf("FAILED %s: %s\n", what.c_str(), message.c_str());
    std::fflush(stdout);
  }
  int count() const { return count_; }

 private:
  int count_ = 0;
};

std::vector<Numerics> all_numerics(int32_t arch) {
  std::vector<Numerics> list;
  using Desc = sageattn_attn_desc;
  const auto add = [&](const char* name, int32_t preset, const std::function<void(Desc&)>& change) {
    Numerics numerics = gpu_preset(preset, arch);
    if (name[0] != '\0') numerics.name += std::string("+") + name;
    change(numerics.desc);
    list.push_back(numerics);
  };
  constexpr int32_t k1 = SAGEATTN_PRESET_SAGE1, k8B = SAGEATTN_PRESET_SAGE2_8B,
                    k4B = SAGEATTN_PRESET_SAGE2_4B, kPP = SAGEATTN_PRESET_SAGE2PP;
  for (const int32_t preset :
       {int32_t{SAGEATTN_PRESET_AUTO}, k1, k8B, k4B, kPP, int32_t{SAGEATTN_PRESET_EXACT}}) {
    add("", preset, [](Desc&) {});
  }
  for (const int32_t preset : {k1, k8B}) {
    for (int32_t g = SAGEATTN_GRANULARITY_PER_THREAD; g <= SAGEATTN_GRANULARITY_PER_BLOCK; ++g) {
      add(("granularity" + std::to_string(g)).c_str(), preset,
          [&](Desc& d) { d.qk_granularity = g; });
    }
    add("i4", preset, [](Desc& d) { d.qk_format = SAGEATTN_QK_I4; });
    add("smooth_q", preset, [](Desc& d) { d.smooth_q = SAGEATTN_SMOOTH_ON; });
    add("no_smooth_k", preset, [](Desc& d) { d.smooth_k = SAGEATTN_SMOOTH_OFF; });
    add("smooth_q_only", preset, [](Desc& d) {
      d.smooth_q = SAGEATTN_SMOOTH_ON;
      d.smooth_k = SAGEATTN_SMOOTH_OFF;
    });
    add("hadamard", preset, [](Desc& d) { d.rotation = SAGEATTN_ROTATION_HADAMARD; });
    add("row_sum_p", preset, [](Desc& d) { d.row_sum = SAGEATTN_ROW_SUM_P; });
    add("row_sum_rounded", preset, [](Desc& d) { d.row_sum = SAGEATTN_ROW_SUM_ROUNDED_P; });
    add("v_off", preset, [](Desc& d) { d.smooth_v = SAGEATTN_SMOOTH_V_OFF; });
    add("v_sequence", preset, [](Desc& d) { d.smooth_v = SAGEATTN_SMOOTH_V_SEQUENCE; });
    add("accum_f16", preset, [](Desc& d) { d.pv_accum = SAGEATTN_PV_ACCUM_F16; });
  }
  add("v_scale_group", k8B, [](Desc& d) {
    d.smooth_v = SAGEATTN_SMOOTH_V_OFF;
    d.v_scale = SAGEATTN_V_SCALE_GROUP;
  });
  add("v_group", kPP, [](Desc& d) { d.smooth_v = SAGEATTN_SMOOTH_V_GROUP; });
  add("i4_hadamard", k4B, [](Desc& d) { d.rotation = SAGEATTN_ROTATION_HADAMARD; });
  add("i4", kPP, [](Desc& d) { d.qk_format = SAGEATTN_QK_I4; });
  if (arch != 90) return list;

  // The same by wgmma.
  const auto add_wgmma = [&](const char* suffix, int32_t preset, const auto& change) {
    Numerics numerics = wgmma_preset(preset);
    numerics.name += suffix;
    change(numerics.desc);
    list.push_back(numerics);
  };
  for (const int32_t preset : {k8B, k4B}) {
    add_wgmma("", preset, [](Desc&) {});
    add_wgmma("_smooth_q", preset, [](Desc& d) {
      d.smooth_q = d.smooth_q == SAGEATTN_SMOOTH_ON ? SAGEATTN_SMOOTH_OFF : SAGEATTN_SMOOTH_ON;
    });
  }
  add_wgmma("_no_smooth_k", k8B, [](Desc& d) { d.smooth_k = SAGEATTN_SMOOTH_OFF; });
  add_wgmma("_v_off", k8B, [](Desc& d) { d.smooth_v = SAGEATTN_SMOOTH_V_OFF; });
  add_wgmma("_v_sequence", k8B, [](Desc& d) { d.smooth_v = SAGEATTN_SMOOTH_V_SEQUENCE; });
  add_wgmma("_interval128", k8B, [](Desc& d) { d.promotion_interval = 128; });
  add_wgmma("_interval512", k8B, [](Desc& d) { d.promotion_interval = 512; });
  add_wgmma("_hadamard", k8B, [](Desc& d) { d.rotation = SAGEATTN_ROTATION_HADAMARD; });
  add_wgmma("_per_block", k8B, [](Desc& d) { d.qk_granularity = SAGEATTN_GRANULARITY_PER_BLOCK; });
  return list;
}

// Whether the library runs these numerics on no problem at all. Of all others some must run.
bool never_runs(const Numerics& n, int32_t arch) {
  const bool fp8 = n.name.starts_with("SAGE2");
  return n.name.ends_with("+row_sum_p") || (fp8 && arch < 89);
}

// One numerics for each attention kernel with and without smoothed queries.
std::vector<Numerics> quick_numerics(int32_t arch) {
  std::vector<Numerics> list = all_numerics(arch);
  std::erase_if(list, [&](const Numerics& n) {
    const std::string suffix = n.name.substr(std::min(n.name.find('+'), n.name.size()));
    return n.name.starts_with("AUTO") ||
           (suffix != "" && suffix != "+smooth_q" && suffix != "+i4" && suffix != "+accum_f16" &&
            suffix != "+hadamard" && suffix != "+wgmma" && suffix != "+wgmma_smooth_q");
  });
  return list;
}

// Packed and dense, causal and not, short and odd, up to 192 channels.
std::vector<Problem> quick_problems() {
  Problem causal;
  causal.id = 0;
  causal.seed = 1;
  causal.shape = {2, 1, 64, 64};
  causal.q_dtype = causal.kv_dtype = causal.out_dtype = SAGEATTN_BF16;
  causal.mask.kind = SAGEATTN_MASK_CAUSAL_BOTTOM_RIGHT;
  causal.qo_lens = {70, 70};
  causal.kv_lens = {130, 130};
  causal.k_view = causal.out_view = View::Padded;

  Problem packed = causal;
  packed.id = 1;
  packed.shape = {2, 2, 128, 80};
  packed.q_dtype = packed.kv_dtype = packed.out_dtype = SAGEATTN_F16;
  packed.mask.kind = SAGEATTN_MASK_NONE;
  packed.batch_mode = SAGEATTN_BATCH_VARLEN;
  packed.qo_lens = {5, 0, 140};
  packed.kv_lens = {77, 40, 65};
  packed.seqused = {70, 0, 65};
  packed.gap = 3;
  packed.k_view = packed.out_view = View::Default;

  Problem wide = causal;
  wide.id = 2;
  wide.shape = {1, 1, 192, 136};
  wide.mask = {SAGEATTN_MASK_WINDOW, 30, 5};
  wide.qo_lens = wide.kv_lens = {100};
  wide.v_view = View::Transposed;
  return {causal, packed, wide};
}

// What the grid is too small for: tasks of statistics with several chunks (from 2049 keys on), with many,
// and of K and V apart (from 8192 keys on), and corrections of scores for some of the heads at a time.
// The last one takes 4 bytes of these for 65,552 keys by 16 tiles of queries by 20 heads: 84 MB, of
// which the smallest workspace holds 64.
std::vector<Problem> long_problems(int first_id) {
  Problem several;
  several.seed = 11;
  several.shape = {2, 1, 64, 64};
  several.q_dtype = several.kv_dtype = several.out_dtype = SAGEATTN_BF16;
  several.qo_lens = {70, 70};
  several.kv_lens = {2100, 2100};

  Problem many = several;
  many.seed = 12;
  many.shape = {2, 2, 40, 64};
  many.q_dtype = many.kv_dtype = many.out_dtype = SAGEATTN_F16;
  many.batch_mode = SAGEATTN_BATCH_VARLEN;
  many.qo_lens = {65, 3};
  many.kv_lens = {5000, 100};
  many.seqused = {4990, 100};
  many.gap = 3;

  Problem apart = several;
  apart.seed = 13;
  apart.shape = {1, 1, 64, 64};
  apart.mask.kind = SAGEATTN_MASK_CAUSAL_BOTTOM_RIGHT;
  apart.qo_lens = {130};
  apart.kv_lens = {8300};

  Problem runs = many;
  runs.seed = 14;
  runs.shape = {20, 1, 64, 64};
  runs.qo_lens = {2048, 1};
  runs.kv_lens = {16, 65536};
  runs.seqused = {};
  runs.gap = 0;

  std::vector<Problem> problems = {several, many, apart, runs};
  for (Problem& p : problems) p.id = first_id++;
  return problems;
}

// ---- The grid ----------------------------------------------------------------------------------

struct GridRow {
  int counts[3] = {};
  int64_t codes = 0;
  Worst worst;
  std::string skipped;
};

CaseReport check_one(const Gpu& gpu, const Problem& problem, const Numerics& numerics) {
  CaseReport report;
  try {
    report = check_case(gpu, problem, numerics, make_data(problem));
  } catch (const sageattn::Error& error) {
    report.verdict = CaseReport::kFailed;
    report.message = error.message;
  } catch (const std::exception& exception) {
    report.verdict = CaseReport::kFailed;
    report.message = exception.what();
  }
  return report;
}

// Every numerics with every problem, some at a time. Returns how many cases ran.
int check_grid(const Gpu& gpu, const Options& options, Failures& failures) {
  const int32_t arch = gpu.device.choice.arch;
  std::vector<Numerics> numerics = options.quick ? quick_numerics(arch) : all_numerics(arch);
  std::erase_if(numerics, [&](const Numerics& n) { return !options.admits(n); });
  std::vector<Problem> problems =
      options.quick ? quick_problems() : make_grid(options.cases, options.seed);
  if (!options.quick) {
    for (const Problem& p : long_problems(options.cases)) problems.push_back(p);
  }
  std::erase_if(problems, [&](const Problem& p) {
    return options.only_case >= 0 && p.id != options.only_case;
  });

  std::vector<GridRow> rows(numerics.size());
  std::mutex mutex;  // of the rows and of printing
  std::atomic<size_t> next{0};
  const auto work = [&] {
    for (size_t i = next++; i < numerics.size() * problems.size(); i = next++) {
      const Numerics& n = numerics[i / problems.size()];
      const Problem& p = problems[i % problems.size()];
      const CaseReport report = check_one(gpu, p, n);
      const std::lock_guard<std::mutex> lock(mutex);
      GridRow& row = rows[i / problems.size()];
      ++row.counts[report.verdict];
      row.codes += report.codes;
      row.worst.take(report.worst);
      if (report.verdict == CaseReport::kSkipped) row.skipped = report.message;
      if (report.verdict == CaseReport::kFailed) failures.add(describe(p, n), report.message);
    }
  };
  std::vector<std::thread> threads;
  for (int i = 1; i < options.threads; ++i) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();

  int ran = 0;
  std::printf("%-32s %6s %6s %7s %12s   %s\n", "numerics", "passed", "failed", "skipped",
              "codes equal", "worst / allowed: element, rms, lse");
  for (size_t i = 0; i < rows.size(); ++i) {
    const GridRow& row = rows[i];
    ran += row.counts[CaseReport::kPassed];
    std::printf("%-32s %6d %6d %7d %12lld   %.3f %.3f %.3f\n", numerics[i].name.c_str(),
                row.counts[CaseReport::kPassed], row.counts[CaseReport::kFailed],
                row.counts[CaseReport::kSkipped], static_cast<long long>(row.codes), row.worst.hard,
                row.worst.rms, row.worst.lse);
    if (options.verbose && !row.skipped.empty()) {
      std::printf("    skipped, for one: %s\n", row.skipped.c_str());
    }
    const bool all_skipped = row.counts[CaseReport::kSkipped] == static_cast<int>(problems.size());
    if (all_skipped && options.only_case < 0 && !never_runs(numerics[i], arch)) {
      failures.add(numerics[i].name, "every problem was skipped, for one: " + row.skipped);
    }
  }
  return ran;
}

// ---- Named checks ------------------------------------------------------------------------------

// A table of checks by presets. Returns how many passed. Only `large` checks may find the device too
// small: elsewhere a lack of memory is a fault of ours.
int check_named(const Gpu& gpu, const Options& options, const std::vector<NamedCheck>& checks,
                Failures& failures, bool large = false) {
  const int32_t arch = gpu.device.choice.arch;
  std::vector<Numerics> presets;
  for (const int32_t preset :
       {SAGEATTN_PRESET_SAGE1, SAGEATTN_PRESET_SAGE2_8B, SAGEATTN_PRESET_SAGE2_4B,
        SAGEATTN_PRESET_SAGE2PP, SAGEATTN_PRESET_EXACT}) {
    presets.push_back(gpu_preset(preset, arch));
  }
  if (arch == 90) {
    for (const int32_t preset : {SAGEATTN_PRESET_SAGE2_8B, SAGEATTN_PRESET_SAGE2_4B}) {
      presets.push_back(wgmma_preset(preset));
    }
  }
  std::erase_if(presets, [&](const Numerics& n) { return !options.admits(n); });
  std::printf("\n%-32s", "");
  for (const Numerics& n : presets) std::printf(" %-18s", n.name.c_str());
  std::printf(" seconds\n");

  int passed = 0;
  std::vector<std::pair<std::string, std::string>> failed, skipped;  // shown below the table
  for (const NamedCheck& check : checks) {
    std::printf("%-32s", check.name);
    const auto start = std::chrono::steady_clock::now();
    for (const Numerics& n : presets) {
      const std::string what = std::string(check.name) + ", " + n.name;
      const char* cell = "FAILED";
      std::string message;
      try {
        message = check.run(gpu, n);
        if (message.empty()) cell = "ok";
      } catch (const Skipped& reason) {
        cell = "skipped";
        skipped.emplace_back(what, reason.what());
      } catch (const sageattn::Error& error) {
        message = error.message;
        if (large && error.status == SAGEATTN_E_OUT_OF_MEMORY) {
          cell = "skipped";
          skipped.emplace_back(what, message);
        }
      } catch (const std::exception& exception) {
        message = exception.what();
      }
      passed += cell[0] == 'o' ? 1 : 0;
      if (cell[0] == 'F') failed.emplace_back(what, message);
      std::printf(" %-18s", cell);
      std::fflush(stdout);
    }
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    std::printf(" %.1f\n", elapsed.count());
  }
  for (const auto& [what, reason] : skipped) {
    std::printf("skipped %s: %s\n", what.c_str(), reason.c_str());
  }
  for (const auto& [what, message] : failed) failures.add(what, message);
  return passed;
}

// Returns how many cases passed.
int check_selftest(int ordinal, Failures& failures) {
  sageattn_context_desc desc = {};
  desc.struct_size = sizeof desc;
  desc.backend = SAGEATTN_BACKEND_CUDA;
  desc.device = ordinal;
  int passed = 0;
  desc.log_user = &passed;
  desc.log = [](void* user, int32_t, const char* message) {
    const std::string line = message;
    if (!line.starts_with("selftest: ")) return;
    std::printf("%s\n", message);
    if (line.find(": passed") != std::string::npos) ++*static_cast<int*>(user);
  };
  sageattn_error error = {};
  error.struct_size = sizeof error;
  sageattn_context* raw = nullptr;
  must(sageattn_context_create(&desc, &raw, &error), error);
  const ContextOwner context(raw);
  if (sageattn_selftest(raw, &error) != SAGEATTN_OK) failures.add("selftest", error.message);
  return passed;
}

int run(Flags& flags) {
  const int ordinal = flags.number("--device", 0);
  const Options options(flags);
  flags.finish();
  const Gpu gpu(ordinal);
  char report[4096];
  if (sageattn_context_report(gpu.context(), report, sizeof report, nullptr, nullptr) ==
      SAGEATTN_OK) {
    std::printf("%s\n", report);
  }

  int passed = 0;
  Failures failures;
  if (options.wants("checks")) passed += check_named(gpu, options, first_checks(), failures);
  if (options.wants("selftest")) passed += check_selftest(ordinal, failures);
  if (options.wants("grid")) passed += check_grid(gpu, options, failures);
  if (options.wants("checks")) passed += check_named(gpu, options, general_checks(), failures);
  if (options.wants("shapes")) passed += check_named(gpu, options, reported_shapes(), failures);
  if (options.wants("large")) passed += check_named(gpu, options, large_shapes(), failures, true);
  if (passed == 0) failures.add("gpu_check", "nothing was checked");
  std::printf("\n%d passed, %d failures on %s (sm_%d)\n", passed, failures.count(), gpu.device.name,
              gpu.device.capability);
  return failures.count() == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) { return guarded_main(argc, argv, run); }
