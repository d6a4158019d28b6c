#include "attention.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <utility>

#include "device.h"
#include "progress.h"

namespace sageattn_cli {
namespace {

// Multiply-adds that one core takes about a second for.
constexpr double kLargeWork = 0x1p31;
constexpr int64_t kMaxLength = 1 << 30;

// Sequences and kv heads that one execute covers.
struct Part {
  int64_t batch, batches;
  int64_t kv_head, kv_heads;
};

void require(bool fits, const std::string& message) {
  if (!fits) throw Failure(kFileError, message);
}

std::string shapes(const AttentionInputs& in) {
  return " (q " + to_string(in.q.shape) + ", k " + to_string(in.k.shape) + ", v " +
         to_string(in.v.shape) + ")";
}

int32_t limit_of(int64_t length) {
  return static_cast<int32_t>(std::clamp<int64_t>(length, 1, kMaxLength));
}

int64_t longest(const std::vector<int32_t>& cu_seqlens) {
  int64_t length = 0;
  for (size_t i = 1; i < cu_seqlens.size(); ++i) {
    length = std::max(length, int64_t{cu_seqlens[i]} - cu_seqlens[i - 1]);
  }
  return length;
}

template <typename Byte>
Byte* offset(Byte* data, int64_t elements, ElementType type) {
  return data + elements * static_cast<int64_t>(size_of(type));
}

// `data`: where the tensor's first element is.
sageattn_const_tensor part_of(const std::byte* data, ElementType type, const View& view,
                              int64_t batch, int64_t head) {
  const int64_t start = batch * view.stride_batch + head * view.stride_head;
  return {offset(data, start, type), view.stride_batch, view.stride_token, view.stride_head, 1};
}

// Where executes find their operands.
struct Operands {
  const std::byte *q, *k, *v;
  std::byte *out, *lse;
  const int32_t *cu_seqlens_q, *cu_seqlens_kv, *seqused_kv;
  int32_t* status;
};

// The content's own address or, with a device, that of a copy there.
template <typename Content>
auto place(Device* device, Content& content) {
  const auto data = content.data();
  if (device == nullptr) return data;
  return static_cast<decltype(content.data())>(
      device->copy_of(data, content.size() * sizeof *data));
}

// One call of attend.
class Attention {
 public:
  Attention(const sageattn_attn_desc& desc, const AttentionInputs& inputs);

  AttentionOutputs run(const Context& context);

 private:
  bool varlen() const { return !in_.cu_seqlens_q.empty(); }
  int64_t sequences() const {
    return varlen() ? static_cast<int64_t>(in_.cu_seqlens_q.size()) - 1 : q_.batches;
  }
  int64_t group() const { return q_.heads / k_.heads; }

  void check_lengths() const;
  std::vector<Part> parts(const Context& context) const;
  sageattn_attn_desc desc_for(const Part& part) const;
  sageattn_execute_args args_for(const Part& part, const Operands& at) const;
  Operands operands(Device* device, AttentionOutputs& to);
  void check_status() const;

