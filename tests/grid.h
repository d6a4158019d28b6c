// A deterministic grid of small problems, and what runs one of them through the C API.
//
// Every tensor lies in a buffer of its own whose gaps and ends hold NaN (inputs) or a canary
// pattern (outputs), the workspace has exactly min_workspace bytes between guard zones, and after
// the call everything that must not have been written is looked at.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "sageattn.h"
#include "tests/exact_reference.h"
#include "tests/literal.h"

namespace sageattn_test {

// ---- What is computed --------------------------------------------------------------------------

// How a tensor lies in memory. "Given" layouts pass explicit strides.
enum class View {
  Default,      // all strides zero: contiguous, in the plan's layout
  Padded,       // token-major, with gaps after rows and tokens
  OtherMajor,   // head-major if the plan's layout is token-major, and vice versa
  Transposed,   // channels are the slowest dimension (stride_dim is large)
  Reversed,     // negative strides of token, head and channel
  Interleaved,  // stride_dim 2, neighbours are NaN or canaries
  SharedHead    // stride_head 0 (K and V only): all heads are one
};

// What the values look like.
enum class Values {
  Normal,
  Biased,    // constants added to channels of K and V
  Outliers,  // one element in 100 is ten times larger
  Scales,    // channels differ by powers of four
  Zeros,     // one channel of V, one of K and one row of Q are zero
  Large      // bf16 and fp32: V near 1e30
};

struct Problem {
  int id = 0;
  AttentionShape shape;
  int32_t q_dtype = SAGEATTN_F16, kv_dtype = SAGEATTN_F16, out_dtype = SAGEATTN_F16;
  int32_t layout = SAGEATTN_LAYOUT_NHD;
  int32_t batch_mode = SAGEATTN_BATCH_DENSE;
  MaskSpec mask;
  bool sm_scale_set = false;
  float sm_scale = 0;
  std::vector<int> qo_lens, kv_lens;  // one a sequence; all equal with DENSE
  std::vector<int> seqused;           // empty: none
  int gap = 0;                        // VARLEN: tokens before the first and after the last sequence
  View q_view = View::Default, k_view = View::Default, v_view = View::Default;
  View out_view = View::Default, lse_view = View::Default;  // lse: Default, Padded or Reversed
  Values values = Values::Normal;
  uint64_t seed = 0;

  int batch() const { return static_cast<int>(qo_lens.size()); }
  int used_keys(int b) const { return seqused.empty() ? kv_lens[b] : seqused[b]; }
  double scale() const;  // the softmax scale that applies
};

struct Numerics {
  std::string name;
  int32_t arch = 90;
  sageattn_attn_desc desc = {};  // only the numerics fields
  int max_dim = 256;             // largest head_dim and head_dim_v that must be accepted
};

// One line from which a failing case can be run alone.
std::string describe(const Problem& problem);
std::string describe(const Problem& problem, const Numerics& numerics);

// `count` problems that together cover every value of every axis many times over.
std::vector<Problem> make_grid(int count, uint64_t seed);

Numerics preset_numerics(int32_t preset, int32_t arch);
std::vector<Numerics> all_presets();  // that quantize, on target_arch 90, 89 and 80
// Every enumerant of every numerics field, one change from a preset at a time.
std::vector<Numerics> all_enumerants();

// Inputs of each sequence, every value representable in its type. Heads that a SharedHead view
// makes one hold the same values.
using Data = std::vector<LiteralInput>;
Data make_data(const Problem& problem);

// ---- Running it --------------------------------------------------------------------------------

// Where not empty: passed instead of the true ones (VARLEN).
struct Lengths {
  std::vector<int32_t> cu_q, cu_kv, used;
};

struct RunOptions {
  int threads = 1;
  Lengths lengths;
  bool want_lse = true;
};

struct CaseResult {
  int32_t status = SAGEATTN_OK;  // of plan creation or execute
  bool planned = false;
  std::string message;    // of the error
  std::string violation;  // what was written that must not be, or empty
  sageattn_plan_info info = {};
  std::vector<LiteralOutput> sequences;
  std::vector<int32_t> sequence_status;
  // VARLEN: all rows of the packed buffers, gaps included, [total_qo][head]...
  LiteralOutput packed;
  std::vector<bool> packed_row_untouched;  // row still holds the canary, in out and lse
};

CaseResult run_case(const Problem& problem, const Numerics& numerics, const Data& data,
                    const RunOptions& options = {});

// A context of the CPU backend, made once for each (arch, threads) and shared by all tests.
sageattn_context* shared_context(int32_t arch, int threads);

// Fills everything of a desc but the limits.
sageattn_attn_desc make_desc(const Problem& problem, const Numerics& numerics);
// What the problem needs, for every third one a little more.
void set_limits(const Problem& problem, sageattn_attn_desc& desc);

// Where each of packed sequences starts, and the last ends.
std::vector<int32_t> cumulative(const std::vector<int>& lens, int start);

// Calls f(0) .. f(n - 1) on a few threads. f returns a failure report, or nothing. Returns the
// reports in order of index.
std::vector<std::string> for_each_case(int n, const std::function<std::string(int)>& f);

// Joins the first few reports, for INFO.
std::string summary(const std::vector<std::string>& reports);

// Empty if the two agree bit for bit (any NaN equals any NaN), else a report.
std::string compare_bits(const std::vector<float>& got, const std::vector<float>& want,
                         const std::string& what, int channels, int heads);
std::string compare_bits(const LiteralOutput& got, const LiteralOutput& want,
                         const Problem& problem, const std::string& what);

// Whether the environment variables SAGEATTN_TEST_CASE and SAGEATTN_TEST_NUMERICS, where set, admit
// this one.
bool selected(const Problem& problem, const Numerics& numerics);

// ---- Encodings ---------------------------------------------------------------------------------

int dtype_size(int32_t dtype);
void store(void* address, int32_t dtype, float value);  // value must be representable, or NaN
float load(const void* address, int32_t dtype);

// A small deterministic generator.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next();
  int below(int n) { return static_cast<int>(next() % static_cast<uint64_t>(n)); }
  float normal();  // nearly N(0, 1)

 private:
  uint64_t state_;
};

}  // namespace sageattn_test
