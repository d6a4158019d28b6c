// Q, K and V to the codes and scales that the attention kernels read.
//
// Macros: D_QK, D_V (64, 128, 256); QK_BITS 8, 4, or 16 (EXACT: packed as they are); V_BITS 8 (E4M3)
// or 16 (FP16, or packed); B_Q (128 or 64 queries a tile).
//
// One block a tile: Q tiles of all query heads, then K tiles, then V tiles of all kv heads. A tile is
// read once into shared memory as fp32, smoothed, rotated and measured there, and written once.
// Everything is computed in the order and precision of docs/numerics.md: no fused multiply-add.
#include "ptx/common/sequences.h"
#include "ptx/tile/groups.h"
#include "ptx/tile/load.h"
#include "ptx/tile/swizzle.h"

namespace sageattn {
namespace {

constexpr int kBk = 64;
constexpr int kRowsPerWarp = B_Q / 4;
constexpr int kPad = 4;  // floats between rows: keeps columns in different banks
constexpr int kQkPitch = D_QK + kPad;
constexpr int kVPitch = D_V + kPad;
constexpr int kRowBytes = D_QK * QK_BITS / 8;
constexpr int kVBytes = kBk * D_V * V_BITS / 8;
constexpr int kMaxCode = QK_BITS == 4 ? 7 : 127;
constexpr int kWarps = kQuantizeThreads / 32;

__device__ __forceinline__ float warp_absmax(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const float other = __shfl_xor_sync(0xffffffffu, x, offset);
    x = max_nan(x, other);
  }
  return x;
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

// Rows first .. first + rows - 1 of one head into shared memory; the rest of `tile_rows` is 0.
template <int kDim, int kPitch>
__device__ __forceinline__ void load_tile(const View& view, i32 batch, i64 start, i32 head,
                                          i32 rows, i32 tile_rows, float* tile) {
  for (int i = static_cast<int>(threadIdx.x); i < tile_rows * (kDim / 8); i += kQuantizeThreads) {
    const int row = i / (kDim / 8), c = i % (kDim / 8) * 8;
    float x[8] = {};
    if (row < rows) load_channels(view, token_offset(view, batch, start + row, head), c, x);
#pragma unroll
    for (int j = 0; j < 8; j += 4) {
      *reinterpret_cast<float4*>(tile + row * kPitch + c + j) =
          make_float4(x[j], x[j + 1], x[j + 2], x[j + 3]);
    }
  }
  __syncthreads();
}

// Sum over the rows of one channel in the order of docs/numerics.md: chunks of 64 rows, 16 lanes
// each. Rows that do not exist hold 0.
__device__ __forceinline__ float ordered_sum(const float* column, int pitch, int tile_rows) {
  float total = 0.0f;
  for (int chunk = 0; chunk < tile_rows; chunk += kChunkTokens) {
    float lanes[16];
#pragma unroll
    for (int r = 0; r < 16; ++r) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kChunkTokens / 16; ++i) sum += column[(chunk + i * 16 + r) * pitch];
      lanes[r] = sum;
    }
#pragma unroll
    for (int half = 8; half > 0; half /= 2) {
#pragma unroll
      for (int r = 0; r < half; ++r) lanes[r] += lanes[r + half];
    }
    total += lanes[0];
  }
  return total;
}

// The channels of head_dim, padded with zeros to a power of two, rotated by a normalised Hadamard
// matrix with random signs. A warp a row.
__device__ __forceinline__ void hadamard(float* row, int n) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int c = lane; c < n; c += 32) {
    if ((static_cast<unsigned>(c + 1) * 0x9E3779B1u & 0x80000000u) != 0) row[c] = -row[c];
  }
  __syncwarp();
  for (int h = 1; h < n; h *= 2) {
    for (int i = lane; i < n / 2; i += 32) {
      const int c = i / h * 2 * h + i % h;
      const float a = row[c], b = row[c + h];
      row[c] = a + b;
      row[c + h] = a - b;
    }
    __syncwarp();
  }
  const float norm = static_cast<float>(1.0 / sqrt(static_cast<double>(n)));
  for (int c = lane; c < n; c += 32) row[c] *= norm;
  __syncwarp();
}

