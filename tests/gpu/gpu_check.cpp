// The CUDA backend against the CPU backend, on a GPU, through the C API.
//
//   gpu_check [--cases N] [--seed N] [--device N] [--numerics TEXT] [--case N] [--verbose]
//
// Prints a table and the failures; exits with 0 if there are none, 77 without a usable GPU.
//
// What may differ. Codes and integer scores are the same bits on both, so P before it is rounded
// differs by the relative error e of the exponential (its argument is rounded in fp32: |score| times
// a few 2^-24, and ex2.approx adds 2^-22). P is then rounded to a format of relative step u; where
// the two fall on different sides of a boundary they differ by u. So an output differs by at most
// (e + u) sum p |v|, and, since a boundary lies between the two with probability 2 e / u only, in
// root mean square over many rows by about sqrt(2 e u) of it. Added to both: how the tensor core
// accumulates, where the model is an assumption, and the rounding of the output, alike.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "sageattn.h"
#include "src/core/error.h"
#include "tests/exact_reference.h"
#include "tests/gpu/device_memory.h"
#include "tests/grid.h"

using namespace sageattn_test;

namespace {

constexpr unsigned char kCanary = 0xA5;
constexpr int64_t kGuard = 64;               // elements before and after each tensor
constexpr size_t kWorkspaceGuard = 1 << 16;  // bytes

// ---- Tensors: an image of the memory, which either backend gets a copy of ------------------------

struct Dims {
  int64_t batch, token, head, dim;
};

class Tensor {
 public:
  Tensor(View view, int32_t layout, int32_t dtype, const Dims& n)
      : view_(view), dtype_(dtype), n_(n) {
    const bool head_major = (layout == SAGEATTN_LAYOUT_HND) != (view == View::OtherMajor);
    switch (view) {
      case View::Default:
      case View::OtherMajor:
        stride_ = head_major ? Dims{n.head * n.token * n.dim, n.dim, n.token * n.dim, 1}
                             : Dims{n.token * n.head * n.dim, n.head * n.dim, n.dim, 1};
        break;
      case View::Padded: {
        const int64_t token = n.head * (n.dim + 3) + 5;
        stride_ = {n.token * token + 7, token, n.dim + 3, 1};
        break;
      }
      case View::Transposed:
        stride_ = {n.head * n.dim * n.token, 1, n.dim * n.token, n.token};
        break;
      case View::Interleaved:
        stride_ = {n.token * n.head * n.dim * 2, n.head * n.dim * 2, n.dim * 2, 2};
        break;
      case View::Reversed:
        stride_ = {n.token * n.head * n.dim, -n.head * n.dim, -n.dim, -1};
        break;
      case View::SharedHead:
        stride_ = {n.token * n.dim, n.dim, 0, 1};
        break;
    }
    empty_ = n.batch * n.token * n.head * n.dim == 0;
    int64_t span = empty_ ? 0 : 1, below = 0;
    if (!empty_) {
      for (const auto& [count, stride] : {std::pair{n.batch, stride_.batch},
                                          {n.token, stride_.token},
                                          {n.head, stride_.head},
                                          {n.dim, stride_.dim}}) {
        span += (count - 1) * std::abs(stride);
        if (stride < 0) below -= (count - 1) * stride;
      }
    }
    origin_ = kGuard + below;
    image.assign(static_cast<size_t>((span + 2 * kGuard) * dtype_size(dtype)), kCanary);
  }

  void fill_nan() {
    for (size_t i = 0; i < image.size(); i += static_cast<size_t>(dtype_size(dtype_))) {
      store(&image[i], dtype_, std::numeric_limits<float>::quiet_NaN());
    }
  }
  size_t at(int64_t b, int64_t t, int64_t h, int64_t c) const {
    return static_cast<size_t>(
        (origin_ + b * stride_.batch + t * stride_.token + h * stride_.head + c * stride_.dim) *
        dtype_size(dtype_));
  }
  // Of a copy of the image; null for a tensor without elements.
  unsigned char* data(unsigned char* copy) const {
    return empty_ ? nullptr : copy + origin_ * dtype_size(dtype_);
  }
  Dims strides(bool varlen) const {
    if (view_ == View::Default) return {0, 0, 0, 0};
    Dims s = stride_;
    if (varlen) s.batch = 0;
    return s;
  }
  int32_t dtype() const { return dtype_; }
  const Dims& dims() const { return n_; }

  std::vector<unsigned char> image;

