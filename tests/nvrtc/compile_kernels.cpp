// Compiles every kernel of ptx/kernels/kernels.def for every arch with every set of macros that a
// plan can ask for, and compares what it needs with tests/nvrtc/resources.tsv. No GPU.
//
//   test_kernels_compile [--all] [--update] [--filter TEXT]... [--presets HEAD_DIM]
//                        [--shard I/N] [--jobs N] [--cubins DIR]
//
//   --all      also the sets of macros that no plan asks for; some need not compile for each arch
//   --update   writes what was found into resources.tsv (of what the options below leave, only)
//   --filter   only kernels whose description has TEXT, e.g. "attn_f16 for sm_80 (D_QK=64"
//   --presets  only kernels of presets with that head_dim
//   --shard    the I-th of N parts, from 0
//   --cubins   keeps the cubins there, with a table of them, rows.tsv; compares nothing
//
// With the build of NVRTC that resources.tsv names every figure must be equal, with any other the
// shared memory. With every build: no spill, no wgmma that waits for another, and no more shared memory
// than a block can have.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "src/core/error.h"
#include "src/core/select.h"
#include "src/core/validate.h"
#include "src/cuda/kernels.h"
#include "src/jit/nvrtc.h"
#include "src/jit/options.h"
#include "src/jit/ptxas_log.h"

using namespace sageattn;
using namespace sageattn::jit;

namespace {

constexpr int kFailed = 1;
constexpr int kUsageError = 2;
constexpr int kSkipped = 77;
constexpr const char* kTable = SAGEATTN_TEST_DIR "/nvrtc/resources.tsv";
constexpr const char* kColumns =
    "kernel\tmacros\tarch\tregisters\tspill_bytes\tstatic_smem\tdynamic_smem";
enum { kRegisters = 3, kStaticSmem = 5 };

struct Arch {
  int number;
  int max_shared_bytes;  // a block, if it asks for them (CUDA C++ Programming Guide, table of
                         // technical specifications)
};
constexpr Arch kArchs[] = {
    {80, 163 * 1024}, {86, 99 * 1024}, {89, 99 * 1024}, {90, 227 * 1024}, {120, 99 * 1024}};

// C7512 to C7516: wgmma instructions are serialized. C7517: a wait is injected.
constexpr int kForbiddenAdvisories[] = {7512, 7515, 7517};

struct Options {
  bool all = false, update = false;
  std::vector<std::string> filters;
  size_t shard = 0, shards = 1;
  size_t jobs = std::max(std::thread::hardware_concurrency(), 1u);
  std::string cubins;
  int preset_head_dim = 0;
};

// What plans ask of one specialisation.
struct Use {
  int threads = 0;
  int shared_bytes = 0;  // the most that a plan asks for
  std::set<std::string> presets;
};

// One specialisation of a kernel for one arch, and what became of it.
struct Job {
  const KernelSpec* kernel;
  std::string arch_text;  // "sm_90a"
  std::vector<Macro> macros;
  int max_shared_bytes;
  std::optional<Use> use;  // none: no plan asks for this specialisation

  bool chosen = false, compiled = false;
  std::string row{};  // of the table
  PtxasLog resources{};
  float ms = 0;
  std::string build{};
  std::vector<std::string> faults{};