__device__ __forceinline__ int power_of_two_from(int n) {
  int power = 1;
  while (power < n) power *= 2;
  return power;
}

// Rotates the rows if asked to and takes the largest magnitude of each.
__device__ __forceinline__ void measure_rows(float* tile, int rows, const QuantizeParams& p,
                                             float* row_absmax) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int row = static_cast<int>(threadIdx.x) / 32; row < rows; row += kWarps) {
    float* x = tile + row * kQkPitch;
    if (p.hadamard) hadamard(x, power_of_two_from(p.q.channels));
    float absmax = 0.0f;
    for (int c = lane; c < D_QK; c += 32) absmax = take_absmax(absmax, x[c]);
    absmax = warp_absmax(absmax);
    if (lane == 0) row_absmax[row] = absmax;
  }
  __syncthreads();
}

// Codes of `tile_rows` rows, each with its inverse scale, in swizzled pieces of 16 bytes.
__device__ __forceinline__ void store_codes(const float* tile, const float* row_inverse,
                                            int tile_rows, i32 bf16, unsigned char* to) {
  constexpr int kChannels = 128 / QK_BITS;  // a piece
  constexpr int kPieces = kRowBytes / 16;
  for (int i = static_cast<int>(threadIdx.x); i < tile_rows * kPieces; i += kQuantizeThreads) {
    const int row = i / kPieces, piece = i % kPieces;
    const float* x = tile + row * kQkPitch + piece * kChannels;
    unsigned words[4] = {};
    if constexpr (QK_BITS == 16) {
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        words[w] = bf16 ? pack_bf16x2(x[2 * w], x[2 * w + 1]) : pack_f16x2(x[2 * w], x[2 * w + 1]);
      }
    } else {
      const Quantizer quantizer = {0.0f, row_inverse[row]};
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        const int code = integer_code(scaled(quantizer, x[c]), kMaxCode);
        const unsigned field = static_cast<unsigned>(code) & ((1u << QK_BITS) - 1u);
        words[c * QK_BITS / 32] |= field << (c * QK_BITS % 32);
      }
    }
    *reinterpret_cast<uint4*>(to + swizzled(row, piece, kRowBytes)) =
        make_uint4(words[0], words[1], words[2], words[3]);
  }
}

__device__ __forceinline__ void quantize_q(const QuantizeParams& p, i32 block, float* tile,
                                           float* row_absmax, float* group_scale) {
  const i32 q_tile = block % p.sequences.q_tiles;
  const i32 head = block / p.sequences.q_tiles % p.heads.qo;
  const i32 batch = block / p.sequences.q_tiles / p.heads.qo;
  const SequenceEntry sequence = sequence_at(p.sequences, batch);
  const i32 rows = min(B_Q, sequence.qo_len - q_tile * B_Q);
  if (rows <= 0 || sequence.bad) return;
  const i64 at = head * p.heads.q_tiles + sequence.first_q_tile + q_tile;
  const int thread = static_cast<int>(threadIdx.x);

  load_tile<D_QK, kQkPitch>(p.q, batch, sequence.q_start + q_tile * B_Q, head, rows, B_Q, tile);
  if (p.lse_bias != nullptr) {
    const i32 kv_head = head / (p.heads.qo / p.heads.kv);
    const float* mean = p.k_mean + (kv_head * p.heads.sequences + batch) * D_QK;
    for (int row = thread / 32; row < rows; row += kWarps) {
      float dot = 0.0f;
      for (int c = thread % 32; c < D_QK; c += 32) dot += tile[row * kQkPitch + c] * mean[c];
      dot = warp_sum(dot);
      if (thread % 32 == 0) p.lse_bias[at * B_Q + row] = p.sm_scale * dot;
    }
    __syncthreads();
  }
  if (p.smooth_q) {
    for (int c = thread; c < D_QK; c += kQuantizeThreads) {
      const float sum = ordered_sum(tile + c, kQkPitch, B_Q);
      const float mean = round_product(sum / static_cast<float>(rows), p.product_bf16);
      p.q_mean[at * D_QK + c] = mean;
      for (int row = 0; row < rows; ++row) tile[row * kQkPitch + c] -= mean;
    }
    __syncthreads();
  }
  if constexpr (QK_BITS != 16) {
    measure_rows(tile, rows, p, row_absmax);
    for (int group = thread; group < 4 * kQGroupsPerWarp; group += kQuantizeThreads) {
      float absmax = 0.0f;
      for (int row = 0; row < rows; ++row) {
        const bool own =
            p.granularity == 3 || (row / kRowsPerWarp == group / kQGroupsPerWarp &&
                                   (p.granularity == 2 || row % 8 == group % kQGroupsPerWarp));
        if (own) absmax = take_absmax(absmax, row_absmax[row]);
      }
      const Quantizer quantizer = make_quantizer(absmax, kMaxCode);
      p.q_scale[at * (4 * kQGroupsPerWarp) + group] = quantizer.scale;
      group_scale[group] = quantizer.inverse;
    }
    __syncthreads();
    for (int row = thread; row < B_Q; row += kQuantizeThreads) {
      row_absmax[row] = group_scale[q_group_of_row(row, kRowsPerWarp)];
    }
    __syncthreads();
  }
  store_codes(tile, row_absmax, B_Q, p.product_bf16, p.q_codes + at * (B_Q * kRowBytes));
}

