// How a launch's workspace is divided. One walk both sizes and carves it: with a null base it only
// counts.
#pragma once

#include <cstdint>

#include "src/core/config.h"
#include "src/cpu/kernels.h"

namespace sageattn::cpu {

// One sequence of a launch, resolved from the caller's lengths.
struct Sequence {
  int64_t q_start, kv_start;  // first token in the packed tensors; 0 with DENSE
  int32_t qo_len, kv_len;     // kv_len: after seqused_kv
  bool bad;                   // nonsense lengths: its qo_len rows become NaN
  int64_t first_q_tile;       // number of q tiles of the sequences before it
  int64_t first_k_tile;       // likewise, of K tiles
  int64_t first_v_group;      // likewise, of V groups
};

// Sizes that follow from a plan.
struct Shape {
  explicit Shape(const PlanConfig& plan);

  int rotated_dim;  // channels of Q and K after rotation
  bool fp8_scores;
  int pairs;        // integer codes: int16 pairs a row
  int qk_channels;  // FP8 codes: channels a row
  int64_t k_tile_bytes;
  int channels;  // channels of V and O, padded
  int v_code_bytes;
  bool grouped;          // V is scaled or smoothed per promotion group
  int64_t max_k_tiles;   // of all sequences of a launch, for one kv head
  int64_t max_v_groups;  // likewise
};

// What one thread needs at a time.
struct Scratch {
  float* rows;       // [tile rows][rotated_dim]: a tile of Q or K in fp32
  float* lanes;      // [16 + 32][dim]: partial sums of a mean
  float* row;        // [dim]
  float* channel_a;  // [dim] each
  float* channel_b;
  float* q_mean;
  // Attention: see AttendTile.
  int32_t* q_pairs;
  float *q_values, *q_powers, *q_scale;
  int32_t* visible;
  float *k_values, *k_powers;
  float *ds, *smooth_k;
  float *v_values, *v_powers, *zeros;
  float *row_max, *flushed_max, *group_sum, *row_sum, *acc, *out;
  float* scores;
  // EXACT.
  double *exact_q, *exact_k, *exact_v, *exact_s, *exact_out, *exact_max, *exact_sum;
};

struct Areas {
  Sequence* sequences;  // [max_batch]
  float* k_mean;        // [kv head][sequence][head_dim]
  float* k_factor;      // SMOOTHATTN: [kv head][sequence][head_dim]
  float* q_scale;       // PER_TENSOR: [query head][sequence]
  uint8_t* k_codes;     // [kv head][tile][k_tile_bytes]
  float* k_scale;       // [kv head][tile][b_k]
  uint16_t* k_smooth;   // smooth_q: [kv head][tile][head_dim][b_k], 16-bit
  uint8_t* v_codes;     // [kv head][tile][b_k][channels]
  float* v_scale;       // [kv head][group or sequence][channels]
  float* v_mean;        // [kv head][group or sequence][channels]
  Scratch* scratch;     // [thread]
};

// Takes aligned pieces off a buffer, or counts them. Counts stop at an overflow.
class Carver {
 public:
  explicit Carver(void* base) : base_(static_cast<char*>(base)) {}

  template <typename T>
  T* take(int64_t count) {
    constexpr int64_t kAlign = 64;
    int64_t bytes;
    if (__builtin_mul_overflow(count, static_cast<int64_t>(sizeof(T)), &bytes) ||
        __builtin_add_overflow(bytes, kAlign - 1, &bytes)) {
      overflow_ = true;
      return nullptr;
    }
    bytes = bytes / kAlign * kAlign;
    const int64_t at = size_;
    if (__builtin_add_overflow(size_, bytes, &size_)) overflow_ = true;
    return base_ == nullptr || overflow_ ? nullptr : reinterpret_cast<T*>(base_ + at);
  }

  // The sizes wanted do not fit.
  void fail() { overflow_ = true; }

  int64_t size() const { return overflow_ ? -1 : size_; }

 private:
  char* base_;
  int64_t size_ = 0;
  bool overflow_ = false;
};

Areas carve(const PlanConfig& plan, int threads, Carver& carver);

}  // namespace sageattn::cpu
