// Attention on tensors in host memory: from shapes and lengths to descriptors, plans and executes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "library.h"
#include "sageattn.h"
#include "tensor_io.h"

namespace sageattn_cli {

// Four dimensions [batch, token, head, channel] of a tensor in either layout, and its strides.
struct View {
  int64_t batches, tokens, heads, channels;
  int64_t stride_batch, stride_token, stride_head;
};

// Takes three dimensions for a batch of one. Throws Failure(kFileError) with `name` for other
// numbers of dimensions, and for sizes beyond 32 bits.
View view_of(const Tensor& tensor, int32_t layout, const std::string& name);

struct AttentionInputs {
  Tensor q, k, v;
  // Not empty: the sequences are packed along the token axis.
  std::vector<int32_t> cu_seqlens_q, cu_seqlens_kv;
  std::vector<int32_t> seqused_kv;  // may be empty
  bool want_lse = false;
};

// Throws Failure(kFileError), naming all three shapes, unless the tensors fit each other.
void check_shapes(const AttentionInputs& inputs, int32_t layout);

struct AttentionOutputs {
  Tensor out;
  Tensor lse;  // without elements unless wanted
  sageattn_plan_info info;
  double milliseconds;  // of the executes alone
};

// `desc` has the numerics, mask and layout; types, heads and limits come from the inputs. With the
// CUDA backend the tensors are copied to the device and back. On the CPU large work is cut into one execute for each (sequence, kv head), which gives the same bits and shows
// progress.
AttentionOutputs attend(const Context& context, sageattn_attn_desc desc,
                        const AttentionInputs& inputs);

// Both have the same shape.
sageattn_compare_result compare_tensors(const Tensor& out, const Tensor& ref, int32_t layout);

}  // namespace sageattn_cli
