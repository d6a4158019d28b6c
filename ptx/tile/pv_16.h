// O += P V with 16-bit P and V, for attn_sm80 and attn_f16.
//
// The exponentials of the next 16 keys stand between the products of these, in one basic block: the
// tensor core and the other pipes work at the same time. Row sums are a column of ones beside V, so
// that a probability is dead once it is packed: added up in fp32 it stays in a register until its
// turn comes, and ptxas moves it about (docs/kernels/attn_sm80.md has the figures of both).
#pragma once

#include "ptx/tile/attention.h"

namespace sageattn {

// The A operand of P V for two fragments of 8 keys (n, n + 1) of one row fragment.
template <int kMt, bool kBf16>
__device__ __forceinline__ void probabilities_16(const int (&s)[kKeyFragments][4], int mt, int n,
                                                 const Exponents<kMt>& exponents,
                                                 unsigned (&a)[4]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float x = exp2_approx(exponents.at(s[n + i][2 * h], mt, h));
      const float y = exp2_approx(exponents.at(s[n + i][2 * h + 1], mt, h));
      a[i * 2 + h] = kBf16 ? pack_bf16x2(x, y) : pack_f16x2(x, y);
    }
  }
}

template <bool kBf16>
__device__ __forceinline__ void mma_16(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                                       unsigned b1) {
  if constexpr (kBf16) {
    mma_bf16(d, a, b0, b1);
  } else {
    mma_f16(d, a, b0, b1);
  }
}

// Adds the sum of P over 16 keys; the same in all lanes of a row.
template <bool kBf16>
__device__ __forceinline__ void add_row_sum_16(float (&sum)[4], const unsigned (&a)[4]) {
  constexpr unsigned kOnes = kBf16 ? 0x3f803f80u : 0x3c003c00u;
  mma_16<kBf16>(sum, a, kOnes, kOnes);
}

template <int kMt>
__device__ __forceinline__ void add_row_sums(const float (&sum)[kMt][4], RowState<kMt>& state) {
#pragma unroll
  for (int mt = 0; mt < kMt; ++mt) {
    state.sum[mt][0] += sum[mt][0];
    state.sum[mt][1] += sum[mt][2];
  }
}

template <int kMt, int kFragments>
__device__ __forceinline__ void rescale(const Exponents<kMt>& exponents, RowState<kMt>& state,
                                        float (&o)[kMt][kFragments][4]) {
#pragma unroll
  for (int mt = 0; mt < kMt; ++mt) {
#pragma unroll
    for (int h = 0; h < 2; ++h) state.sum[mt][h] *= exponents.alpha[mt][h];
#pragma unroll
    for (int n = 0; n < kFragments; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) o[mt][n][e] *= exponents.alpha[mt][e / 2];
    }
  }
}

// fp32 accumulation in place; V is loaded one fragment ahead. kParts: see in_parts.
template <int kMt, int kDv, bool kBf16, int kParts>
__device__ __forceinline__ void accumulate_16(const int (&s)[kMt][kKeyFragments][4],
                                              const Exponents<kMt>& exponents, unsigned v,
                                              const Work<kMt>& work, i32 tile, RowState<kMt>& state,
                                              float (&o)[kMt][kDv / 8][4]) {
  const unsigned lane = thread_anew() % 32;
  const unsigned v0 = operand_address<kDv * 2>(v, lane % 16, lane / 16);
  constexpr int kSteps = kBk / 16, kPairs = kDv / 16, kLoads = kSteps * kPairs;
  unsigned a[2][kMt][4], b[2][4];
  float sum[kMt][4] = {};
#pragma unroll
  for (int mt = 0; mt < kMt; ++mt) {
    probabilities_16<kMt, kBf16>(s[mt], mt, 0, exponents, a[0][mt]);
  }
  ldmatrix_x4_trans(b[0], v0);
  const auto part = [&](int from, int to) {
#pragma unroll
    for (int i = from; i < to; ++i) {
      const int step = i / kPairs, n = i % kPairs * 2;
      if (i + 1 < kLoads) {
        ldmatrix_x4_trans(b[(i + 1) & 1],
                          (v0 ^ ((i + 1) % kPairs * 32)) + (i + 1) / kPairs * 16 * kDv * 2);
      }
#pragma unroll
      for (int mt = 0; mt < kMt; ++mt) {
        mma_16<kBf16>(o[mt][n], a[step & 1][mt], b[i & 1][0], b[i & 1][1]);
        mma_16<kBf16>(o[mt][n + 1], a[step & 1][mt], b[i & 1][2], b[i & 1][3]);
      }
      if (i % kPairs == kPairs - 1) {
#pragma unroll
        for (int mt = 0; mt < kMt; ++mt) add_row_sum_16<kBf16>(sum[mt], a[step & 1][mt]);
      }
      const int mt = i % kPairs;  // one row fragment behind each of the first pairs
      if (mt < kMt && step + 1 < kSteps) {
        probabilities_16<kMt, kBf16>(s[mt], mt, (step + 1) * 2, exponents, a[(step + 1) & 1][mt]);
      }
    }
  };
#pragma unroll
  for (int i = 0; i < kLoads; i += kLoads / kParts) {
    if (kParts == 1 || in_parts(work, tile)) part(i, i + kLoads / kParts);
  }
  add_row_sums(sum, state);
}

// fp16 accumulators of two fragments live for one tile, then they are promoted to fp32.
template <int kMt, int kDv>
__device__ __forceinline__ void accumulate_acc16(const int (&s)[kMt][kKeyFragments][4],
                                                 const Exponents<kMt>& exponents, unsigned v,
                                                 const Work<kMt>& work, i32 tile,
                                                 RowState<kMt>& state,
                                                 float (&o)[kMt][kDv / 8][4]) {
  const unsigned lane = thread_anew() % 32;
  const unsigned v0 = operand_address<kDv * 2>(v, lane % 16, lane / 16);
  constexpr int kSteps = kBk / 16;
  unsigned a[kSteps][kMt][4];
  float sum[kMt][4] = {};
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int mt = 0; mt < kMt; ++mt) {
      probabilities_16<kMt, false>(s[mt], mt, step * 2, exponents, a[step][mt]);
      add_row_sum_16<false>(sum[mt], a[step][mt]);
    }
  }
  add_row_sums(sum, state);
  const auto channels = [&](int from, int to) {
#pragma unroll
    for (int n = from; n < to; n += 2) {
      unsigned acc[kMt][2][2] = {};
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        unsigned b[4];
        ldmatrix_x4_trans(b, (v0 ^ (n * 16)) + step * 16 * kDv * 2);
#pragma unroll
        for (int mt = 0; mt < kMt; ++mt) {
          mma_f16_acc16(acc[mt][0], a[step][mt], b[0], b[1]);
          mma_f16_acc16(acc[mt][1], a[step][mt], b[2], b[3]);
        }
      }
#pragma unroll
      for (int mt = 0; mt < kMt; ++mt) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            o[mt][n + i][2 * h] += f16_lo(acc[mt][i][h]);
            o[mt][n + i][2 * h + 1] += f16_hi(acc[mt][i][h]);
          }
        }
      }
    }
  };
  channels(0, kDv / 16);
  if (in_parts(work, tile)) channels(kDv / 16, kDv / 8);
}

}  // namespace sageattn
