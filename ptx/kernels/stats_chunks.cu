// Partial sums of K, and of V with its least and largest values, over chunks of 64 tokens.
//
// Macros: D_QK, D_V (64, 128, 256).
//
// Moves each element of K and V once and writes 4 (K) or 12 (V) bytes for every 64 of them. One block
// a chunk and head: 16 token lanes by 16 threads of kDim / 16 channels, in the order that
// docs/numerics.md fixes: lane r adds tokens r, r + 16, .., then lanes fold by 8, 4, 2, 1.
#include "ptx/common/sequences.h"
#include "ptx/tile/load.h"

namespace sageattn {
namespace {

constexpr int kDim = D_QK > D_V ? D_QK : D_V;
constexpr int kLanes = 16;
constexpr int kChannels = kDim * kLanes / kStatsThreads;  // a thread

}  // namespace

extern "C" __global__ void __launch_bounds__(kStatsThreads)
    sageattn_stats_chunks(const __grid_constant__ StatsParams p) {
  __shared__ float lanes[3][kLanes][kDim];  // sums, least, largest
  const i32 chunks = p.sequences.k_tiles;
  i32 block = static_cast<i32>(blockIdx.x);
  bool is_v = p.kinds == 2;
  if (p.kinds == 3) {
    is_v = block & 1;
    block >>= 1;
  }
  const i32 chunk = block % chunks;
  const i32 head = block / chunks % p.heads.kv;
  const i32 batch = block / chunks / p.heads.kv;
  const SequenceEntry sequence = sequence_at(p.sequences, batch);
  if (chunk * kChunkTokens >= sequence.kv_len) return;

  const View& view = is_v ? p.v : p.k;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int first_channel = static_cast<int>(threadIdx.x) / kLanes * kChannels;
  float sum[kChannels], least[kChannels], largest[kChannels];
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
    sum[c] = 0.0f;
    least[c] = __int_as_float(0x7f800000);
    largest[c] = -least[c];
  }
#pragma unroll
  for (int i = 0; i < kChunkTokens / kLanes; ++i) {
    const i32 token = chunk * kChunkTokens + i * kLanes + lane;
    if (token >= sequence.kv_len) continue;
    float x[kChannels];
    load_channels(view, token_offset(view, batch, sequence.kv_start + token, head), first_channel,
                  x);
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      sum[c] += x[c];
      least[c] = min_nan(least[c], x[c]);
      largest[c] = max_nan(largest[c], x[c]);
    }
  }
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
    lanes[0][lane][first_channel + c] = sum[c];
    lanes[1][lane][first_channel + c] = least[c];
    lanes[2][lane][first_channel + c] = largest[c];
  }
  __syncthreads();

  // Each thread folds whole channels: the order of the tree is what counts, not who walks it.
  const i64 tile = head * p.heads.k_tiles + sequence.first_k_tile + chunk;
  float* to = p.partial + tile * (4 * kDim) + (is_v ? kDim : 0);
  for (int c = static_cast<int>(threadIdx.x); c < kDim; c += kStatsThreads) {
#pragma unroll
    for (int half = kLanes / 2; half > 0; half /= 2) {
#pragma unroll
      for (int r = 0; r < half; ++r) {
        lanes[0][r][c] += lanes[0][r + half][c];
        lanes[1][r][c] = min_nan(lanes[1][r][c], lanes[1][r + half][c]);
        lanes[2][r][c] = max_nan(lanes[2][r][c], lanes[2][r + half][c]);
      }
    }
    to[c] = lanes[0][0][c];
    if (is_v) {
      to[kDim + c] = lanes[1][0][c];
      to[2 * kDim + c] = lanes[2][0][c];
    }
  }
}

}  // namespace sageattn
