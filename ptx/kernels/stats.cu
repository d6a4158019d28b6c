// Folds the partial statistics of stats_chunks: K's mean; V's scale, and its mean if wanted.
//
// Macros: D_QK, D_V. One block a (sequence, kv head) and kind. Lane r of 32 adds chunks r, r + 32, ..,
// then lanes fold by 16, 8, 4, 2, 1 (docs/numerics.md).
#include "ptx/common/sequences.h"
#include "ptx/tile/load.h"

namespace sageattn {
namespace {

constexpr int kDim = D_QK > D_V ? D_QK : D_V;
constexpr int kLanes = 32;
constexpr int kChannels = kStatsThreads / kLanes;  // channels at a time

}  // namespace

extern "C" __global__ void __launch_bounds__(kStatsThreads)
    sageattn_stats(const __grid_constant__ StatsParams p) {
  __shared__ float lanes[3][kLanes][kChannels];
  i32 block = static_cast<i32>(blockIdx.x);
  bool is_v = p.kinds == 2;
  if (p.kinds == 3) {
    is_v = block & 1;
    block >>= 1;
  }
  const i32 head = block % p.heads.kv;
  const i32 batch = block / p.heads.kv;
  const SequenceEntry sequence = sequence_at(p.sequences, batch);
  const i32 chunks = (sequence.kv_len + kChunkTokens - 1) / kChunkTokens;
  const i64 first = head * p.heads.k_tiles + sequence.first_k_tile;
  const float* partial = p.partial + first * (4 * kDim) + (is_v ? kDim : 0);
  const int lane = static_cast<int>(threadIdx.x) / kChannels;
  const int column = static_cast<int>(threadIdx.x) % kChannels;
  const i64 row = head * p.heads.sequences + batch;

  for (int first_channel = 0; first_channel < kDim; first_channel += kChannels) {
    const int c = first_channel + column;
    float sum = 0.0f, least = __int_as_float(0x7f800000), largest = -least;
    for (i32 chunk = lane; chunk < chunks; chunk += kLanes) {
      const float* at = partial + static_cast<i64>(chunk) * (4 * kDim) + c;
      sum += at[0];
      if (is_v) {
        least = min_nan(least, at[kDim]);
        largest = max_nan(largest, at[2 * kDim]);
      }
    }
    lanes[0][lane][column] = sum;
    lanes[1][lane][column] = least;
    lanes[2][lane][column] = largest;
    __syncthreads();
    for (int half = kLanes / 2; half > 0; half /= 2) {
      if (lane < half) {
        lanes[0][lane][column] += lanes[0][lane + half][column];
        lanes[1][lane][column] = min_nan(lanes[1][lane][column], lanes[1][lane + half][column]);
        lanes[2][lane][column] = max_nan(lanes[2][lane][column], lanes[2][lane + half][column]);
      }
      __syncthreads();
    }
    if (lane == 0) {
      const float n = static_cast<float>(sequence.kv_len);
      const float mean = sequence.kv_len > 0 ? lanes[0][0][column] / n : 0.0f;
      if (!is_v) {
        if (c < D_QK) p.k_mean[row * D_QK + c] = mean;
      } else if (c < D_V) {
        // Subtraction rounds monotonically, so the extremes of V give those of V less its mean.
        const float shift = p.v_smooth ? mean : 0.0f;
        float absmax = take_absmax(0.0f, lanes[1][0][column] - shift);
        absmax = take_absmax(absmax, lanes[2][0][column] - shift);
        if (sequence.kv_len == 0) absmax = 0.0f;
        const Quantizer q =
            p.f16_scale ? make_f16_quantizer(absmax) : make_quantizer(absmax, p.max_code);
        p.v_scale[row * D_V + c] = q.scale;
        p.v_scale[(p.heads.kv * p.heads.sequences + row) * D_V + c] = q.inverse;
        p.v_mean[row * D_V + c] = shift;
      }
    }
    __syncthreads();
  }
}

}  // namespace sageattn
