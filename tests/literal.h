// A second, slow and literal implementation of docs/numerics.md.
//
// Written from that page alone and sharing no code with the library, so that bit equality of the
// two says something. Plain loops, section by section; conversions by value arithmetic.
#pragma once

#include <cstdint>
#include <vector>

#include "sageattn.h"

namespace sageattn_test {

// One sequence, with its effective lengths (kv_len is seqused_kv where that is given).
struct LiteralInput {
  int qo_len = 0, kv_len = 0;
  std::vector<float> q;  // [qo_len][num_qo_heads][head_dim]
  std::vector<float> k;  // [kv_len][num_kv_heads][head_dim]
  std::vector<float> v;  // [kv_len][num_kv_heads][head_dim_v]
};

struct MaskSpec {
  int32_t kind = SAGEATTN_MASK_NONE;
  int32_t left = 0, right = 0;
};

struct LiteralOutput {
  std::vector<float> out;  // [qo_len][num_qo_heads][head_dim_v], rounded to the output type
  std::vector<float> lse;  // [qo_len][num_qo_heads]
};

// `info` holds the resolved numerics of a plan that quantizes (not EXACT).
LiteralOutput literal_attention(const sageattn_plan_info& info, int head_dim, int num_qo_heads,
                                MaskSpec mask, const LiteralInput& input);

// Round half to even. Overflow gives infinity in fp16 and bf16, the largest finite value in E4M3
// and E5M2; NaN stays NaN everywhere.
float round_fp16(float x);
float round_bf16(float x);
float round_e4m3(float x);
float round_e5m2(float x);
float round_dtype(float x, int32_t dtype);  // SAGEATTN_F16, BF16 or F32

// Section 2.
float literal_mean(const std::vector<float>& x);
// Section 6.
float literal_exp2(float x);

// Section 7: one step of at most 32 keys. p and v hold the values of codes.
float literal_fp8_step(const float* p, const float* v, int n, float acc, bool e5m2);
float literal_fp32_step(const float* p, const float* v, int n, float acc);
float literal_fp16_step(const float* p, const float* v, int n, float acc);
float literal_i8_step(const float* p, const float* v, int n, float acc);

}  // namespace sageattn_test
