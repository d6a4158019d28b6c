// What kernels are launched with: plain structs that host and device lay out alike, the layout of
// every operand in the workspace, and the grid of each kernel. Strides are in elements.
//
// Kernels of one execute, in this order (entry sageattn_<name>, source ptx/kernels/<name>.cu):
//   sequences         1 block               with VARLEN or seqused_kv, and where counters start at 0
//   prepare           tasks of all (sequence, kv head) pairs: see ptx/kernels/prepare.cu
//   score_correction  smooth_q: for each run of query heads, or of q tiles of one head, that the ds
//                     buffer holds, before its
//   attn_*            attention: batch * head_count * q_tile_count
// All grids are linear. From sm_90 each but the first may start while the one before still runs:
// ptx/arch/grid.h.
//
// Workspace layouts. A sequence is cut into tiles of b_q queries and b_k keys; each tile is one
// contiguous piece, padded to whole rows and channels with zeros and already in the order in which
// shared memory holds it (ptx/tile/swizzle.h), so that kernels copy tiles flat.
//   q_codes   [query head][q tile][b_q][code bytes a row]
//   q_scale   [query head][q tile][q groups]        one for each group per thread
//   k_codes   [kv head][k tile][b_k][code bytes a row]
//   k_scale   [kv head][k tile][4]
//   v_codes   16-bit [kv head][k tile][b_k][dv_tile]
//             E4M3   [kv head][k tile][dv_tile][b_k], tokens in the order of v_token_slot
//   v_scale, v_mean  [kv head][v group, or sequence][dv_tile]; where statistics go before the tiles (V
//                    of sequences, and every V of wgmma), as many inverse scales follow v_scale
//   k_mean           [kv head][sequence][d_tile]
// Coarser granularities store the same value for every group they cover, so that attention kernels
// know per-thread groups only. EXACT: codes are the 16-bit values, there are no scales.
#pragma once

#include "ptx/common/types.h"