__device__ __forceinline__ void quantize_k(const QuantizeParams& p, i32 block, float* tile,
                                           float* row_absmax, float* group_scale) {
  const i32 k_tile = block % p.sequences.k_tiles;
  const i32 head = block / p.sequences.k_tiles % p.heads.kv;
  const i32 batch = block / p.sequences.k_tiles / p.heads.kv;
  const SequenceEntry sequence = sequence_at(p.sequences, batch);
  const i32 rows = min(kBk, sequence.kv_len - k_tile * kBk);
  if (rows <= 0) return;
  const i64 at = head * p.heads.k_tiles + sequence.first_k_tile + k_tile;
  const int thread = static_cast<int>(threadIdx.x);

  load_tile<D_QK, kQkPitch>(p.k, batch, sequence.kv_start + k_tile * kBk, head, rows, kBk, tile);
  if (p.k_mean != nullptr) {
    const float* mean = p.k_mean + (head * p.heads.sequences + batch) * D_QK;
    for (int i = thread; i < rows * D_QK; i += kQuantizeThreads) {
      tile[i / D_QK * kQkPitch + i % D_QK] -= mean[i % D_QK];
    }
    __syncthreads();
  }
  if constexpr (QK_BITS != 16) {
    measure_rows(tile, rows, p, row_absmax);
    if (thread < kKGroupsPerTile) {
      float absmax = 0.0f;
      for (int row = 0; row < rows; ++row) {
        if (p.granularity != 1 || k_group_of_key(row) == thread) {
          absmax = take_absmax(absmax, row_absmax[row]);
        }
      }
      const Quantizer quantizer = make_quantizer(absmax, kMaxCode);
      p.k_scale[at * kKGroupsPerTile + thread] = quantizer.scale;
      group_scale[thread] = quantizer.inverse;
    }
    __syncthreads();
    if (thread < kBk) row_absmax[thread] = group_scale[k_group_of_key(thread)];
    __syncthreads();
  }
  store_codes(tile, row_absmax, kBk, p.product_bf16, p.k_codes + at * (kBk * kRowBytes));
}

// Token that stands in a slot of an E4M3 row: the inverse of v_token_slot.
__device__ __forceinline__ int token_of_slot(int slot) {
  return slot / 32 * 32 + (slot % 32 / 16 * 2 + slot % 4 / 2) * 8 + slot % 16 / 4 * 2 + slot % 2;
}