 private:
  View view_;
  int32_t dtype_;
  Dims n_, stride_{};
  bool empty_ = false;
  int64_t origin_ = 0;
};

// All memory of one execute but the workspace.
struct Buffers {
  Tensor q, k, v, out, lse;
  std::vector<int32_t> cu_q, cu_kv, used, status;
};

// Lengths that are passed instead of the true ones.
struct Hostile {
  std::vector<int32_t> cu_q, cu_kv, used;
};

std::vector<int32_t> cumulative(const std::vector<int>& lens, int start) {
  std::vector<int32_t> cu{start};
  for (const int len : lens) cu.push_back(cu.back() + len);
  return cu;
}

Buffers make_buffers(const Problem& p, const Data& data, const Hostile& hostile = {}) {
  const AttentionShape& s = p.shape;
  const bool varlen = p.batch_mode == SAGEATTN_BATCH_VARLEN;
  const std::vector<int32_t> cu_q = cumulative(p.qo_lens, p.gap);
  const std::vector<int32_t> cu_kv = cumulative(p.kv_lens, p.gap);
  const int64_t batches = varlen ? 1 : p.batch();
  const int64_t q_tokens = varlen ? cu_q.back() + p.gap : p.qo_lens[0];
  const int64_t kv_tokens = varlen ? cu_kv.back() + p.gap : p.kv_lens[0];
  Buffers b{
      Tensor(p.q_view, p.layout, p.q_dtype, {batches, q_tokens, s.num_qo_heads, s.head_dim}),
      Tensor(p.k_view, p.layout, p.kv_dtype, {batches, kv_tokens, s.num_kv_heads, s.head_dim}),
      Tensor(p.v_view, p.layout, p.kv_dtype, {batches, kv_tokens, s.num_kv_heads, s.head_dim_v}),
      Tensor(p.out_view, p.layout, p.out_dtype, {batches, q_tokens, s.num_qo_heads, s.head_dim_v}),
      Tensor(p.lse_view, SAGEATTN_LAYOUT_HND, SAGEATTN_F32, {batches, q_tokens, s.num_qo_heads, 1}),
      hostile.cu_q.empty() ? cu_q : hostile.cu_q,
      hostile.cu_kv.empty() ? cu_kv : hostile.cu_kv,
      hostile.used.empty() ? std::vector<int32_t>(p.seqused.begin(), p.seqused.end())
                           : hostile.used,
      std::vector<int32_t>(static_cast<size_t>(p.batch()) + 2, 0x5A5A5A5A)};
  const auto place = [&](Tensor& tensor, const std::vector<float>& values, int tokens, int sequence,
                         int64_t start) {
    size_t next = 0;
    for (int t = 0; t < tokens; ++t) {
      for (int64_t h = 0; h < tensor.dims().head; ++h) {
        for (int64_t c = 0; c < tensor.dims().dim; ++c) {
          store(&tensor.image[tensor.at(varlen ? 0 : sequence, start + t, h, c)], tensor.dtype(),
                values[next++]);
        }
      }
    }
  };
  for (Tensor* tensor : {&b.q, &b.k, &b.v}) tensor->fill_nan();
  for (int i = 0; i < p.batch(); ++i) {
    const LiteralInput& input = data[static_cast<size_t>(i)];
    const auto n = static_cast<size_t>(i);
    place(b.q, input.q, input.qo_len, i, varlen ? cu_q[n] : 0);
    place(b.k, input.k, input.kv_len, i, varlen ? cu_kv[n] : 0);
    place(b.v, input.v, input.kv_len, i, varlen ? cu_kv[n] : 0);
  }
  return b;
}

// Where the memory of an execute lies.
struct Addresses {
  unsigned char *q, *k, *v, *out, *lse;
  int32_t *cu_q, *cu_kv, *used, *status;
};

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

// ---- Plans -------------------------------------------------------------------------------------

using PlanOwner = std::unique_ptr<sageattn_plan, void (*)(sageattn_plan*)>;

struct PlanResult {
  PlanOwner plan{nullptr, sageattn_plan_destroy};
  int32_t status = SAGEATTN_OK;
  std::string message;
  sageattn_plan_info info = {};
};

PlanResult make_plan(sageattn_context* context, const Problem& p, const Numerics& numerics) {
  sageattn_attn_desc desc = make_desc(p, numerics);
  const auto largest = [](const std::vector<int>& lens) {
    return std::max(1, *std::max_element(lens.begin(), lens.end()));
  };
  const int slack = p.id % 3 == 0 ? 5 : 0;
  desc.max_batch = p.batch() + slack;
  desc.max_qo_len = largest(p.qo_lens) + slack;
  desc.max_kv_len = largest(p.kv_lens) + slack;
  if (p.batch_mode == SAGEATTN_BATCH_VARLEN) {
    desc.max_total_qo = std::max(1, cumulative(p.qo_lens, p.gap).back() + p.gap) + slack;
    desc.max_total_kv = std::max(1, cumulative(p.kv_lens, p.gap).back() + p.gap) + slack;
  }
  PlanResult result;
  sageattn_error error = {};
  error.struct_size = sizeof error;
  sageattn_plan* plan = nullptr;
  result.status = sageattn_plan_create(context, &desc, &plan, &error);
  result.message = error.message;
  if (result.status != SAGEATTN_OK) return result;
  result.plan.reset(plan);
  result.info.struct_size = sizeof result.info;
  result.status = sageattn_plan_get_info(plan, &result.info, nullptr);
  return result;
}

// The numerics that a CUDA plan resolved to, for the CPU backend.
Numerics same_numerics(const Numerics& numerics, const sageattn_plan_info& info) {
  Numerics same = numerics;
  same.arch = info.arch;
  if (info.qk_format == SAGEATTN_QK_NONE) return same;
  sageattn_attn_desc& d = same.desc;
  d.qk_format = info.qk_format;
  d.qk_granularity = info.qk_granularity;
  d.smooth_q = info.smooth_q;
  d.smooth_k = info.smooth_k;
  d.smooth_v = info.smooth_v;
  d.v_scale = info.v_scale;
  d.rotation = info.rotation;
  d.pv_format = info.pv_format;
  d.row_sum = info.row_sum;
  d.pv_accum = info.pv_accum;
  d.promotion_interval = info.promotion_interval;
  d.kernel = info.kernel;
  return same;
}

// ---- Running -----------------------------------------------------------------------------------

struct Outcome {
  int32_t status = SAGEATTN_OK;
  std::string message;
  std::vector<unsigned char> out, lse;  // images
  std::vector<int32_t> words;
  std::string violation;
};

class Gpu {
 public:
  Gpu(int device_ordinal, sageattn_context* context)
      : api(cuda::driver()), device(cuda::open_device(device_ordinal)), context(context) {}

  const cuda::Driver& api;
  const cuda::DeviceInfo& device;
  sageattn_context* context;
};

// A problem's memory on the device.
class DeviceCase {
 public:
  DeviceCase(const Gpu& gpu, const Problem& p, const Buffers& buffers, int64_t workspace_bytes,
             int32_t alignment)
      : problem_(p),
        buffers_(buffers),
        q_(gpu.api, buffers.q.image),
        k_(gpu.api, buffers.k.image),
        v_(gpu.api, buffers.v.image),
        out_(gpu.api, buffers.out.image),
        lse_(gpu.api, buffers.lse.image),
        cu_q_(gpu.api, bytes_of(buffers.cu_q)),
        cu_kv_(gpu.api, bytes_of(buffers.cu_kv)),
        used_(gpu.api, bytes_of(buffers.used)),
        words_(gpu.api, bytes_of(buffers.status)),
        // No better aligned than promised, 0xFF (NaN) within, canaries around.
        workspace_size_(static_cast<size_t>(workspace_bytes)),
        offset_(kWorkspaceGuard + static_cast<size_t>(alignment)),
        arena_(gpu.api, workspace_size_ + 2 * kWorkspaceGuard + static_cast<size_t>(alignment)) {
    std::vector<unsigned char> image(arena_.size(), kCanary);
    std::memset(&image[offset_], 0xFF, workspace_size_);
    arena_.upload(image.data(), image.size());
  }

