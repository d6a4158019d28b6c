#include "tests/buffers.h"

#include <algorithm>
#include <limits>

namespace sageattn_test {

namespace {

constexpr int64_t kGuard = 64;  // elements before and after each tensor
constexpr int32_t kStatusGuard = 0x5A5A5A5A;

// Element (b, t, h, c) of the tensor lies at origin + the strides.
struct Placement {
  Dims stride;
  int64_t origin, elements;
};

Placement place(View view, int32_t layout, const Dims& n) {
  Placement p{};
  const bool head_major = (layout == SAGEATTN_LAYOUT_HND) != (view == View::OtherMajor);
  int64_t dim = 1;
  switch (view) {
    case View::Default:
    case View::OtherMajor:
      if (head_major) {
        p.stride = {n.head * n.token * n.dim, n.dim, n.token * n.dim, 1};
      } else {
        p.stride = {n.token * n.head * n.dim, n.head * n.dim, n.dim, 1};
      }
      break;
    case View::Padded:
      p.stride.dim = 1;
      p.stride.head = n.dim + 3;
      p.stride.token = n.head * p.stride.head + 5;
      p.stride.batch = n.token * p.stride.token + 7;
      break;
    case View::Transposed:
      p.stride = {n.head * n.dim * n.token, 1, n.dim * n.token, n.token};
      break;
    case View::Interleaved:
      dim = 2;
      [[fallthrough]];
    case View::Reversed:
      p.stride = {n.token * n.head * n.dim * dim, n.head * n.dim * dim, n.dim * dim, dim};
      break;
    case View::SharedHead:
      p.stride = {n.token * n.dim, n.dim, 0, 1};
      break;
  }
  const auto span = [](int64_t count, int64_t stride) {
    return count > 1 ? (count - 1) * stride : 0;
  };
  const bool none = n.batch * n.token * n.head * n.dim == 0;
  p.elements = none ? 0
                    : 1 + span(n.batch, p.stride.batch) + span(n.token, p.stride.token) +
                          span(n.head, p.stride.head) + span(n.dim, p.stride.dim);
  p.origin = kGuard;
  if (view == View::Reversed && !none) {
    p.origin +=
        span(n.token, p.stride.token) + span(n.head, p.stride.head) + span(n.dim, p.stride.dim);
    p.stride.token = -p.stride.token;
    p.stride.head = -p.stride.head;
    p.stride.dim = -p.stride.dim;
  }
  return p;
}

}  // namespace

Tensor::Tensor(View view, int32_t layout, int32_t dtype, const Dims& dims)
    : view_(view), dtype_(dtype), dims_(dims) {
  const Placement placement = place(view, layout, dims);
  stride_ = placement.stride;
  origin_ = placement.origin;
  empty_ = placement.elements == 0;
  image.assign(static_cast<size_t>((placement.elements + 2 * kGuard) * dtype_size(dtype)), kCanary);
}

void Tensor::fill_nan() {
  const auto size = static_cast<size_t>(dtype_size(dtype_));
  for (size_t i = 0; i < image.size(); i += size) {
    store(&image[i], dtype_, std::numeric_limits<float>::quiet_NaN());
  }
}

size_t Tensor::at(int64_t b, int64_t t, int64_t h, int64_t c) const {
  const Dims& s = stride_;
  return static_cast<size_t>((origin_ + b * s.batch + t * s.token + h * s.head + c * s.dim) *
                             dtype_size(dtype_));
}

unsigned char* Tensor::data(unsigned char* copy) const {
  return empty_ ? nullptr : copy + origin_ * dtype_size(dtype_);
}

Dims Tensor::strides(bool varlen) const {
  if (view_ == View::Default) return {0, 0, 0, 0};
  Dims s = stride_;
  if (dims_.batch == 1) s.batch = varlen ? 0 : -77;
  if (dims_.token == 1) s.token = -7777;
  if (dims_.head == 1) s.head = 77777;
  if (dims_.dim == 1) s.dim = 0;
  return s;
}

Buffers make_buffers(const Problem& p, const Data& data, const Lengths& instead) {
  const AttentionShape& s = p.shape;
  const bool varlen = p.batch_mode == SAGEATTN_BATCH_VARLEN;
  const std::vector<int32_t> cu_q = cumulative(p.qo_lens, p.gap);
  const std::vector<int32_t> cu_kv = cumulative(p.kv_lens, p.gap);
  const int64_t batches = varlen ? 1 : p.batch();
  const auto tokens = [&](const std::vector<int>& lens, const std::vector<int32_t>& cu) -> int64_t {
    if (varlen) return cu.back() + p.gap;
    return lens.empty() ? 0 : lens[0];
  };
  const int64_t q_tokens = tokens(p.qo_lens, cu_q), kv_tokens = tokens(p.kv_lens, cu_kv);
  Buffers b{
      Tensor(p.q_view, p.layout, p.q_dtype, {batches, q_tokens, s.num_qo_heads, s.head_dim}),
      Tensor(p.k_view, p.layout, p.kv_dtype, {batches, kv_tokens, s.num_kv_heads, s.head_dim}),
      Tensor(p.v_view, p.layout, p.kv_dtype, {batches, kv_tokens, s.num_kv_heads, s.head_dim_v}),
      Tensor(p.out_view, p.layout, p.out_dtype, {batches, q_tokens, s.num_qo_heads, s.head_dim_v}),
      // lse is [batch, head, token] unless its strides say otherwise.
      Tensor(p.lse_view, SAGEATTN_LAYOUT_HND, SAGEATTN_F32, {batches, q_tokens, s.num_qo_heads, 1}),
      instead.cu_q.empty() ? cu_q : instead.cu_q, instead.cu_kv.empty() ? cu_kv : instead.cu_kv,
      instead.used.empty() ? std::vector<int32_t>(p.seqused.begin(), p.seqused.end())
                           : instead.used,
      std::vector<int32_t>(static_cast<size_t>(p.batch()) + 2, kStatusGuard)};
  const auto place_rows = [&](Tensor& tensor, const std::vector<float>& values, int rows,
                              int sequence, int64_t start) {
    const Dims& n = tensor.dims();
    size_t next = 0;
    for (int t = 0; t < rows; ++t) {
      for (int64_t h = 0; h < n.head; ++h) {
        for (int64_t c = 0; c < n.dim; ++c) {
          store(&tensor.image[tensor.at(varlen ? 0 : sequence, start + t, h, c)], tensor.dtype(),
                values[next++]);
        }
      }
    }
  };
  for (Tensor* tensor : {&b.q, &b.k, &b.v}) tensor->fill_nan();
  for (int i = 0; i < p.batch(); ++i) {
    const auto n = static_cast<size_t>(i);
    const LiteralInput& input = data[n];
    place_rows(b.q, input.q, input.qo_len, i, varlen ? cu_q[n] : 0);
    place_rows(b.k, input.k, input.kv_len, i, varlen ? cu_kv[n] : 0);
    place_rows(b.v, input.v, input.kv_len, i, varlen ? cu_kv[n] : 0);
  }
  return b;
}

bool status_guards_hold(const std::vector<int32_t>& status) {
  return status.front() == kStatusGuard && status.back() == kStatusGuard;
}

Addresses addresses_of(Buffers& b) {
  return {b.q.image.data(),   b.k.image.data(),   b.v.image.data(),
          b.out.image.data(), b.lse.image.data(), b.cu_q.data(),
          b.cu_kv.data(),     b.used.data(),      b.status.data()};
}

sageattn_execute_args make_args(const Problem& p, const Buffers& b, const Addresses& at) {
  const bool varlen = p.batch_mode == SAGEATTN_BATCH_VARLEN;
  sageattn_execute_args args = {};
  args.struct_size = sizeof args;
  args.batch = p.batch();
  if (varlen) {
    args.total_qo = b.q.dims().token;
    args.total_kv = b.k.dims().token;
    args.cu_seqlens_q = at.cu_q;
    args.cu_seqlens_kv = at.cu_kv;
  } else {
    args.qo_len = static_cast<int32_t>(b.q.dims().token);
    args.kv_len = static_cast<int32_t>(b.k.dims().token);
  }
  const auto input = [&](const Tensor& tensor, unsigned char* copy) {
    const Dims n = tensor.strides(varlen);
    return sageattn_const_tensor{tensor.data(copy), n.batch, n.token, n.head, n.dim};
  };
  args.q = input(b.q, at.q);
  args.k = input(b.k, at.k);
  args.v = input(b.v, at.v);
  const Dims os = b.out.strides(varlen), ls = b.lse.strides(varlen);
  args.out = {b.out.data(at.out), os.batch, os.token, os.head, os.dim};
  if (b.lse.data(at.lse) != nullptr) {
    args.lse = {reinterpret_cast<float*>(b.lse.data(at.lse)), ls.batch, ls.head, ls.token};
  }
  if (!b.used.empty()) args.seqused_kv = at.used;
  args.status = at.status + 1;
  return args;
}

}  // namespace sageattn_test
