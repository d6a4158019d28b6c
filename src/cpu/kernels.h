// The inner loops of the CPU backend, compiled once for each instruction set from kernels_impl.h.
// Every build gives the same bits: all of them work on 16 lanes in the same order.
#pragma once

#include <cstdint>

namespace sageattn::cpu {

inline constexpr int kLanes = 16;

// How P V is accumulated (docs/numerics.md, section 7).
enum class PvModel { kTensorFp8, kChainF32, kF16, kI8 };

// What P is rounded to, and the codes of V.
enum class PFormat { kE4M3, kE5M2, kI8, kF16 };

// One query tile against one K/V tile. Rows are padded to whole vectors of kLanes channels;
// padding channels and keys hold zeros.
struct AttendTile {
  // Scores. Integer codes: q_pairs[row][channel / 2] and k_pairs[channel / 2][key] hold two int16
  // codes each. FP8 codes: values and powers of two of their exponent fields (0 for a zero).
  bool fp8_scores;
  int pairs;  // channels after rotation, in pairs
  const int32_t* q_pairs;
  const int32_t* k_pairs;
  int qk_channels;  // FP8 codes: padded to a multiple of 32
  const float* q_values;
  const float* q_powers;
  const float* k_values;  // [channel][key]
  const float* k_powers;

  int b_k;               // keys a tile, 64 or 128
  const float* k_scale;  // [key]
  const float* ds;       // [key], added to scores after scaling, or null
  float ds_scale;

  int rows;
  const float* q_scale;    // [row], sm_scale and log2(e) included
  const int32_t* visible;  // [row][2]: first and end visible key of this tile

  PFormat p_format;
  PvModel pv_model;
  float p_log2;           // log2 of the P factor
  bool sum_rounded;       // row sums take rounded P
  int f16_step;           // keys a step of PvModel::kF16
  int chunk;              // keys between possible flushes
  int channels;           // head_dim_v padded to kLanes
  const float* v_values;  // [key][channel]
  const float* v_powers;  // kTensorFp8 only

  // Flush after the chunk that ends at key `flush_at` of this tile and each `flush_every` keys
  // beyond it (0: only there); flush_at > b_k: none.
  int flush_at;
  int flush_every;
  bool grouped;          // the flush scales and adds means
  const float* v_scale;  // [channel] of this tile's first group
  const float* v_mean;
  int64_t v_scale_stride;  // to the next group
  int64_t v_mean_stride;

  // State of the rows.
  float* row_max;      // m
  float* flushed_max;  // mf
  float* group_sum;    // lg
  float* row_sum;      // l
  float* acc;          // [row][channel]
  float* out;          // [row][channel]

  float* scratch;  // 2 * b_k floats
};

struct Kernels {
  const char* isa;
  void (*attend)(const AttendTile& tile);
  // The flush that ends a query tile, with the scales and means of the last group.
  void (*flush)(const AttendTile& tile, int row, const float* v_scale, const float* v_mean);
  // count codes (a multiple of kLanes) to their values; FP8 formats also give the powers of two of
  // their exponent fields, 0 for a zero.
  void (*expand)(PFormat format, const void* codes, int64_t count, float* values, float* powers);
  // out[j] = chain over c ascending of fma(x[c], k[c][j], .) from 0; keys a multiple of kLanes.
  void (*project)(const float* x, const float* k, int dim, int keys, float* out);
  // EXACT: s[j] = sum over c of q[c] k[c][j], and o[c] += sum over j of p[j] v[j][c], in fp64.
  void (*exact_scores)(const double* q, const double* k, int dim, int keys, double* s);
  void (*exact_accumulate)(const double* p, const double* v, int keys, int dim, double* o);
  // One step of the FP8 tensor core on kLanes accumulators: acc += sum over k of p[k] v[k][lane].
  void (*fp8_step)(const float* p, const float* p_powers, const float* v, const float* v_powers,
                   int64_t v_stride, float* acc);
};

extern const Kernels kGenericKernels;
#ifdef SAGEATTN_X86
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

// The fastest set this processor runs.
const Kernels& kernels();

}  // namespace sageattn::cpu
