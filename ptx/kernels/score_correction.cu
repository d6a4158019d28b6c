// dS = qbar gK^T, what smoothing Q takes out of the scores: one row for each tile of queries.
//
// Macros: D_QK. One block for 64 keys of one head, whatever attention's tiles are; keys stay in shared
// memory while the tiles of queries pass by, 32 at a time. A thread takes one key and 8 tiles; channels
// ascend in one chain of fma, as docs/numerics.md says.
#include "ptx/arch/grid.h"
#include "ptx/common/sequences.h"
#include "ptx/tile/quantizer.h"
#include "ptx/tile/rows.h"

namespace sageattn {
namespace {

constexpr int kKeys = kCorrectionKeys;
constexpr int kRuns = kCorrectionThreads / kKeys;  // threads that share a key
constexpr int kTiles = 8;                          // tiles of queries a thread
constexpr int kPitch = D_QK + 1;

}  // namespace

extern "C" __global__ void __launch_bounds__(kCorrectionThreads)
    sageattn_score_correction(const __grid_constant__ CorrectionParams p) {
  start_dependents();
  wait_for_grids();
  extern __shared__ __align__(32) float shared[];
  float* keys = shared;                    // [kKeys][kPitch]
  float* means = shared + kKeys * kPitch;  // [kRuns * kTiles][D_QK]
  const i32 block = static_cast<i32>(blockIdx.x);
  if (p.next_item != nullptr && block == 0 && threadIdx.x == 0) *p.next_item = 0;
  const i32 pieces = p.sequences.k_tiles * (p.b_k / kKeys);
  const i32 first_key = block % pieces * kKeys;
  const i32 head = p.first_head + block / pieces % p.head_count;
  const i32 batch = block / pieces / p.head_count;
  const i32 kv_head = head / (p.heads.qo / p.heads.kv);
  const SequenceEntry sequence = sequence_at(p.sequences, batch);
  // Of absent keys in a tile 0 is written.
  if (first_key / p.b_k * p.b_k >= sequence.kv_len) return;
  const i32 rows = min(kKeys, sequence.kv_len - first_key);
  const int thread = static_cast<int>(threadIdx.x);

  const float* mean =
      p.k_mean == nullptr ? nullptr : p.k_mean + (kv_head * p.heads.sequences + batch) * D_QK;
  // As many keys at a time as `means` has room for, whatever their type.
  constexpr i32 kAtOnce = kRuns * kTiles;
  for (i32 first = 0; first < kKeys; first += kAtOnce) {
    __syncthreads();
    const Rows<D_QK, kCorrectionThreads> staged = {shared_address(means),
                                                   min(kAtOnce, rows - first), p.k.dtype};
    stage_rows<L2::kNormal, D_QK, kCorrectionThreads>(p.k, p.irregular_k != 0, batch,
                                                      sequence.kv_start + first_key + first,
                                                      kv_head, staged.count, staged.stage);
    cp_async_wait<0>();
    __syncthreads();
    for (int i = thread; i < kAtOnce * (D_QK / 8); i += kCorrectionThreads) {
      const int row = i / (D_QK / 8), c = i % (D_QK / 8) * 8;
      float x[1][8] = {};
      if (row < staged.count) load_8(staged.dtype, {staged.at(row, c)}, x);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float shift = mean == nullptr || row >= staged.count ? 0.0f : mean[c + j];
        keys[(first + row) * kPitch + c + j] = round_product(x[0][j] - shift, p.product_bf16);
      }
    }
  }

  const i32 q_tiles = (sequence.qo_len + p.b_q - 1) / p.b_q;
  const i32 end = min(q_tiles, p.first_q_tile + p.q_tile_count);
  const float* q_means =
      p.q_mean + (head * p.heads.q_tiles + sequence.first_q_tile) * static_cast<i64>(D_QK);
  float* ds = p.ds + i64{head - p.first_head} * p.q_tile_count * p.ds_pitch +
              sequence.first_k_tile * p.b_k + first_key;
  const int key = thread % kKeys, run = thread / kKeys;
  for (i32 first = p.first_q_tile; first < end; first += kRuns * kTiles) {
    __syncthreads();
    for (int i = thread; i < kRuns * kTiles * D_QK; i += kCorrectionThreads) {
      const i32 tile = first + i / D_QK;
      means[i] = tile < end ? q_means[static_cast<i64>(tile) * D_QK + i % D_QK] : 0.0f;
    }
    __syncthreads();
    float sum[kTiles] = {};
    for (int c = 0; c < D_QK; ++c) {
      const float k = keys[key * kPitch + c];
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        sum[t] = __fmaf_rn(means[(run * kTiles + t) * D_QK + c], k, sum[t]);
      }
    }
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const i32 tile = first + run * kTiles + t;
      if (tile < end) ds[(tile - p.first_q_tile) * p.ds_pitch + key] = sum[t];
    }
  }
}

}  // namespace sageattn