__device__ __forceinline__ void quantize_v(const QuantizeParams& p, i32 block, float* tile,
                                           float* inverse) {
  const i32 k_tile = block % p.sequences.k_tiles;
  const i32 head = block / p.sequences.k_tiles % p.heads.kv;
  const i32 batch = block / p.sequences.k_tiles / p.heads.kv;
  const SequenceEntry sequence = sequence_at(p.sequences, batch);
  const i32 rows = min(kBk, sequence.kv_len - k_tile * kBk);
  if (rows <= 0) return;
  const int thread = static_cast<int>(threadIdx.x);
  load_tile<D_V, kVPitch>(p.v, batch, sequence.kv_start + k_tile * kBk, head, rows, kBk, tile);

  // Scale and mean of each channel: of this tile, of the sequence, or none.
  const bool grouped = p.v_group != 0;
  const i64 stats = grouped ? head * p.heads.v_groups + sequence.first_v_group + k_tile
                            : head * p.heads.sequences + batch;
  for (int c = thread; c < D_V; c += kQuantizeThreads) {
    Quantizer quantizer = {1.0f, 1.0f};
    if (grouped) {
      const float mean =
          p.v_smooth ? ordered_sum(tile + c, kVPitch, kBk) / static_cast<float>(rows) : 0.0f;
      float absmax = 0.0f;
      for (int row = 0; row < rows; ++row) {
        tile[row * kVPitch + c] -= mean;
        absmax = take_absmax(absmax, tile[row * kVPitch + c]);
      }
      quantizer = V_BITS == 8 ? make_quantizer(absmax, p.v_max_code) : make_f16_quantizer(absmax);
      p.v_scale[stats * D_V + c] = quantizer.scale;
      p.v_mean[stats * D_V + c] = mean;
    } else if (p.v_scale != nullptr) {
      const float scale = p.v_scale[stats * D_V + c];
      const float mean = p.v_smooth ? p.v_mean[stats * D_V + c] : 0.0f;
      // The inverse from the scale: exact for a power of two; else from the same absmax as in stats.
      quantizer.inverse = p.v_scale[(p.heads.kv * p.heads.sequences + stats) * D_V + c];
      quantizer.scale = scale;
      if (p.v_smooth) {
        for (int row = 0; row < rows; ++row) tile[row * kVPitch + c] -= mean;
      }
    }
    inverse[c] = quantizer.inverse;
  }
  __syncthreads();

  const i64 at = head * p.heads.k_tiles + sequence.first_k_tile + k_tile;
  unsigned char* to = p.v_codes + at * kVBytes;
  if constexpr (V_BITS == 8) {
    for (int i = thread; i < D_V * (kBk / 16); i += kQuantizeThreads) {
      const int c = i % D_V, piece = i / D_V;
      const Quantizer quantizer = {0.0f, inverse[c]};
      unsigned words[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        unsigned pair[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int token = token_of_slot(piece * 16 + w * 4 + h * 2);
          const float* x = tile + token * kVPitch + c;
          pair[h] = pack_e4m3x2(scaled(quantizer, x[0]), scaled(quantizer, x[kVPitch]));
        }
        words[w] = pair[0] | pair[1] << 16;
      }
      *reinterpret_cast<uint4*>(to + swizzled(c, piece, kBk)) =
          make_uint4(words[0], words[1], words[2], words[3]);
    }
  } else {
    for (int i = thread; i < kBk * (D_V / 8); i += kQuantizeThreads) {
      const int row = i / (D_V / 8), piece = i % (D_V / 8);
      const float* x = tile + row * kVPitch + piece * 8;
      unsigned words[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float lo = scaled({0.0f, inverse[piece * 8 + 2 * w]}, x[2 * w]);
        const float hi = scaled({0.0f, inverse[piece * 8 + 2 * w + 1]}, x[2 * w + 1]);
        const bool bf16 = QK_BITS == 16 && p.product_bf16 != 0;
        words[w] = bf16 ? pack_bf16x2(lo, hi) : pack_f16x2(lo, hi);
      }
      *reinterpret_cast<uint4*>(to + swizzled(row, piece, D_V * 2)) =
          make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kQuantizeThreads)
    sageattn_quantize(const __grid_constant__ QuantizeParams p) {
  extern __shared__ __align__(16) float tile[];  // [B_Q or 64][pitch]
  __shared__ float row_absmax[128];
  __shared__ float per_group[256];
  i32 block = static_cast<i32>(blockIdx.x);
  const i32 q_blocks = p.sequences.batch * p.heads.qo * p.sequences.q_tiles;
  const i32 kv_blocks = p.sequences.batch * p.heads.kv * p.sequences.k_tiles;
  if (block < q_blocks) return quantize_q(p, block, tile, row_absmax, per_group);
  block -= q_blocks;
  if (block < kv_blocks) return quantize_k(p, block, tile, row_absmax, per_group);
  quantize_v(p, block - kv_blocks, tile, per_group);
}

}  // namespace sageattn