  sageattn_execute_args args() const {
    return make_args(problem_, buffers_,
                     {q_.data(), k_.data(), v_.data(), out_.data(), lse_.data(), words(cu_q_),
                      words(cu_kv_), words(used_), words(words_)});
  }
  void* workspace() const { return arena_.data() + offset_; }
  size_t workspace_size() const { return workspace_size_; }

  int32_t execute(const sageattn_plan* plan, cuda::Stream stream, std::string* message = nullptr) {
    sageattn_error error = {};
    error.struct_size = sizeof error;
    const sageattn_execute_args a = args();
    const int32_t status = sageattn_execute(plan, &a, workspace(), workspace_size_, stream, &error);
    if (message != nullptr) *message = error.message;
    return status;
  }

  void replace_inputs(const Buffers& b) {
    q_.upload(b.q.image.data(), b.q.image.size());
    k_.upload(b.k.image.data(), b.k.image.size());
    v_.upload(b.v.image.data(), b.v.image.size());
  }
  void clear_outputs() {
    out_.fill(kCanary);
    lse_.fill(kCanary);
  }

  // Once the work is done.
  void collect(Outcome& outcome) const {
    outcome.out = out_.download();
    outcome.lse = lse_.download();
    const std::vector<unsigned char> raw = words_.download();
    outcome.words.resize(raw.size() / 4);
    std::memcpy(outcome.words.data(), raw.data(), raw.size());
    const std::vector<unsigned char> arena = arena_.download();
    const auto canary = [](unsigned char x) { return x == kCanary; };
    if (!std::all_of(arena.begin(), arena.begin() + static_cast<int64_t>(offset_), canary) ||
        !std::all_of(arena.begin() + static_cast<int64_t>(offset_ + workspace_size_), arena.end(),
                     canary)) {
      outcome.violation = "memory around the workspace was written";
    }
    if (outcome.words.front() != 0x5A5A5A5A || outcome.words.back() != 0x5A5A5A5A) {
      outcome.violation = "memory around the status words was written";
    }
    if (q_.download() != buffers_.q.image || k_.download() != buffers_.k.image ||
        v_.download() != buffers_.v.image) {
      outcome.violation = "an input was written";
    }
  }