namespace sageattn {

inline constexpr i32 kChunkTokens = 64;  // tokens that are added up at once
// Tasks of `prepare`, at most, that share the statistics of K, of V, or of both.
inline constexpr i32 kStatsTasks = 32;
inline constexpr i32 kFolded =
    1 << 30;  // a counter of `prepare` from here on: statistics are there
inline constexpr i32 kIrregularQ = 1, kIrregularK = 2, kIrregularV = 4;
inline constexpr i32 kPrepareThreads = 128;
inline constexpr i32 kCorrectionThreads = 256;
// Of a block: keys, and tiles of queries, at most.
inline constexpr i32 kCorrectionKeys = 256, kCorrectionTiles = 256;
inline constexpr i32 kAttnThreads = 128;

// One sequence of a launch.
struct SequenceEntry {
  i64 q_start, kv_start;           // first token in the packed tensors
  i64 first_q_tile, first_k_tile;  // tiles of the sequences before it, for one head
  i64 first_v_group;
  i32 qo_len, kv_len;
  i32 bad;  // nonsense lengths: its qo_len rows become NaN
  i32 unused;
};

// All sequences: a table that the kernel `sequences` wrote, or, without one, equal lengths.
struct Sequences {
  const SequenceEntry* table;  // null: dense, every length as below
  i32 batch;
  i32 qo_len, kv_len;
  i32 q_tiles, k_tiles, v_groups;  // of one sequence; with a table, the most that one can have
};

// A caller's tensor [sequence, token, head, channel].
struct View {
  void* data;
  i64 batch, token, head, dim;
  i32 dtype;  // SAGEATTN_F16, BF16 or F32
  i32 channels;
};

// Pitches between heads in the workspace, in tiles, groups and sequences.
struct Heads {
  i32 qo, kv;  // number of heads
  i64 q_tiles, k_tiles, v_groups;
  i64 sequences;
};

// Kernel `sequences`: resolves device-side lengths, and clears counters.
struct SequencesParams {
  const i32* cu_seqlens_q;   // null with dense
  const i32* cu_seqlens_kv;  // null with dense
  const i32* seqused_kv;     // may be null
  i32* status;               // may be null
  SequenceEntry* table;
  i64 total_q, total_kv;
  i32 batch, qo_len, kv_len;  // lengths: dense
  i32 max_qo_len, max_kv_len;
  i32 b_q, b_k, v_group;  // v_group: keys a V group; 0 if there is one group a sequence
  i32* counters;          // of `prepare` and of attention; may be null
  i32 counter_count;
  i32 followed;  // another kernel of this execute comes after
};

// Kernel `prepare`.
struct PrepareParams {
  Sequences sequences;
  Heads heads;
  View q, k, v;
  // Tasks of statistics that have arrived, 0 at first: of K [kv head][sequence], then of V
  // [kv head][v group, or sequence].
  i32* counters;
  i32 lag;          // pairs of sequence and kv head whose statistics come before the first tile
  i32 stats_tasks;  // a pair; 0: K is not smoothed, V has no statistics ahead of tiles
  i32 stats_split;  // first kStatsTasks of K, then as many of V
  i32 irregular;    // kIrregular*: tensors that cannot be read in 16-byte pieces
  i32 smooth_q;
  i32 granularity;   // SAGEATTN_GRANULARITY_PER_THREAD, _WARP or _BLOCK
  i32 hadamard_dim;  // channels padded to a power of two; 0: no rotation
  float hadamard_norm;
  i32 product_bf16;  // qbar and gK of dS are bf16, else fp16
  float sm_scale;
  float qk_max_code;  // 127 (INT8) or 7 (INT4)
  unsigned char *q_codes, *k_codes, *v_codes;
  float *q_scale, *k_scale;
  float* k_mean;  // null: K is not smoothed
  float* q_mean;  // smooth_q: [query head][q tile][d_tile], else null
  float* lse;     // receives sm_scale q . k_mean of each query; null: no LSE, or K is not smoothed
  i64 lse_batch, lse_head, lse_token;
  float *v_scale, *v_mean;
  i32 v_group;       // keys a V group, in whole tiles; 0: the sequence
  i32 v_smooth;      // V's mean is taken out
  float v_max_code;  // 448 or 2.25 (E4M3)
};

// Kernel `score_correction`: dS = qbar gK^T for a run of q tiles and query heads. Blocks: for each
// sequence CorrectionTask's parts, chunks and pieces (ptx/tile/tiles.h).
struct CorrectionParams {
  Sequences sequences;
  Heads heads;
  View k;
  const float* k_mean;
  const float* q_mean;
  // By score_scale: [query head - first_head][q tile - first_q_tile][key of all sequences, by k tiles].
  // Rows start at multiples of 16 bytes.
  float* ds;
  i64 ds_pitch;  // floats between rows
  i32 first_head, head_count;
  i32 first_q_tile, q_tile_count;  // of each sequence
  float score_scale;               // attention's
  i32 product_bf16;
  i32 irregular_k;  // K cannot be read in 16-byte pieces
  i32 b_q, b_k;     // queries and keys a tile
  i32* next_item;   // attention's, to be 0 for each launch of it; may be null
};

// Attention kernels.
struct AttnParams {
  Sequences sequences;
  Heads heads;
  const unsigned char *q_codes, *k_codes, *v_codes;
  const float *q_scale, *k_scale;
  const float *v_scale, *v_mean;
  const float* ds;  // smooth_q: corrections of scores, by score_scale; else null
  i64 ds_pitch;
  View out;
  float* lse;  // null: not wanted
  i64 lse_batch, lse_head, lse_token;
  i32 lse_biased;  // lse holds what `prepare` wrote, to be added: K was smoothed
  i32 mask, window_left, window_right;
  i32 first_head, head_count;      // query heads of this launch
  i32 first_q_tile, q_tile_count;  // and tiles of queries of each sequence
  float score_scale;               // sm_scale log2(e)
  i32 v_grouped;                   // V's scales and means are those of groups
  i32 v_group_tiles;               // of how many tiles of keys; wgmma: promoted after as many
  i32 out_in_pieces;               // wgmma: rows of out can be written in 16-byte pieces
  i32* next_item;                  // wgmma: 0 at first
  i32 v_smooth;                    // V's mean is added back
  // Another kernel of the execute follows, which may start early. What a caller launches next may not: it
  // is not ours to judge what that waits for.
  i32 followed;
};

}  // namespace sageattn