  std::string text() const { return kernel_text(*kernel, arch_text, macros); }
  std::string macro_text() const {
    std::string text;
    for (const Macro& macro : macros) {
      text += (text.empty() ? "" : " ") + macro.name + "=" + std::to_string(macro.value);
    }
    return text.empty() ? "-" : text;
  }
  // Of the row: what it describes.
  std::string key() const { return kernel->name + ("\t" + macro_text() + "\t" + arch_text); }
};

// ---- What plans ask for --------------------------------------------------------------------------

using Uses = std::map<std::string, Use>;  // by Job::key()

// Adds the kernels of the desc's plan for each arch that can run it. Fails if a plan asks for what
// kernels.def does not have.
void add_uses(const sageattn_attn_desc& desc, const std::string& preset, Uses& uses) {
  for (const Arch& arch : kArchs) {
    PlanConfig plan{};
    try {
      plan = check_attn_desc(desc, SAGEATTN_BACKEND_CUDA, arch.number);
      cuda::check_supported(plan);
    } catch (const Error&) {
      continue;  // no such plan
    }
    for (const cuda::KernelUse& asked : cuda::kernels_of(plan)) {
      const KernelSpec& kernel = find_kernel(kernel_list(), asked.name);
      const std::string arch_text = arch_name(kernel, arch.number);
      if (arch_text.empty()) {
        fail(SAGEATTN_E_INTERNAL, "a plan for sm_%d asks for %s, which is made for %s", arch.number,
             kernel.name, kernel.archs);
      }
      const Job job{&kernel, arch_text, resolve_macros(kernel, asked.macros), 0, {}};
      Use& use = uses[job.key()];
      use.threads = asked.threads;
      use.shared_bytes = std::max(use.shared_bytes, asked.shared_bytes);
      if (!preset.empty()) use.presets.insert(preset);
    }
  }
}

sageattn_attn_desc smallest(sageattn_attn_desc desc, int head_dim) {
  desc.struct_size = sizeof desc;
  desc.q_dtype = SAGEATTN_BF16;
  desc.num_qo_heads = desc.max_qo_len = desc.max_kv_len = 1;
  desc.head_dim = head_dim;
  return desc;
}

Uses uses_of_presets(int head_dim) {
  const std::pair<const char*, int32_t> presets[] = {{"sage1", SAGEATTN_PRESET_SAGE1},
                                                     {"sage2_8b", SAGEATTN_PRESET_SAGE2_8B},
                                                     {"sage2_4b", SAGEATTN_PRESET_SAGE2_4B},
                                                     {"sage2pp", SAGEATTN_PRESET_SAGE2PP},
                                                     {"exact", SAGEATTN_PRESET_EXACT}};
  Uses uses;
  for (const auto& [name, preset] : presets) {
    add_uses(smallest(preset_desc(preset), head_dim), name, uses);
  }
  return uses;
}

// Of every plan that differs in anything that may decide about kernels.
Uses uses_of_plans() {
  Uses uses;
  const auto each = [](std::initializer_list<int32_t> values, auto body) {
    for (const int32_t value : values) body(value);
  };
  const sageattn_attn_desc exact = smallest(preset_desc(SAGEATTN_PRESET_EXACT), 0);
  sageattn_attn_desc desc = smallest({}, 0);
  // clang-format off
  each({64, 128, 256}, [&](int32_t d) { desc.head_dim = d;
  each({64, 128, 256}, [&](int32_t d_v) { desc.head_dim_v = d_v;
  each({SAGEATTN_F16, SAGEATTN_BF16}, [&](int32_t dtype) { desc.q_dtype = dtype;
  each({SAGEATTN_MASK_NONE, SAGEATTN_MASK_CAUSAL_BOTTOM_RIGHT}, [&](int32_t mask) { desc.mask = mask;
    sageattn_attn_desc unquantized = exact;
    unquantized.head_dim = d, unquantized.head_dim_v = d_v;
    unquantized.q_dtype = dtype, unquantized.mask = mask;
    add_uses(unquantized, "", uses);
    each({SAGEATTN_QK_I8, SAGEATTN_QK_I4}, [&](int32_t qk) { desc.qk_format = qk;
    each({SAGEATTN_PV_E4M3, SAGEATTN_PV_F16}, [&](int32_t pv) { desc.pv_format = pv;
    each({SAGEATTN_PV_ACCUM_AUTO, SAGEATTN_PV_ACCUM_F16}, [&](int32_t sum) { desc.pv_accum = sum;
    each({SAGEATTN_KERNEL_AUTO, SAGEATTN_KERNEL_MMA_SYNC}, [&](int32_t k) { desc.kernel = k;
    each({SAGEATTN_SMOOTH_ON, SAGEATTN_SMOOTH_OFF}, [&](int32_t on) { desc.smooth_q = on;
    each({SAGEATTN_SMOOTH_ON, SAGEATTN_SMOOTH_OFF}, [&](int32_t on) { desc.smooth_k = on;
    each({SAGEATTN_SMOOTH_V_OFF, SAGEATTN_SMOOTH_V_SEQUENCE, SAGEATTN_SMOOTH_V_GROUP},
         [&](int32_t v) { desc.smooth_v = v;
    each({SAGEATTN_GRANULARITY_PER_THREAD, SAGEATTN_GRANULARITY_PER_BLOCK},
         [&](int32_t granularity) { desc.qk_granularity = granularity;
      add_uses(desc, "", uses);
    }); }); }); }); }); }); }); });
  }); }); }); });
  // clang-format on
  return uses;
}

std::vector<Job> list_jobs() {
  const Uses uses = uses_of_plans();
  std::vector<Job> jobs;
  for (const KernelSpec& kernel : kernel_list()) {
    for (const std::vector<Macro>& macros : macro_sets(kernel)) {
      for (const Arch& arch : kArchs) {
        const std::string arch_text = arch_name(kernel, arch.number);
        if (arch_text.empty()) continue;
        Job job{&kernel, arch_text, macros, arch.max_shared_bytes, {}};
        const auto found = uses.find(job.key());
        if (found != uses.end()) job.use = found->second;
        jobs.push_back(std::move(job));
      }
    }
  }
  return jobs;
}

// Every value of every macro must be asked for by some plan on some arch: else uses_of_plans does
// not vary what decides about it, and specialisations would go untested, or nobody needs it.
void check_reach(std::vector<Job>& jobs) {
  std::set<std::string> asked, reported;
  const auto value_of = [](const Job& job, const Macro& macro) {
    return job.kernel->name + (" with " + macro.name + "=" + std::to_string(macro.value));
  };
  for (const Job& job : jobs) {
    if (!job.use) continue;
    asked.insert(job.kernel->name);
    for (const Macro& macro : job.macros) asked.insert(value_of(job, macro));
  }
  const auto check = [&](Job& job, const std::string& what) {
    if (asked.count(what) != 0 || !reported.insert(what).second) return;
    job.faults.push_back("no plan asks for " + what);
  };
  for (Job& job : jobs) {
    check(job, job.kernel->name);
    for (const Macro& macro : job.macros) check(job, value_of(job, macro));
  }
}

// ---- Compiling -----------------------------------------------------------------------------------

std::string cubin_name(const Job& job) {
  std::string name = job.kernel->name + ("-" + job.macro_text() + "-" + job.arch_text + ".cubin");
  std::replace(name.begin(), name.end(), ' ', ',');
  return name;
}

void keep_cubin(const Job& job, const Bytes& cubin, const std::string& folder) {
  std::ofstream file(folder + "/" + cubin_name(job), std::ios::binary);
  file.write(reinterpret_cast<const char*>(cubin.data()),
             static_cast<std::streamsize>(cubin.size()));
  if (!file.flush()) fail(SAGEATTN_E_INTERNAL, "%s: cannot be written", folder.c_str());
}

void compile(Job& job, const Nvrtc& nvrtc, const std::string& cubins) {
  const auto sources = embedded_sources();
  const auto main = std::find_if(sources.begin(), sources.end(), [&](const SourceFile& source) {
    return std::strcmp(source.name, job.kernel->source) == 0;
  });
  if (main == sources.end()) return job.faults.push_back("has no source");
  std::vector<std::string> options = compile_options(*job.kernel, job.arch_text, job.macros);
  for (const std::string& option : session_options(nvrtc.version())) options.push_back(option);

  const Compilation done = nvrtc.compile(*main, sources, options);
  job.ms = done.ms;
  job.build = done.build;
  if (!done.ok) return job.faults.push_back("does not compile: " + done.error + "\n" + done.log);
  job.resources = parse_ptxas_log(done.log, job.kernel->entry);
  if (!job.resources.found) return job.faults.push_back("ptxas says nothing of it:\n" + done.log);
  job.compiled = true;
  if (!cubins.empty()) keep_cubin(job, done.cubin, cubins);

  const PtxasLog& found = job.resources;
  const int spills = found.spill_stores + found.spill_loads;
  job.row = job.key() + "\t" + std::to_string(found.registers) + "\t" + std::to_string(spills) +
            "\t" + std::to_string(found.smem_bytes) + "\t" +
            (job.use ? std::to_string(job.use->shared_bytes) : "-");
  if (spills != 0) job.faults.push_back("spills " + std::to_string(spills) + " bytes a thread");
  const int shared = found.smem_bytes + (job.use ? job.use->shared_bytes : 0);
  if (shared > job.max_shared_bytes) {
    job.faults.push_back("takes " + std::to_string(shared) + " bytes of shared memory, " +
                         std::to_string(found.smem_bytes) +
                         " of them static; a block of that arch has at most " +
                         std::to_string(job.max_shared_bytes));
  }
  for (const PtxasAdvisory& advisory : found.advisories) {
    if (found.wgmma_serialized() ||
        std::count(std::begin(kForbiddenAdvisories), std::end(kForbiddenAdvisories),
                   advisory.code) != 0) {
      job.faults.push_back(advisory.line);
    }
  }
}

void compile_all(std::vector<Job>& jobs, const Nvrtc& nvrtc, const Options& options) {
  std::vector<Job*> chosen;
  for (Job& job : jobs) {
    if (job.chosen) chosen.push_back(&job);
  }
  std::atomic<size_t> next{0};
  const auto work = [&] {
    for (size_t i; (i = next.fetch_add(1)) < chosen.size();) {
      try {
        compile(*chosen[i], nvrtc, options.cubins);
      } catch (const Error& error) {
        chosen[i]->faults.push_back(error.message);
      }
    }
  };
  std::vector<std::thread> threads(options.jobs);
  for (std::thread& thread : threads) thread = std::thread(work);
  for (std::thread& thread : threads) thread.join();
}

// ---- The table -----------------------------------------------------------------------------------

struct Table {
  std::string build;                        // first line: "# NVRTC 13.0 CL-36424714"
  std::map<std::string, std::string> rows;  // by Job::key()
};

std::vector<std::string> fields_of(const std::string& row) {
  std::vector<std::string> fields;
  std::istringstream stream(row);
  for (std::string field; std::getline(stream, field, '\t');) fields.push_back(field);
  return fields;
}

Table read_table() {
  Table table;
  std::ifstream file(kTable);
  std::string line;
  std::getline(file, table.build);
  std::getline(file, line);  // the columns
  while (std::getline(file, line)) {
    const std::vector<std::string> fields = fields_of(line);
    if (fields.size() == 7) table.rows[fields[0] + "\t" + fields[1] + "\t" + fields[2]] = line;
  }
  return table;
}

void write_table(const std::vector<Job>& jobs, const Table& old, const std::string& build) {
  std::ofstream file(kTable, std::ios::trunc);
  file << build << "\n" << kColumns << "\n";
  for (const Job& job : jobs) {
    if (!job.use) continue;
    const auto before = old.rows.find(job.key());
    if (job.compiled) {
      file << job.row << "\n";
    } else if (!job.chosen && before != old.rows.end()) {
      file << before->second << "\n";
    }
  }
  if (!file.flush()) fail(SAGEATTN_E_INTERNAL, "%s: cannot be written", kTable);
}

// For tests/check_sass.py: DIR/rows.tsv says which cubin is which.
void write_rows(const std::vector<Job>& jobs, const Uses& presets, const std::string& build,
                const std::string& folder) {
  std::ofstream file(folder + "/rows.tsv", std::ios::trunc);
  file << build << "\n" << kColumns << "\tthreads\tpresets\tcubin\n";
  for (const Job& job : jobs) {
    if (!job.compiled) continue;
    const auto found = presets.find(job.key());
    std::string names;
    if (found != presets.end()) {
      for (const std::string& name : found->second.presets)
        names += (names.empty() ? "" : " ") + name;
    }
    file << job.row << "\t" << (job.use ? job.use->threads : 0) << "\t"
         << (names.empty() ? "-" : names) << "\t" << cubin_name(job) << "\n";
  }
  if (!file.flush()) fail(SAGEATTN_E_INTERNAL, "%s: cannot be written", folder.c_str());
}

void compare(std::vector<Job>& jobs, const Table& table, bool same_build) {
  std::set<std::string> keys;
  for (Job& job : jobs) {
    if (!job.use) continue;
    keys.insert(job.key());
    if (!job.compiled) continue;
    const auto found = table.rows.find(job.key());
    if (found == table.rows.end()) {
      job.faults.push_back("is not in resources.tsv");
      continue;
    }
    const std::vector<std::string> was = fields_of(found->second), is = fields_of(job.row);
    const std::vector<std::string> columns = fields_of(kColumns);
    for (size_t i = same_build ? kRegisters : kStaticSmem; i < columns.size(); ++i) {
      if (was[i] == is[i]) continue;
      job.faults.push_back(columns[i] + " = " + is[i] + ", but " + was[i] + " in resources.tsv");
    }
  }
  for (const auto& [key, row] : table.rows) {
    if (keys.count(key) != 0) continue;
    jobs.front().faults.push_back("resources.tsv has a row that no plan asks for: " + row);
  }
}

// ---- Command line --------------------------------------------------------------------------------

bool parse(int argc, char** argv, Options& options) {
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--update" || name == "--all") {
      (name == "--all" ? options.all : options.update) = true;
      continue;
    }
    if (++i == argc) return false;
    const std::string value = argv[i];
    if (name == "--filter") {
      options.filters.push_back(value);
    } else if (name == "--cubins") {
      options.cubins = value;
    } else if (name == "--presets") {
      options.preset_head_dim = std::atoi(argv[i]);
    } else if (name == "--jobs") {
      options.jobs = std::strtoul(value.c_str(), nullptr, 10);
    } else if (name != "--shard" ||
               std::sscanf(argv[i], "%zu/%zu", &options.shard, &options.shards) != 2) {
      return false;
    }
  }
  return options.jobs > 0 && options.shard < options.shards;
}