 private:
  static std::vector<unsigned char> bytes_of(const std::vector<int32_t>& values) {
    std::vector<unsigned char> bytes(values.size() * 4);
    if (!bytes.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
    return bytes;
  }
  static int32_t* words(const DeviceMemory& memory) {
    return reinterpret_cast<int32_t*>(memory.data());
  }

  const Problem& problem_;
  const Buffers& buffers_;
  DeviceMemory q_, k_, v_, out_, lse_, cu_q_, cu_kv_, used_, words_;
  size_t workspace_size_, offset_;
  DeviceMemory arena_;
};

Outcome run_gpu(const Gpu& gpu, const Problem& p, const Buffers& buffers, const PlanResult& plan) {
  const cuda::CurrentContext current(gpu.api, gpu.device);
  const StreamOwner stream(gpu.api);
  DeviceCase on_device(gpu, p, buffers, plan.info.min_workspace, plan.info.workspace_alignment);
  Outcome outcome;
  outcome.status = on_device.execute(plan.plan.get(), stream.get(), &outcome.message);
  stream.wait();
  on_device.collect(outcome);
  return outcome;
}

Outcome run_cpu(const Problem& p, const Buffers& buffers, const PlanResult& plan) {
  Buffers copy = buffers;
  const Addresses at{copy.q.image.data(),   copy.k.image.data(),   copy.v.image.data(),
                     copy.out.image.data(), copy.lse.image.data(), copy.cu_q.data(),
                     copy.cu_kv.data(),     copy.used.data(),      copy.status.data()};
  const sageattn_execute_args args = make_args(p, copy, at);
  const auto alignment = static_cast<size_t>(plan.info.workspace_alignment);
  const auto size = static_cast<size_t>(plan.info.min_workspace);
  std::vector<unsigned char> arena(size + alignment);
  unsigned char* workspace = arena.data();
  while (reinterpret_cast<uintptr_t>(workspace) % alignment != 0) ++workspace;
  sageattn_error error = {};
  error.struct_size = sizeof error;
  Outcome outcome;
  outcome.status = sageattn_execute(plan.plan.get(), &args, workspace, size, nullptr, &error);
  outcome.message = error.message;
  outcome.out = copy.out.image;
  outcome.lse = copy.lse.image;
  outcome.words = copy.status;
  return outcome;
}

// ---- Comparing ---------------------------------------------------------------------------------

struct Tolerance {
  double hard, rms;  // of out, relative to sum p |v|
  double out_step;   // of the output type
  double lse;        // absolute
};

Tolerance tolerance_of(const sageattn_plan_info& info, const Problem& p, const LiteralInput& in) {
  // The largest |score|, in base 2.
  const auto largest_norm = [](const std::vector<float>& x, int channels) {
    double largest = 0;
    for (size_t row = 0; row + static_cast<size_t>(channels) <= x.size();
         row += static_cast<size_t>(channels)) {
      double sum = 0;
      for (int c = 0; c < channels; ++c) {
        sum +=
            static_cast<double>(x[row + static_cast<size_t>(c)]) * x[row + static_cast<size_t>(c)];
      }
      if (std::isfinite(sum)) largest = std::max(largest, sum);
    }
    return std::sqrt(largest);
  };
  const double score = std::fabs(p.scale()) * 1.4427 * largest_norm(in.q, p.shape.head_dim) *
                       largest_norm(in.k, p.shape.head_dim);
  const bool exact = info.qk_format == SAGEATTN_QK_NONE;
  // The argument: the product, the offset and their sum, each rounded once; EXACT sums in fp32.
  const double e = std::ldexp(score, exact ? -18 : -21) + std::ldexp(1.0, -20);
  double step = std::ldexp(1.0, -10);
  if (info.pv_format == SAGEATTN_PV_E4M3) step = std::ldexp(1.0, -3);
  if (exact && p.kv_dtype == SAGEATTN_BF16) step = std::ldexp(1.0, -7);

  double accumulator = std::ldexp(1.0, -19);
  if (info.pv_accum == SAGEATTN_PV_ACCUM_F16) accumulator = std::ldexp(1.0, -8);
  const bool assumed = info.pv_format == SAGEATTN_PV_E4M3 && info.arch != 90;
  if (assumed) accumulator = std::max(accumulator, std::ldexp(1.0, -9));

  Tolerance t{};
  if (info.out_dtype == SAGEATTN_F16) t.out_step = std::ldexp(1.0, -10);
  if (info.out_dtype == SAGEATTN_BF16) t.out_step = std::ldexp(1.0, -7);
  t.hard = 2 * (e + step) + accumulator;  // twice: numerator and row sum
  // EXACT is compared with P that was never rounded.
  const double rms = exact ? step / 2 + e : 4 * std::sqrt(2 * e * step) + 2 * e;
  t.rms = std::min(t.hard, rms + accumulator / 2);
  t.rms += std::sqrt(2 * t.rms * t.out_step);
  const double sum_error = info.row_sum == SAGEATTN_ROW_SUM_P && !exact ? e : e + step;
  t.lse = sum_error + std::ldexp(score, -18) + std::ldexp(1.0, -16);
  return t;
}

struct Worst {
  double hard = 0, rms = 0, lse = 0;  // relative to what is allowed
};

bool both(double a, double b, bool (*is)(double)) { return is(a) && is(b); }

// Rows of the sequence in both images; empty, or what is wrong.
std::string compare_rows(const Problem& p, const Buffers& buffers, const Outcome& gpu,
                         const Outcome& cpu, int sequence, int64_t start, int64_t rows,
                         const ExactOutput* exact, const Tolerance& t, Worst& worst) {
  const bool varlen = p.batch_mode == SAGEATTN_BATCH_VARLEN;
  const int b = varlen ? 0 : sequence;
  const AttentionShape& s = p.shape;
  double difference = 0, scale = 0;
  char text[256];
  for (int64_t row = 0; row < rows; ++row) {
    for (int h = 0; h < s.num_qo_heads; ++h) {
      for (int c = 0; c < s.head_dim_v; ++c) {
        const size_t at = buffers.out.at(b, start + row, h, c);
        const double got = load(&gpu.out[at], p.out_dtype), want = load(&cpu.out[at], p.out_dtype);
        if (both(got, want, [](double x) { return std::isnan(x); }) || got == want) continue;
        const size_t index = static_cast<size_t>((row * s.num_qo_heads + h) * s.head_dim_v + c);
        const double magnitude = exact != nullptr ? exact->magnitude[index] : 0;
        const double allowed = t.hard * magnitude + 1.01 * t.out_step * std::fabs(want) + 1e-37;
        const double error = std::fabs(got - want);
        if (!(error <= allowed)) {
          std::snprintf(text, sizeof text,
                        "out of sequence %d token %lld head %d channel %d: got %.9g, want %.9g, "
                        "allowed difference %.3g",
                        sequence, static_cast<long long>(row), h, c, got, want, allowed);
          return text;
        }
        worst.hard = std::max(worst.hard, error / allowed);
        difference += error * error;
      }
      const size_t at = buffers.lse.at(b, start + row, h, 0);
      const double got = load(&gpu.lse[at], SAGEATTN_F32), want = load(&cpu.lse[at], SAGEATTN_F32);
      if (both(got, want, [](double x) { return std::isnan(x); }) || got == want) continue;
      const double allowed = t.lse + std::ldexp(std::fabs(want), -20);
      if (!(std::fabs(got - want) <= allowed)) {
        std::snprintf(text, sizeof text,
                      "lse of sequence %d token %lld head %d: got %.9g, want %.9g, allowed "
                      "difference %.3g",
                      sequence, static_cast<long long>(row), h, got, want, allowed);
        return text;
      }
      worst.lse = std::max(worst.lse, std::fabs(got - want) / allowed);
    }
  }
  if (exact == nullptr || rows * s.num_qo_heads < 64) return {};  // too few for a mean
  for (const double x : exact->magnitude) scale += x * x;
  if (scale == 0) return {};
  const double rms = std::sqrt(difference / scale);
  worst.rms = std::max(worst.rms, rms / t.rms);
  if (rms > t.rms) {
    std::snprintf(text, sizeof text, "out of sequence %d: relative difference %.3g, allowed %.3g",
                  sequence, rms, t.rms);
    return text;
  }
  return {};
}

// Everything outside the rows that are compared holds what it held.
std::string compare_rest(const Buffers& buffers, const Outcome& gpu, const Outcome& cpu) {
  for (const auto& [name, tensor, got, want] :
       {std::tuple{"out", &buffers.out, &gpu.out, &cpu.out},
        std::tuple{"lse", &buffers.lse, &gpu.lse, &cpu.lse}}) {
    const auto size = static_cast<size_t>(dtype_size(tensor->dtype()));
    for (size_t i = 0; i < want->size(); i += size) {
      const auto untouched = [&](const std::vector<unsigned char>& image) {
        return std::all_of(image.begin() + static_cast<int64_t>(i),
                           image.begin() + static_cast<int64_t>(i + size),
                           [](unsigned char x) { return x == kCanary; });
      };
      if (untouched(*want) != untouched(*got)) {
        return std::string(name) + ": byte " + std::to_string(i) +
               (untouched(*got) ? " was not written" : " was written, and must not be");
      }
    }
  }
  return {};
}

// ---- One case of the grid --------------------------------------------------------------------------

struct CaseReport {
  enum { kPassed, kFailed, kSkipped } verdict = kPassed;
  std::string message;
  Worst worst;
};

CaseReport check_case(const Gpu& gpu, const Problem& p, const Numerics& numerics, const Data& data,
                      const Hostile& hostile = {}) {
  CaseReport report;
  const auto failed = [&](const std::string& message) {
    report.verdict = CaseReport::kFailed;
    report.message = message;
    return report;
  };
  const PlanResult plan = make_plan(gpu.context, p, numerics);
  if (plan.status == SAGEATTN_E_UNSUPPORTED) {
    report.verdict = CaseReport::kSkipped;
    report.message = plan.message;
    return report;
  }
  if (plan.status != SAGEATTN_OK) return failed(plan.message);
  const Numerics same = same_numerics(numerics, plan.info);
  const PlanResult cpu_plan = make_plan(shared_context(same.arch, 1), p, same);
  if (cpu_plan.status != SAGEATTN_OK) return failed("CPU backend: " + cpu_plan.message);

  const Buffers buffers = make_buffers(p, data, hostile);
  const Outcome got = run_gpu(gpu, p, buffers, plan);
  const Outcome want = run_cpu(p, buffers, cpu_plan);
  if (got.status != want.status) {
    return failed("status " + std::to_string(got.status) + " (" + got.message + "), CPU backend " +
                  std::to_string(want.status) + " (" + want.message + ")");
  }
  if (!got.violation.empty()) return failed(got.violation);
  if (got.words != want.words) return failed("status words differ");
  const std::string rest = compare_rest(buffers, got, want);
  if (!rest.empty()) return failed(rest);

  const bool hostile_lengths = !hostile.cu_q.empty() || !hostile.cu_kv.empty();
  const std::vector<int32_t> cu_q = cumulative(p.qo_lens, p.gap);
  for (int b = 0; b < p.batch(); ++b) {
    // With nonsense lengths a good sequence may stand anywhere: only status, NaN and what was
    // touched are compared.
    if (hostile_lengths) break;
    const auto n = static_cast<size_t>(b);
    const bool bad = want.words[n + 1] != SAGEATTN_SEQUENCE_OK;
    ExactOutput exact;
    if (!bad) exact = exact_attention(p.shape, p.scale(), p.mask, data[n]);
    const int64_t start = p.batch_mode == SAGEATTN_BATCH_VARLEN ? cu_q[n] : 0;
    const std::string message =
        compare_rows(p, buffers, got, want, b, start, p.qo_lens[n], bad ? nullptr : &exact,
                     tolerance_of(plan.info, p, data[n]), report.worst);
    if (!message.empty()) return failed(message);
  }
  if (hostile_lengths) {
    for (size_t i = 0; i < want.out.size(); i += static_cast<size_t>(dtype_size(p.out_dtype))) {
      if (std::isnan(load(&got.out[i], p.out_dtype)) !=
          std::isnan(load(&want.out[i], p.out_dtype))) {
        return failed("out: NaN at different places, byte " + std::to_string(i));
      }
    }
  }
  return report;
}

// ---- Numerics ----------------------------------------------------------------------------------------

std::vector<Numerics> all_numerics(int32_t arch) {
  std::vector<Numerics> list;
  using Desc = sageattn_attn_desc;
  const auto add = [&](const char* name, int32_t preset, const std::function<void(Desc&)>& change) {
    Numerics numerics = preset_numerics(preset, arch);
    if (name[0] != '\0') numerics.name += std::string("+") + name;
    if (preset != SAGEATTN_PRESET_EXACT) numerics.desc.kernel = SAGEATTN_KERNEL_MMA_SYNC;
    change(numerics.desc);
    list.push_back(numerics);
  };
  constexpr int32_t k1 = SAGEATTN_PRESET_SAGE1, k8B = SAGEATTN_PRESET_SAGE2_8B,
                    k4B = SAGEATTN_PRESET_SAGE2_4B, kPP = SAGEATTN_PRESET_SAGE2PP;
  for (const int32_t preset :
       {int32_t{SAGEATTN_PRESET_AUTO}, k1, k8B, k4B, kPP, int32_t{SAGEATTN_PRESET_EXACT}}) {
    add("", preset, [](Desc&) {});
  }
  for (const int32_t preset : {k1, k8B}) {
    for (int32_t g = SAGEATTN_GRANULARITY_PER_THREAD; g <= SAGEATTN_GRANULARITY_PER_BLOCK; ++g) {
      add(("granularity" + std::to_string(g)).c_str(), preset,
          [&](Desc& d) { d.qk_granularity = g; });
    }
    add("i4", preset, [](Desc& d) { d.qk_format = SAGEATTN_QK_I4; });
    add("smooth_q", preset, [](Desc& d) { d.smooth_q = SAGEATTN_SMOOTH_ON; });
    add("no_smooth_k", preset, [](Desc& d) { d.smooth_k = SAGEATTN_SMOOTH_OFF; });
    add("smooth_q_only", preset, [](Desc& d) {
      d.smooth_q = SAGEATTN_SMOOTH_ON;
      d.smooth_k = SAGEATTN_SMOOTH_OFF;
    });
    add("hadamard", preset, [](Desc& d) { d.rotation = SAGEATTN_ROTATION_HADAMARD; });
    add("row_sum_p", preset, [](Desc& d) { d.row_sum = SAGEATTN_ROW_SUM_P; });
    add("row_sum_rounded", preset, [](Desc& d) { d.row_sum = SAGEATTN_ROW_SUM_ROUNDED_P; });
    add("v_off", preset, [](Desc& d) { d.smooth_v = SAGEATTN_SMOOTH_V_OFF; });
    add("v_sequence", preset, [](Desc& d) { d.smooth_v = SAGEATTN_SMOOTH_V_SEQUENCE; });
    add("accum_f16", preset, [](Desc& d) { d.pv_accum = SAGEATTN_PV_ACCUM_F16; });
  }
  add("v_scale_group", k8B, [](Desc& d) {
    d.smooth_v = SAGEATTN_SMOOTH_V_OFF;
    d.v_scale = SAGEATTN_V_SCALE_GROUP;
  });
  add("v_group", kPP, [](Desc& d) { d.smooth_v = SAGEATTN_SMOOTH_V_GROUP; });
  add("i4_hadamard", k4B, [](Desc& d) { d.rotation = SAGEATTN_ROTATION_HADAMARD; });
  add("i4", kPP, [](Desc& d) { d.qk_format = SAGEATTN_QK_I4; });
  return list;
}

// ---- What is not a comparison of one case --------------------------------------------------------

// A problem of a useful size that every test below can share.
Problem medium_problem(int32_t batch_mode) {
  Problem p;
  p.id = 1;
  p.seed = 4711;
  p.shape = {4, 2, 128, 128};
  p.q_dtype = p.kv_dtype = p.out_dtype = SAGEATTN_BF16;
  p.batch_mode = batch_mode;
  p.mask.kind = SAGEATTN_MASK_CAUSAL_BOTTOM_RIGHT;
  p.qo_lens =
      batch_mode == SAGEATTN_BATCH_VARLEN ? std::vector{300, 17, 0, 200} : std::vector{300, 300};
  p.kv_lens =
      batch_mode == SAGEATTN_BATCH_VARLEN ? std::vector{500, 200, 30, 200} : std::vector{500, 500};
  return p;
}

using Check = std::function<std::string(const Gpu&, const Numerics&)>;

// Bits of a run; throws if it fails.
Outcome must_run(const Gpu& gpu, const Problem& p, const Buffers& buffers, const PlanResult& plan) {
  Outcome outcome = run_gpu(gpu, p, buffers, plan);
  if (outcome.status != SAGEATTN_OK) throw std::runtime_error(outcome.message);
  if (!outcome.violation.empty()) throw std::runtime_error(outcome.violation);
  return outcome;
}

PlanResult must_plan(const Gpu& gpu, const Problem& p, const Numerics& numerics) {
  PlanResult plan = make_plan(gpu.context, p, numerics);
  if (plan.status != SAGEATTN_OK) throw std::runtime_error(plan.message);
  return plan;
}

std::string check_workspace(const Gpu& gpu, const Numerics& numerics) {
  const Problem p = medium_problem(SAGEATTN_BATCH_DENSE);
  const PlanResult plan = must_plan(gpu, p, numerics);
  const Buffers buffers = make_buffers(p, make_data(p));
  const cuda::CurrentContext current(gpu.api, gpu.device);
  DeviceCase on_device(gpu, p, buffers, plan.info.min_workspace, plan.info.workspace_alignment);
  const sageattn_execute_args args = on_device.args();
  const auto size = static_cast<size_t>(plan.info.min_workspace);
  auto* const workspace = static_cast<unsigned char*>(on_device.workspace());
  const auto status = [&](void* at, size_t bytes) {
    return sageattn_execute(plan.plan.get(), &args, at, bytes, nullptr, nullptr);
  };
  if (status(workspace, size - 1) != SAGEATTN_E_WORKSPACE) return "size - 1 was not refused";
  if (status(nullptr, size) != SAGEATTN_E_WORKSPACE) return "NULL was not refused";
  if (status(workspace + 16, size) != SAGEATTN_E_WORKSPACE) return "misalignment was not refused";
  Outcome outcome;
  on_device.collect(outcome);
  if (outcome.out != buffers.out.image) return "a refused call wrote to out";
  return {};
}

std::string check_same_bits(const Gpu& gpu, const Numerics& numerics) {
  for (const int32_t mode : {SAGEATTN_BATCH_DENSE, SAGEATTN_BATCH_VARLEN}) {
    const Problem p = medium_problem(mode);
    const PlanResult plan = must_plan(gpu, p, numerics);
    const Buffers buffers = make_buffers(p, make_data(p));
    const Outcome first = must_run(gpu, p, buffers, plan);
    const Outcome second = must_run(gpu, p, buffers, plan);
    if (first.out != second.out || first.lse != second.lse) return "two runs differ";
  }
  return {};
}

std::string check_graph(const Gpu& gpu, const Numerics& numerics) {
  const Problem p = medium_problem(SAGEATTN_BATCH_VARLEN);
  Problem other = p;
  other.seed = 4712;
  const PlanResult plan = must_plan(gpu, p, numerics);
  const Buffers first = make_buffers(p, make_data(p)), second = make_buffers(p, make_data(other));
  const Outcome want_first = must_run(gpu, p, first, plan);
  const Outcome want_second = must_run(gpu, p, second, plan);

  const cuda::CurrentContext current(gpu.api, gpu.device);
  const cuda::Driver& api = gpu.api;
  const StreamOwner stream(api);
  DeviceCase on_device(gpu, p, first, plan.info.min_workspace, plan.info.workspace_alignment);
  cuda::Graph graph = nullptr;
  cuda::GraphExec executable = nullptr;
  cuda::check(api, api.StreamBeginCapture(stream.get(), cuda::kCaptureModeThreadLocal),
              "cuStreamBeginCapture");
  std::string message;
  const int32_t status = on_device.execute(plan.plan.get(), stream.get(), &message);
  cuda::check(api, api.StreamEndCapture(stream.get(), &graph), "cuStreamEndCapture");
  if (status != SAGEATTN_OK) return message;
  cuda::check(api, api.GraphInstantiateWithFlags(&executable, graph, 0), "cuGraphInstantiate");
  std::string result;
  for (int i = 0; i < 4 && result.empty(); ++i) {
    on_device.replace_inputs(i % 2 == 0 ? first : second);
    on_device.clear_outputs();
    cuda::check(api, api.GraphLaunch(executable, stream.get()), "cuGraphLaunch");
    stream.wait();
    Outcome outcome;
    on_device.collect(outcome);
    const Outcome& want = i % 2 == 0 ? want_first : want_second;
    if (outcome.out != want.out || outcome.lse != want.lse) {
      result = "replay " + std::to_string(i) + " differs from a direct execute";
    }
  }
  api.GraphExecDestroy(executable);
  api.GraphDestroy(graph);
  return result;
}

std::string check_threads(const Gpu& gpu, const Numerics& numerics) {
  const Problem p = medium_problem(SAGEATTN_BATCH_DENSE);
  const PlanResult plan = must_plan(gpu, p, numerics);
  const Buffers buffers = make_buffers(p, make_data(p));
  const Outcome want = must_run(gpu, p, buffers, plan);
  std::vector<std::string> reports(8);
  std::vector<std::thread> threads;
  for (std::string& report : reports) {
    threads.emplace_back([&] {
      try {
        for (int i = 0; i < 10 && report.empty(); ++i) {
          const Outcome outcome = must_run(gpu, p, buffers, plan);
          if (outcome.out != want.out || outcome.lse != want.lse) report = "a thread's bits differ";
        }
      } catch (const sageattn::Error& error) {
        report = error.message;
      } catch (const std::exception& exception) {
        report = exception.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& report : reports) {
    if (!report.empty()) return report;
  }
  return {};
}

std::string check_streams(const Gpu& gpu, const Numerics& numerics) {
  const Problem p = medium_problem(SAGEATTN_BATCH_DENSE);
  const PlanResult plan = must_plan(gpu, p, numerics);
  const Buffers buffers = make_buffers(p, make_data(p));
  const Outcome want = must_run(gpu, p, buffers, plan);
  const cuda::CurrentContext current(gpu.api, gpu.device);
  const StreamOwner a(gpu.api), b(gpu.api);
  DeviceCase first(gpu, p, buffers, plan.info.min_workspace, plan.info.workspace_alignment);
  DeviceCase second(gpu, p, buffers, plan.info.min_workspace, plan.info.workspace_alignment);
  for (int i = 0; i < 20; ++i) {
    std::string message;
    if (first.execute(plan.plan.get(), a.get(), &message) != SAGEATTN_OK ||
        second.execute(plan.plan.get(), b.get(), &message) != SAGEATTN_OK) {
      return message;
    }
  }
  a.wait();
  b.wait();
  for (const DeviceCase* on_device : {&first, &second}) {
    Outcome outcome;
    on_device->collect(outcome);
    if (!outcome.violation.empty()) return outcome.violation;
    if (outcome.out != want.out || outcome.lse != want.lse) return "a stream's bits differ";
  }
  return {};
}

std::string check_current_context(const Gpu& gpu, const Numerics& numerics) {
  const Problem p = medium_problem(SAGEATTN_BATCH_DENSE);
  if (gpu.api.CtxGetCurrent == nullptr) return {};
  const PlanResult plan = must_plan(gpu, p, numerics);
  cuda::Context before = nullptr, after = nullptr;
  gpu.api.CtxGetCurrent(&before);
  must_run(gpu, p, make_buffers(p, make_data(p)), plan);
  gpu.api.CtxGetCurrent(&after);
  return before == after ? std::string() : "the current context changed";
}

// NaN and infinities of one head stay there, and stand where the CPU backend has them.
std::string check_nonfinite(const Gpu& gpu, const Numerics& numerics) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  const Problem p = medium_problem(SAGEATTN_BATCH_DENSE);
  const Data clean = make_data(p);
  const PlanResult plan = must_plan(gpu, p, numerics);
  const Buffers clean_buffers = make_buffers(p, clean);
  const Outcome clean_run = must_run(gpu, p, clean_buffers, plan);
  for (const float value : {nan, infinity, -infinity}) {
    for (int which = 0; which < 3; ++which) {
      Data data = clean;
      const int heads = which == 0 ? p.shape.num_qo_heads : p.shape.num_kv_heads;
      std::vector<float>& x = which == 0 ? data[0].q : which == 1 ? data[0].k : data[0].v;
      x[(static_cast<size_t>(100) * heads + 0) * 128 + 7] = value;  // token 100, head 0, channel 7
      const CaseReport report = check_case(gpu, p, numerics, data);
      const std::string name = std::string(1, "qkv"[which]) + " = " + std::to_string(value) + ": ";
      if (report.verdict == CaseReport::kFailed) return name + report.message;
      const Outcome run = must_run(gpu, p, make_buffers(p, data), plan);
      const int first_clean_head = which == 0 ? 1 : p.shape.num_qo_heads / p.shape.num_kv_heads;
      for (int b = 0; b < p.batch(); ++b) {
        for (int64_t row = 0; row < p.qo_lens[0]; ++row) {
          for (int h = b == 0 ? first_clean_head : 0; h < p.shape.num_qo_heads; ++h) {
            const size_t at = clean_buffers.out.at(b, row, h, 0);
            if (std::memcmp(&run.out[at], &clean_run.out[at], 128 * 2) != 0) {
              return name + "another head or sequence changed";
            }
          }
        }
      }
    }
  }
  return {};
}

std::string check_hostile(const Gpu& gpu, const Numerics& numerics) {
  Problem p = medium_problem(SAGEATTN_BATCH_VARLEN);
  const Data data = make_data(p);
  constexpr int32_t kMin = std::numeric_limits<int32_t>::min();
  constexpr int32_t kMax = std::numeric_limits<int32_t>::max();
  const Hostile cases[] = {
      {{0, 300, 200, 317, 517}, {}, {}},    {{-5, 300, 317, 317, 517}, {}, {}},
      {{0, 300, 317, 317, 100000}, {}, {}}, {{kMax, kMin, kMax, kMin, kMax}, {}, {}},
      {{517, 317, 317, 300, 0}, {}, {}},    {{0, 517, 517, 517, 517}, {}, {}},
      {{}, {0, 500, 400, 730, 930}, {}},    {{}, {kMin, kMin, 0, kMax, kMax}, {}},
      {{}, {0, 930, 930, 930, 930}, {}},    {{}, {}, {-1, 200, 30, 200}},
      {{}, {}, {500, kMax, 31, kMin}},      {{0, 0, 0, 0, 0}, {0, 0, 0, 0, 0}, {}},
  };
  for (const Hostile& hostile : cases) {
    const CaseReport report = check_case(gpu, p, numerics, data, hostile);
    if (report.verdict == CaseReport::kFailed) {
      return "case " + std::to_string(&hostile - cases) + ": " + report.message;
    }
  }
  return {};
}

// ---- main ------------------------------------------------------------------------------------------

struct Options {
  int cases = 120;
  uint64_t seed = 1;
  int device = 0;
  int only_case = -1;
  std::string numerics;
  bool verbose = false;
};

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--verbose") {
      options.verbose = true;
      continue;
    }
    if (i + 1 == argc) throw std::runtime_error("unknown flag or missing value: " + flag);
    const char* value = argv[++i];
    if (flag == "--cases") {
      options.cases = std::atoi(value);
    } else if (flag == "--seed") {
      options.seed = std::strtoull(value, nullptr, 10);
    } else if (flag == "--device") {
      options.device = std::atoi(value);
    } else if (flag == "--numerics") {
      options.numerics = value;
    } else if (flag == "--case") {
      options.only_case = std::atoi(value);
    } else {
      throw std::runtime_error("unknown flag: " + flag);
    }
  }
  return options;
}

int run(const Options& options) {
  sageattn_context_desc desc = {};
  desc.struct_size = sizeof desc;
  desc.backend = SAGEATTN_BACKEND_CUDA;
  desc.device = options.device;
  sageattn_error error = {};
  error.struct_size = sizeof error;
  sageattn_context* raw = nullptr;
  const int32_t status = sageattn_context_create(&desc, &raw, &error);
  if (status != SAGEATTN_OK) {
    std::printf("skipped: %s\n", error.message);
    return status == SAGEATTN_E_NO_DEVICE || status == SAGEATTN_E_DRIVER_TOO_OLD ? 77 : 1;
  }
  const std::unique_ptr<sageattn_context, void (*)(sageattn_context*)> context(
      raw, sageattn_context_destroy);
  char report[4096];
  if (sageattn_context_report(raw, report, sizeof report, nullptr, nullptr) == SAGEATTN_OK) {
    std::printf("%s\n", report);
  }
  const Gpu gpu(options.device, raw);
  const int32_t arch = gpu.device.choice.arch;

  int failures = 0;
  const auto fail = [&](const std::string& what, const std::string& message) {
    ++failures;
    std::printf("FAILED %s: %s\n", what.c_str(), message.c_str());
    std::fflush(stdout);
  };

  // The grid: each numerics takes every other problem, so that all of them meet all axes.
  std::vector<Numerics> numerics = all_numerics(arch);
  if (!options.numerics.empty()) {
    std::erase_if(numerics, [&](const Numerics& n) {
      return n.name.find(options.numerics) == std::string::npos;
    });
  }
  const std::vector<Problem> grid = make_grid(options.cases, options.seed);
  std::printf("%-36s %6s %6s %7s   %s\n", "numerics", "passed", "failed", "skipped",
              "worst / allowed: element, rms, lse");
  for (const Numerics& n : numerics) {
    int counts[3] = {};
    Worst worst;
    std::string skipped;
    for (const Problem& problem : grid) {
      if (options.only_case >= 0 && problem.id != options.only_case) continue;
      CaseReport result;
      try {
        result = check_case(gpu, problem, n, make_data(problem));
      } catch (const sageattn::Error& e) {
        result.verdict = CaseReport::kFailed;
        result.message = e.message;
      }
      ++counts[result.verdict];
      if (result.verdict == CaseReport::kFailed) fail(describe(problem, n), result.message);
      if (result.verdict == CaseReport::kSkipped) skipped = result.message;
      worst.hard = std::max(worst.hard, result.worst.hard);
      worst.rms = std::max(worst.rms, result.worst.rms);
      worst.lse = std::max(worst.lse, result.worst.lse);
    }
    std::printf("%-36s %6d %6d %7d   %.3f %.3f %.3f\n", n.name.c_str(), counts[0], counts[1],
                counts[2], worst.hard, worst.rms, worst.lse);
    if (options.verbose && counts[2] != 0) std::printf("    skipped: %s\n", skipped.c_str());
    std::fflush(stdout);
  }
  if (options.only_case >= 0) return failures == 0 ? 0 : 1;

  const std::pair<const char*, Check> checks[] = {
      {"workspace size", check_workspace}, {"same bits", check_same_bits},
      {"graph capture", check_graph},      {"eight threads", check_threads},
      {"two streams", check_streams},      {"current context", check_current_context},
      {"NaN and Inf", check_nonfinite},    {"hostile lengths", check_hostile}};
  std::printf("\n%-20s", "");
  std::vector<Numerics> presets;
  for (const int32_t preset :
       {SAGEATTN_PRESET_SAGE1, SAGEATTN_PRESET_SAGE2_8B, SAGEATTN_PRESET_SAGE2_4B,
        SAGEATTN_PRESET_SAGE2PP, SAGEATTN_PRESET_EXACT}) {
    if (preset != SAGEATTN_PRESET_SAGE1 && preset != SAGEATTN_PRESET_EXACT && arch < 89) continue;
    presets.push_back(preset_numerics(preset, arch));
    if (preset != SAGEATTN_PRESET_EXACT) presets.back().desc.kernel = SAGEATTN_KERNEL_MMA_SYNC;
    std::printf(" %-12s", presets.back().name.c_str());
  }
  std::printf("\n");
  std::vector<std::pair<std::string, std::string>> later;
  for (const auto& [name, check] : checks) {
    std::printf("%-20s", name);
    for (const Numerics& n : presets) {
      std::string message;
      try {
        message = check(gpu, n);
      } catch (const sageattn::Error& e) {
        message = e.message;
      } catch (const std::exception& e) {
        message = e.what();
      }
      std::printf(" %-12s", message.empty() ? "ok" : "FAILED");
      std::fflush(stdout);
      if (!message.empty()) later.emplace_back(std::string(name) + ", " + n.name, message);
    }
    std::printf("\n");
  }
  for (const auto& [what, message] : later) fail(what, message);
  std::printf("\n%d failures on %s (sm_%d)\n", failures, gpu.device.name, gpu.device.capability);
  return failures == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(parse(argc, argv));
  } catch (const sageattn::Error& error) {
    std::fprintf(stderr, "%s\n", error.message);
  } catch (const std::exception& exception) {
    std::fprintf(stderr, "%s\n", exception.what());
  }
  return 2;
}
