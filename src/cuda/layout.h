// How a launch's workspace is divided (what lies in each area: ptx/common/params.h). One walk both
// sizes and carves it: with a null base it only counts.
//
// A workspace is sized for the extent of the plan's limits and carved for the extent of a launch,
// which is nowhere larger, so a launch never reaches beyond what was promised.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ptx/common/params.h"
#include "src/core/config.h"

namespace sageattn::cuda {

inline constexpr int32_t kWorkspaceAlignment = 256;

// What belongs to no quantized copy of a tensor (codes, and the scales and means of groups, with which
// they are a tensor again): lengths, counters and, with smooth_q, the correction of scores
// (AttnParams::ds). The latter is made for as many query heads at a time as there is room for, or,
// where a head is too large, for as many tiles of its queries: in the smallest workspace these areas
// take at most kSpareBytes in all, in the preferred one kPreferredSpareBytes. They take more only if
// one row of ds does, one tile of queries of one head against the keys of all sequences: from some 16
// million keys on, 4 bytes a key, where one head's copies of K and V take many times as much; or the
// lengths of a million sequences, or counters, one for each V group, of a V of a terabyte.
inline constexpr int64_t kSpareBytes = int64_t{64} << 20;
inline constexpr int64_t kPreferredSpareBytes = int64_t{1} << 30;

inline constexpr int64_t kMaxBlocks = INT32_MAX;  // of one launch

// Sizes that follow from a plan.
struct Shape {
  explicit Shape(const PlanConfig& plan);

  bool exact;
  bool wgmma;           // tiles of SAGEATTN_KERNEL_WGMMA
  bool grouped;         // V is scaled or smoothed per promotion group
  bool v_statistics;    // V's scales and means are found ahead of its tiles, not by them
  int d_tile, dv_tile;  // channels in the workspace: ptx/tile/dims.h
  int qk_row_bytes;     // of Q and K codes
  int v_row_bytes;      // V codes of one key
  int q_groups;         // scales of a Q tile
};

// What one launch has, or, for the limits of a plan, what it can have at most.
struct Extent {
  int64_t batch;
  int64_t q_tiles, k_tiles, v_groups;  // of all sequences, for one head: the pitch between heads
  int64_t max_q_tiles, max_k_tiles, max_v_groups;  // of one sequence
};

Extent extent_of(const PlanConfig& plan);
Extent extent_of(const PlanConfig& plan, const Launch& launch);

struct Areas {
  SequenceEntry* sequences;
  unsigned char *q_codes, *k_codes, *v_codes;
  float *q_scale, *k_scale, *v_scale;
  float* v_mean;
  float* k_mean;   // null: K is not smoothed
  float* q_mean;   // null: Q is not smoothed
  i32* counters;   // null: EXACT; counter_count of them, to be 0 at first
  i32* next_item;  // the last of them, attention's; null: not WGMMA
  i64 counter_count;
  float* ds;  // null: Q is not smoothed
};

struct Need {
  int64_t copies;                      // bytes of the quantized copies
  int64_t min_bytes, preferred_bytes;  // of the workspace
};

// All -1 if the workspace would exceed 2^63 bytes.
Need need_of(const PlanConfig& plan);

// The areas of a launch, in a workspace of at least min_bytes. ds is last and takes what remains.
Areas carve(const PlanConfig& plan, const Extent& extent, void* workspace);

// Floats between the rows of ds: the keys of all sequences, in whole tiles.
int64_t ds_pitch(const PlanConfig& plan, const Extent& extent);

// How much of ds is made at a time: all tiles of queries of several heads, or some tiles of one.
struct DsRun {
  int64_t heads, q_tiles;  // at most; q_tiles of each sequence
};

// What fits in a workspace of `bytes`, at least min_bytes, and in one launch. Everything without
// smooth_q.
DsRun ds_run(const PlanConfig& plan, const Extent& extent, int64_t bytes);

}  // namespace sageattn::cuda