// Whether the NVRTC can: an old one need not know every arch.
bool can_compile(const Job& job, const Nvrtc& nvrtc) {
  try {
    check_nvrtc(*job.kernel, job.arch_text, nvrtc.version(), nvrtc.archs(), nvrtc.path());
    return true;
  } catch (const Error&) {
    return false;
  }
}

void choose(std::vector<Job>& jobs, const Uses& presets, const Nvrtc& nvrtc,
            const Options& options) {
  size_t count = 0;
  for (Job& job : jobs) {
    if (!job.use && !options.all) continue;
    if (options.preset_head_dim != 0 && presets.count(job.key()) == 0) continue;
    const auto misses = [&](const std::string& filter) {
      return job.text().find(filter) == std::string::npos;
    };
    if (std::any_of(options.filters.begin(), options.filters.end(), misses)) continue;
    if (!can_compile(job, nvrtc)) continue;
    job.chosen = count++ % options.shards == options.shard;
  }
}

void print_times(const std::vector<Job>& jobs) {
  struct Sum {
    int count = 0, unplanned = 0;
    double ms = 0, most = 0;
  };
  std::map<std::string, Sum> sums;
  for (const Job& job : jobs) {
    if (!job.chosen) continue;
    Sum& sum = sums[job.kernel->name];
    ++sum.count;
    sum.unplanned += !job.use;
    sum.ms += static_cast<double>(job.ms);
    sum.most = std::max(sum.most, static_cast<double>(job.ms));
  }
  std::printf("%-20s %8s %14s %10s %10s\n", "kernel", "compiled", "for no plan", "seconds",
              "slowest");
  for (const auto& [name, sum] : sums) {
    std::printf("%-20s %8d %14d %10.1f %10.2f\n", name.c_str(), sum.count, sum.unplanned,
                sum.ms / 1000, sum.most / 1000);
  }
}