  sageattn_attn_desc desc_;
  const AttentionInputs& in_;
  View q_, k_, v_;
  View out_{};
  ElementType out_type_{};
  std::vector<int32_t> status_;
};

Attention::Attention(const sageattn_attn_desc& desc, const AttentionInputs& inputs)
    : desc_(desc),
      in_(inputs),
      q_(view_of(inputs.q, desc.layout, "q")),
      k_(view_of(inputs.k, desc.layout, "k")),
      v_(view_of(inputs.v, desc.layout, "v")) {
  check_shapes(inputs, desc.layout);
  check_lengths();
  status_.resize(sequences());
}

void Attention::check_lengths() const {
  if (varlen()) {
    require(q_.batches == 1, "packed sequences need a batch of 1" + shapes(in_));
    require(in_.cu_seqlens_q.size() == in_.cu_seqlens_kv.size(),
            "cu_seqlens_q has " + std::to_string(in_.cu_seqlens_q.size()) +
                " entries but cu_seqlens_kv " + std::to_string(in_.cu_seqlens_kv.size()));
  }
  const auto used = static_cast<int64_t>(in_.seqused_kv.size());
  require(used == 0 || used == sequences(), "seqused_kv has " + std::to_string(used) +
                                                " entries for " + std::to_string(sequences()) +
                                                " sequences");
}

std::vector<Part> Attention::parts(const Context& context) const {
  // Packed sequences stay together: cu_seqlens counts from the start of the buffers.
  const int64_t batches = varlen() ? 1 : sequences();
  const double work = static_cast<double>(q_.batches * q_.heads * q_.tokens) *
                      static_cast<double>(k_.tokens * (q_.channels + v_.channels));
  const Part all{0, sequences(), 0, k_.heads};
  if (work < kLargeWork || context.query(desc_for(all)).backend == SAGEATTN_BACKEND_CUDA) {
    return {all};
  }
  std::vector<Part> parts;
  for (int64_t batch = 0; batch < batches; ++batch) {
    for (int64_t head = 0; head < k_.heads; ++head) {
      parts.push_back({batch, varlen() ? sequences() : 1, head, 1});
    }
  }
  return parts;
}

sageattn_attn_desc Attention::desc_for(const Part& part) const {
  sageattn_attn_desc desc = desc_;
  desc.q_dtype = dtype_of(in_.q.type);
  desc.kv_dtype = dtype_of(in_.k.type);
  desc.head_dim = static_cast<int32_t>(q_.channels);
  desc.head_dim_v = static_cast<int32_t>(v_.channels);
  desc.num_qo_heads = static_cast<int32_t>(part.kv_heads * group());
  desc.num_kv_heads = static_cast<int32_t>(part.kv_heads);
  desc.max_batch = limit_of(part.batches);
  desc.max_qo_len = limit_of(varlen() ? longest(in_.cu_seqlens_q) : q_.tokens);
  desc.max_kv_len = limit_of(varlen() ? longest(in_.cu_seqlens_kv) : k_.tokens);
  if (varlen()) {
    desc.batch_mode = SAGEATTN_BATCH_VARLEN;
    desc.max_total_qo = q_.tokens;
    desc.max_total_kv = k_.tokens;
  }
  return desc;
}

sageattn_execute_args Attention::args_for(const Part& part, const Operands& at) const {
  auto args = sized<sageattn_execute_args>();
  args.batch = static_cast<int32_t>(part.batches);
  if (varlen()) {
    args.total_qo = q_.tokens;
    args.total_kv = k_.tokens;
    args.cu_seqlens_q = at.cu_seqlens_q;
    args.cu_seqlens_kv = at.cu_seqlens_kv;
  } else {
    args.qo_len = static_cast<int32_t>(q_.tokens);
    args.kv_len = static_cast<int32_t>(k_.tokens);
  }
  const int64_t qo_head = part.kv_head * group();
  args.q = part_of(at.q, in_.q.type, q_, part.batch, qo_head);
  args.k = part_of(at.k, in_.k.type, k_, part.batch, part.kv_head);
  args.v = part_of(at.v, in_.v.type, v_, part.batch, part.kv_head);
  const int64_t out_start = part.batch * out_.stride_batch + qo_head * out_.stride_head;
  args.out = {offset(at.out, out_start, out_type_), out_.stride_batch, out_.stride_token,
              out_.stride_head, 1};
  if (at.lse != nullptr) {
    const int64_t lse_start = (part.batch * q_.heads + qo_head) * q_.tokens;
    auto* lse = offset(at.lse, lse_start, ElementType::kF32);
    const int64_t stride_head = std::max<int64_t>(q_.tokens, 1);
    args.lse = {reinterpret_cast<float*>(lse), q_.heads * stride_head, stride_head, 1};
  }
  if (!in_.seqused_kv.empty()) args.seqused_kv = at.seqused_kv + part.batch;
  args.status = at.status + part.batch;
  // The batch axis of packed sequences is part of the token axis.
  if (varlen()) {
    args.q.stride_batch = args.k.stride_batch = args.v.stride_batch = 0;
    args.out.stride_batch = args.lse.stride_batch = 0;
  }
  return args;
}

Operands Attention::operands(Device* device, AttentionOutputs& to) {
  Operands at{};
  at.q = place(device, in_.q.data);
  at.k = place(device, in_.k.data);
  at.v = place(device, in_.v.data);
  at.out = place(device, to.out.data);
  if (to.lse.count() > 0) at.lse = place(device, to.lse.data);
  at.cu_seqlens_q = place(device, in_.cu_seqlens_q);
  at.cu_seqlens_kv = place(device, in_.cu_seqlens_kv);
  at.seqused_kv = place(device, in_.seqused_kv);
  at.status = place(device, status_);
  return at;
}

void Attention::check_status() const {
  for (size_t i = 0; i < status_.size(); ++i) {
    require(status_[i] == SAGEATTN_SEQUENCE_OK,
            "the lengths of sequence " + std::to_string(i) + " are nonsense: cu_seqlens must " +
                "ascend within the tokens, seqused_kv lie within the keys of its sequence");
  }
}

AttentionOutputs Attention::run(const Context& context) {
  const std::vector<Part> parts = this->parts(context);
  Progress progress(static_cast<int64_t>(parts.size()));
  AttentionOutputs to{};

  Plan plan(context, desc_for(parts.front()));
  to.info = plan.info();
  std::vector<int64_t> out_shape = in_.q.shape;
  out_shape.back() = v_.channels;
  to.out = make_tensor(type_of_dtype(to.info.out_dtype), std::move(out_shape));
  out_ = view_of(to.out, desc_.layout, "out");
  out_type_ = to.out.type;
  if (in_.want_lse) {
    std::vector<int64_t> lse_shape = {q_.heads, q_.tokens};
    if (in_.q.shape.size() == 4) lse_shape.insert(lse_shape.begin(), q_.batches);
    to.lse = make_tensor(ElementType::kF32, std::move(lse_shape));
  }

  Device* const device = plan.device();
  const Operands at = operands(device, to);
  for (const Part& part : parts) {
    const sageattn_execute_args args = args_for(part, at);
    const auto start = std::chrono::steady_clock::now();
    plan.execute(args);
    const auto elapsed = std::chrono::steady_clock::now() - start;
    to.milliseconds += std::chrono::duration<double, std::milli>(elapsed).count();
    progress.advance();
  }
  if (device != nullptr) {
    device->read(at.out, to.out.data.data(), to.out.data.size());
    if (at.lse != nullptr) device->read(at.lse, to.lse.data.data(), to.lse.data.size());
    device->read(at.status, status_.data(), status_.size() * sizeof status_[0]);
  }
  check_status();
  return to;
}

}  // namespace

View view_of(const Tensor& tensor, int32_t layout, const std::string& name) {
  std::vector<int64_t> sizes = tensor.shape;
  if (sizes.size() == 3) sizes.insert(sizes.begin(), 1);
  require(sizes.size() == 4, name + " has shape " + to_string(tensor.shape) + "; three or four " +
                                 "dimensions are needed: [batch,] token, head, channel (NHD) or " +
                                 "[batch,] head, token, channel (HND)");
  for (const int64_t size : sizes) {
    require(size <= std::numeric_limits<int32_t>::max(),
            name + " has shape " + to_string(tensor.shape) + ", beyond 32 bits");
  }
  // A stride of 0 would mean an expanded tensor, also where a size of 0 makes it meaningless.
  const auto stride = [](int64_t elements) { return std::max<int64_t>(elements, 1); };
  const bool token_major = layout == SAGEATTN_LAYOUT_NHD;
  View view{};
  view.batches = sizes[0];
  view.tokens = token_major ? sizes[1] : sizes[2];
  view.heads = token_major ? sizes[2] : sizes[1];
  view.channels = sizes[3];
  view.stride_batch = stride(sizes[1] * sizes[2] * sizes[3]);
  view.stride_token = stride(token_major ? sizes[2] * sizes[3] : sizes[3]);
  view.stride_head = stride(token_major ? sizes[3] : sizes[2] * sizes[3]);
  return view;
}

void check_shapes(const AttentionInputs& in, int32_t layout) {
  const View q = view_of(in.q, layout, "q");
  const View k = view_of(in.k, layout, "k");
  const View v = view_of(in.v, layout, "v");
  require(in.k.type == in.v.type, std::string("k is ") + name_of(in.k.type) + " but v is " +
                                      name_of(in.v.type) + ": they must have one type");
  require(q.batches == k.batches && q.batches == v.batches,
          "q, k and v differ in their batch" + shapes(in));
  require(k.tokens == v.tokens, "k and v differ in their tokens" + shapes(in));
  require(k.heads == v.heads, "k and v differ in their heads" + shapes(in));
  require(q.channels == k.channels, "q and k differ in their channels" + shapes(in));
  require(k.heads > 0 && q.heads % k.heads == 0,
          "the heads of q are not a multiple of those of k" + shapes(in));
}

AttentionOutputs attend(const Context& context, sageattn_attn_desc desc,
                        const AttentionInputs& inputs) {
  return Attention(desc, inputs).run(context);
}

sageattn_compare_result compare_tensors(const Tensor& out, const Tensor& ref, int32_t layout) {
  const View view = view_of(out, layout, "the tensor");
  auto args = sized<sageattn_compare_args>();
  args.out_dtype = dtype_of(out.type);
  args.ref_dtype = dtype_of(ref.type);
  args.batch = static_cast<int32_t>(view.batches);
  args.len = static_cast<int32_t>(view.tokens);
  args.num_heads = static_cast<int32_t>(view.heads);
  args.head_dim = static_cast<int32_t>(view.channels);
  args.out = part_of(out.data.data(), out.type, view, 0, 0);
  args.ref = part_of(ref.data.data(), ref.type, view, 0, 0);
  auto result = sized<sageattn_compare_result>();
  check([&](sageattn_error* error) { return sageattn_compare(&args, &result, error); });
  return result;
}

}  // namespace sageattn_cli