int run(const Options& options) {
  const NvrtcSearch search = find_nvrtc("");
  if (search.nvrtc == nullptr) {
    std::printf("skipped: no NVRTC: %s\n", search.tried_text().c_str());
    return kSkipped;
  }
  const Nvrtc& nvrtc = *search.nvrtc;
  if (!options.cubins.empty()) std::filesystem::create_directories(options.cubins);
  const auto start = std::chrono::steady_clock::now();
  std::vector<Job> jobs = list_jobs();
  const Uses presets = uses_of_presets(options.preset_head_dim);
  choose(jobs, presets, nvrtc, options);
  compile_all(jobs, nvrtc, options);
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;

  std::string build{};
  size_t chosen = 0;
  check_reach(jobs);
  for (const Job& job : jobs) {
    chosen += job.chosen;
    if (!job.build.empty()) {
      build = "# NVRTC " + version_text(nvrtc.version()) + " " + job.build;
    }
  }
  if (chosen == 0) fail(SAGEATTN_E_INVALID_ARGUMENT, "nothing to compile: no kernel is like that");
  const Table table = read_table();
  if (!options.cubins.empty()) write_rows(jobs, presets, build, options.cubins);
  if (options.update) {
    const auto planned =
        std::count_if(jobs.begin(), jobs.end(), [](const Job& job) { return job.use.has_value(); });
    const bool partial = chosen < static_cast<size_t>(planned);
    if (partial && !table.rows.empty() && table.build != build) {
      std::fprintf(stderr, "resources.tsv is of '%s', this is '%s': update all of it\n",
                   table.build.c_str(), build.c_str());
      return kUsageError;
    }
    write_table(jobs, table, build);
  } else if (options.cubins.empty()) {
    compare(jobs, table, table.build == build);
  }

  print_times(jobs);
  size_t failed = 0;
  for (const Job& job : jobs) {
    failed += !job.faults.empty();
    for (const std::string& fault : job.faults) {
      std::printf("%s: %s\n", job.text().c_str(), fault.c_str());
    }
  }
  std::printf("%s, %zu of %zu specialisations in %.1f s, %zu failed\n", build.c_str(), chosen,
              jobs.size(), elapsed.count(), failed);
  return failed == 0 ? EXIT_SUCCESS : kFailed;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  if (!parse(argc, argv, options)) {
    std::fprintf(
        stderr,
        "usage: %s [--all] [--update] [--filter TEXT]... [--presets HEAD_DIM] [--shard I/N] "
        "[--jobs N] [--cubins DIR]\n",
        argv[0]);
    return kUsageError;
  }
  try {
    return run(options);
  } catch (const Error& error) {
    std::fprintf(stderr, "%s\n", error.message);
    return kFailed;
  }
}
