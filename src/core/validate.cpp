#include "src/core/validate.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>

#include "src/core/error.h"
#include "src/core/region.h"
#include "src/core/select.h"
#include "src/cpu/formats.h"

namespace sageattn {
namespace {

// ------------------------------------------------------------------------------------------------
// Ranges of int32 fields. Enumerants are contiguous, so a range covers them, too.
// ------------------------------------------------------------------------------------------------

struct Range {
  const char* field;
  size_t offset;
  int32_t min, max;
  const char* words;  // what the values mean, or nullptr for plain numbers
};

#define SAGEATTN_RANGE(type, field, min, max, words) \
  { #field, offsetof(type, field), min, max, words }

#define DESC_RANGE(field, min, max, words) \
  SAGEATTN_RANGE(sageattn_attn_desc, field, min, max, words)
constexpr Range kAttnDescRanges[] = {
    DESC_RANGE(q_dtype, 1, 3, "SAGEATTN_F16, BF16 or F32"),
    DESC_RANGE(kv_dtype, 0, 3, "0, SAGEATTN_F16, BF16 or F32"),
    DESC_RANGE(out_dtype, 0, 3, "0, SAGEATTN_F16, BF16 or F32"),
    DESC_RANGE(layout, 0, 1, "SAGEATTN_LAYOUT_*"),
    DESC_RANGE(batch_mode, 0, 1, "SAGEATTN_BATCH_*"),
    DESC_RANGE(mask, 0, 3, "SAGEATTN_MASK_*"),
    DESC_RANGE(window_left, -1, INT32_MAX, nullptr),
    DESC_RANGE(window_right, -1, INT32_MAX, nullptr),
    DESC_RANGE(head_dim, 1, 256, nullptr),
    DESC_RANGE(head_dim_v, 0, 256, nullptr),
    DESC_RANGE(num_qo_heads, 1, 65536, nullptr),
    DESC_RANGE(num_kv_heads, 0, 65536, nullptr),
    DESC_RANGE(sm_scale_set, 0, 1, nullptr),
    DESC_RANGE(max_batch, 0, 1 << 24, nullptr),
    DESC_RANGE(max_qo_len, 1, 1 << 30, nullptr),
    DESC_RANGE(max_kv_len, 1, 1 << 30, nullptr),
    DESC_RANGE(qk_format, 0, 4, "SAGEATTN_QK_*"),
    DESC_RANGE(qk_granularity, 0, 5, "SAGEATTN_GRANULARITY_*"),
    DESC_RANGE(smooth_q, 0, 2, "SAGEATTN_SMOOTH_*"),
    DESC_RANGE(smooth_k, 0, 2, "SAGEATTN_SMOOTH_*"),
    DESC_RANGE(smooth_v, 0, 3, "SAGEATTN_SMOOTH_V_*"),
    DESC_RANGE(v_scale, 0, 2, "SAGEATTN_V_SCALE_*"),
    DESC_RANGE(rotation, 0, 2, "SAGEATTN_ROTATION_*"),
    DESC_RANGE(pv_format, 0, 5, "SAGEATTN_PV_*"),
    DESC_RANGE(row_sum, 0, 2, "SAGEATTN_ROW_SUM_*"),
    DESC_RANGE(pv_accum, 0, 4, "SAGEATTN_PV_ACCUM_*"),
    DESC_RANGE(promotion_interval, 0, INT32_MAX, nullptr),
    DESC_RANGE(kernel, 0, 2, "SAGEATTN_KERNEL_*"),
    DESC_RANGE(pv_model, 0, 2, "SAGEATTN_PV_MODEL_*"),
};
#undef DESC_RANGE

#define CONTEXT_RANGE(field, min, max, words) \
  SAGEATTN_RANGE(sageattn_context_desc, field, min, max, words)
constexpr Range kContextDescRanges[] = {
    CONTEXT_RANGE(backend, 0, 2, "SAGEATTN_BACKEND_*"),
    CONTEXT_RANGE(device, 0, INT32_MAX, nullptr),
    CONTEXT_RANGE(num_threads, 0, 1024, nullptr),
};
#undef CONTEXT_RANGE

#define COMPARE_RANGE(field, min, max, words) \
  SAGEATTN_RANGE(sageattn_compare_args, field, min, max, words)
constexpr Range kCompareArgsRanges[] = {
    COMPARE_RANGE(out_dtype, 1, 3, "SAGEATTN_F16, BF16 or F32"),
    COMPARE_RANGE(ref_dtype, 1, 3, "SAGEATTN_F16, BF16 or F32"),
    COMPARE_RANGE(layout, 0, 1, "SAGEATTN_LAYOUT_*"),
    COMPARE_RANGE(batch, 0, INT32_MAX, nullptr),
    COMPARE_RANGE(len, 0, INT32_MAX, nullptr),
    COMPARE_RANGE(num_heads, 0, INT32_MAX, nullptr),
    COMPARE_RANGE(head_dim, 0, INT32_MAX, nullptr),
};
#undef COMPARE_RANGE
#undef SAGEATTN_RANGE

template <class T, size_t N>
void check_ranges(const T& fields, const Range (&ranges)[N]) {
  for (const Range& range : ranges) {
    int32_t value;
    std::memcpy(&value, reinterpret_cast<const char*>(&fields) + range.offset, sizeof value);
    if (value >= range.min && value <= range.max) continue;
    if (range.words != nullptr) {
      fail(SAGEATTN_E_INVALID_ARGUMENT, "%s = %d: must be %s (%d..%d)", range.field, value,
           range.words, range.min, range.max);
    }
    fail(SAGEATTN_E_INVALID_ARGUMENT, "%s = %d: must be %d..%d", range.field, value, range.min,
         range.max);
  }
}

void check_range(const char* field, int64_t value, int64_t min, int64_t max) {
  if (value >= min && value <= max) return;
  fail(SAGEATTN_E_INVALID_ARGUMENT, "%s = %lld: must be %lld..%lld", field,
       static_cast<long long>(value), static_cast<long long>(min), static_cast<long long>(max));
}

// A field that has no meaning beside another must be left at 0.
void check_zero(const char* field, int64_t value, const char* because) {
  if (value == 0) return;
  fail(SAGEATTN_E_INVALID_ARGUMENT, "%s = %lld: must be 0 %s", field, static_cast<long long>(value),
       because);
}

// ------------------------------------------------------------------------------------------------
// sageattn_attn_desc
// ------------------------------------------------------------------------------------------------

constexpr int64_t kMaxTotal = int64_t{1} << 54;  // max_batch * max_*_len at their largest

void check_reserved(const sageattn_attn_desc& desc) {
  const struct {
    const char* field;
    bool set;
  } reserved[] = {{"bias", desc.bias != 0},
                  {"num_sinks", desc.num_sinks != 0},
                  {"kv_storage", desc.kv_storage != 0},
                  {"softcap", !(desc.softcap == 0.0f)},
                  {"reserved", desc.reserved != 0}};
  for (const auto& [field, set] : reserved) {
    if (set) fail(SAGEATTN_E_UNSUPPORTED, "%s is set: not available yet; it must be 0", field);
  }
}

void check_shape(const sageattn_attn_desc& desc) {
  if (desc.mask != SAGEATTN_MASK_WINDOW) {
    check_zero("window_left", desc.window_left, "unless mask is SAGEATTN_MASK_WINDOW");
    check_zero("window_right", desc.window_right, "unless mask is SAGEATTN_MASK_WINDOW");
  }
  if (desc.num_kv_heads != 0 && desc.num_qo_heads % desc.num_kv_heads != 0) {
    fail(SAGEATTN_E_INVALID_ARGUMENT, "num_kv_heads = %d: must divide num_qo_heads = %d",
         desc.num_kv_heads, desc.num_qo_heads);
  }
  if (desc.sm_scale_set == 0 && !(desc.sm_scale == 0.0f)) {
    fail(SAGEATTN_E_INVALID_ARGUMENT, "sm_scale = %g: must be 0 unless sm_scale_set is 1",
         static_cast<double>(desc.sm_scale));
  }
  // Times log2(e) it must stay finite in fp32.
  if (!(std::fabs(desc.sm_scale) <= 2e38f)) {
    fail(SAGEATTN_E_INVALID_ARGUMENT, "sm_scale = %g: must be finite and at most 2e38 in magnitude",
         static_cast<double>(desc.sm_scale));
  }
  if (desc.batch_mode == SAGEATTN_BATCH_VARLEN) {
    check_range("max_total_qo", desc.max_total_qo, 0, kMaxTotal);
    check_range("max_total_kv", desc.max_total_kv, 0, kMaxTotal);
  } else {
    check_zero("max_total_qo", desc.max_total_qo, "with SAGEATTN_BATCH_DENSE");
    check_zero("max_total_kv", desc.max_total_kv, "with SAGEATTN_BATCH_DENSE");
  }
}

// SAGEATTN_QK_NONE and SAGEATTN_PV_NONE go together, and nothing else may be asked for.
void check_exact(const sageattn_attn_desc& desc) {
  const bool qk_none = desc.qk_format == SAGEATTN_QK_NONE;
  const bool pv_none = desc.pv_format == SAGEATTN_PV_NONE;
  if (!qk_none && !pv_none) return;
  if (!qk_none && desc.qk_format != SAGEATTN_QK_AUTO) {
    fail(SAGEATTN_E_UNSUPPORTED,
         "pv_format = SAGEATTN_PV_NONE: goes with qk_format SAGEATTN_QK_NONE only (here %d)",
         desc.qk_format);
  }
  if (!pv_none && desc.pv_format != SAGEATTN_PV_AUTO) {
    fail(SAGEATTN_E_UNSUPPORTED,
         "qk_format = SAGEATTN_QK_NONE: goes with pv_format SAGEATTN_PV_NONE only (here %d)",
         desc.pv_format);
  }
  const struct {
    const char* field;
    int32_t value;
    int32_t off;  // accepted beside 0
  } fields[] = {{"qk_granularity", desc.qk_granularity, 0},
                {"smooth_q", desc.smooth_q, SAGEATTN_SMOOTH_OFF},
                {"smooth_k", desc.smooth_k, SAGEATTN_SMOOTH_OFF},
                {"smooth_v", desc.smooth_v, SAGEATTN_SMOOTH_V_OFF},
                {"v_scale", desc.v_scale, 0},
                {"rotation", desc.rotation, 0},
                {"row_sum", desc.row_sum, 0},
                {"pv_accum", desc.pv_accum, 0},
                {"promotion_interval", desc.promotion_interval, 0},
                {"kernel", desc.kernel, 0},
                {"pv_model", desc.pv_model, 0}};
  for (const auto& [field, value, off] : fields) {
    if (value != 0 && value != off) {
      fail(SAGEATTN_E_UNSUPPORTED,
           "%s = %d: does not apply to qk_format SAGEATTN_QK_NONE, which quantizes nothing; leave "
           "it AUTO",
           field, value);
    }
  }
}

void check_promotion_interval(const PlanConfig& plan) {
  const int32_t interval = plan.promotion_interval;
  const bool groups =
      plan.smooth_v == SAGEATTN_SMOOTH_V_GROUP || plan.v_scale == SAGEATTN_V_SCALE_GROUP;
  if (plan.pv_accum == SAGEATTN_PV_ACCUM_SINGLE_LEVEL) {
    if (groups) {
      fail(SAGEATTN_E_UNSUPPORTED,
           "pv_accum = SAGEATTN_PV_ACCUM_SINGLE_LEVEL: never promotes, but %s is GROUP, which is "
           "by promotion group; use SAGEATTN_%s or SAGEATTN_PV_ACCUM_TWO_LEVEL",
           plan.smooth_v == SAGEATTN_SMOOTH_V_GROUP ? "smooth_v" : "v_scale",
           plan.smooth_v == SAGEATTN_SMOOTH_V_GROUP ? "SMOOTH_V_SEQUENCE" : "V_SCALE_CHANNEL");
    }
    check_zero("promotion_interval", interval, "with SAGEATTN_PV_ACCUM_SINGLE_LEVEL");
  }
  if (plan.pv_accum == SAGEATTN_PV_ACCUM_F32 && !groups) {
    check_zero("promotion_interval", interval,
               "with SAGEATTN_PV_ACCUM_F32 unless smooth_v or v_scale is GROUP");
  }
  const int32_t b_k = plan.tile.b_k;
  if (interval % 32 != 0 || (interval % b_k != 0 && (interval == 0 || b_k % interval != 0))) {
    fail(SAGEATTN_E_INVALID_ARGUMENT,
         "promotion_interval = %d: must be a multiple of 32 that divides b_k = %d or is a multiple "
         "of it",
         interval, b_k);
  }
  if (plan.pv_accum == SAGEATTN_PV_ACCUM_F16 && interval > 64) {
    fail(SAGEATTN_E_INVALID_ARGUMENT,
         "promotion_interval = %d: must be at most 64 with SAGEATTN_PV_ACCUM_F16, whose "
         "accumulators would overflow",
         interval);
  }
}

// What goes with what, on the resolved plan. These hold for every backend.
void check_numerics(const sageattn_attn_desc& desc, const PlanConfig& plan) {
  if (plan.qk_format == SAGEATTN_QK_NONE) return;
  const int32_t pv = plan.pv_format;
  const int32_t accum = plan.pv_accum;

  if (!arch_has_fp8(plan.arch)) {
    if (plan.qk_format == SAGEATTN_QK_E4M3) {
      fail(SAGEATTN_E_UNSUPPORTED,
           "qk_format = SAGEATTN_QK_E4M3: sm_%d has no FP8 tensor cores; use SAGEATTN_QK_I8, or "
           "arch 89, 90 or 120",
           plan.arch);
    }
    if (pv == SAGEATTN_PV_E4M3 || pv == SAGEATTN_PV_E5M2) {
      fail(SAGEATTN_E_UNSUPPORTED,
           "pv_format = SAGEATTN_PV_%s: sm_%d has no FP8 tensor cores; use SAGEATTN_PV_F16, or "
           "arch 89, 90 or 120",
           pv == SAGEATTN_PV_E4M3 ? "E4M3" : "E5M2", plan.arch);
    }
  }
  if (accum == SAGEATTN_PV_ACCUM_F16 && pv != SAGEATTN_PV_E4M3 && pv != SAGEATTN_PV_F16) {
    fail(SAGEATTN_E_UNSUPPORTED,
         "pv_accum = SAGEATTN_PV_ACCUM_F16: goes with SAGEATTN_PV_E4M3 or SAGEATTN_PV_F16 only "
         "(here pv_format is %d)",
         pv);
  }
  if (accum == SAGEATTN_PV_ACCUM_SINGLE_LEVEL && pv == SAGEATTN_PV_F16) {
    fail(SAGEATTN_E_UNSUPPORTED,
         "pv_accum = SAGEATTN_PV_ACCUM_SINGLE_LEVEL: goes with 8-bit pv_format only; "
         "SAGEATTN_PV_F16 is summed in fp32 anyway: use SAGEATTN_PV_ACCUM_F32");
  }
  if (plan.kernel == SAGEATTN_KERNEL_WGMMA) {
    const bool runs = plan.arch == 90 && std::max(plan.head_dim, plan.head_dim_v) <= 128 &&
                      pv != SAGEATTN_PV_F16 && accum != SAGEATTN_PV_ACCUM_F16;
    if (!runs) {
      fail(SAGEATTN_E_UNSUPPORTED,
           "kernel = SAGEATTN_KERNEL_WGMMA: needs arch 90, head_dim and head_dim_v up to 128, an "
           "8-bit pv_format and a pv_accum other than F16 (here arch %d, head_dim %d, head_dim_v "
           "%d, pv_format %d, pv_accum %d); use SAGEATTN_KERNEL_MMA_SYNC",
           plan.arch, plan.head_dim, plan.head_dim_v, pv, accum);
    }
  }
  if (desc.pv_model != SAGEATTN_PV_MODEL_AUTO && plan.backend == SAGEATTN_BACKEND_CUDA) {
    fail(SAGEATTN_E_UNSUPPORTED,
         "pv_model = %d: chooses a model of the CPU backend; leave it AUTO with CUDA",
         desc.pv_model);
  }
  if (desc.pv_model != SAGEATTN_PV_MODEL_AUTO && !has_pv_model(pv, accum)) {
    fail(SAGEATTN_E_UNSUPPORTED,
         "pv_model = %d: applies to SAGEATTN_PV_E4M3 and E5M2 with pv_accum TWO_LEVEL or "
         "SINGLE_LEVEL only (here pv_format %d, pv_accum %d); leave it AUTO",
         desc.pv_model, pv, accum);
  }
  check_promotion_interval(plan);
}

// ------------------------------------------------------------------------------------------------
// Tensors
// ------------------------------------------------------------------------------------------------

struct Shape {
  int64_t batch, tokens, heads, channels;  // VARLEN: batch 1, all tokens
};

enum class Access { kRead, kWrite };

Strides contiguous(const Shape& shape, int32_t layout) {
  const int64_t plane = shape.tokens * shape.channels;
  const int64_t row = shape.heads * shape.channels;
  // The limits of packed sequences keep a plane within 64 bits, not a whole tensor.
  const int64_t batch = shape.batch == 1 ? 0 : shape.tokens * row;
  if (layout == SAGEATTN_LAYOUT_NHD) return {batch, row, shape.channels, 1};
  return {batch, shape.channels, plane, 1};
}

struct Tensor {
  Strides strides;
  Region region;  // empty if the tensor has no elements
};

Tensor check_tensor(const char* name, const sageattn_const_tensor& given, int32_t dtype,
                    const Shape& shape, int32_t layout, Access access) {
  if (shape.batch == 0 || shape.tokens == 0 || shape.heads == 0 || shape.channels == 0) {
    return {};  // nothing will be touched, whatever the pointer
  }
  const bool all_zero = given.stride_batch == 0 && given.stride_token == 0 &&
                        given.stride_head == 0 && given.stride_dim == 0;
  Tensor tensor;
  tensor.strides = all_zero ? contiguous(shape, layout)
                            : Strides{given.stride_batch, given.stride_token, given.stride_head,
                                      given.stride_dim};

  // What a caller may leave in the stride of a dimension of size 1 must not reach address arithmetic.
  if (shape.batch == 1) tensor.strides.batch = 0;
  if (shape.tokens == 1) tensor.strides.token = 0;
  if (shape.heads == 1) tensor.strides.head = 0;
  if (shape.channels == 1) tensor.strides.dim = 0;

  const int64_t element = dtype_size(dtype);
  const uintptr_t address = reinterpret_cast<uintptr_t>(given.data);
  if (given.data == nullptr) {
    fail(SAGEATTN_E_INVALID_ARGUMENT, "%s.data = NULL: the tensor has elements", name);
  }
  if (address % static_cast<uintptr_t>(element) != 0) {
    fail(SAGEATTN_E_MISALIGNED, "%s.data = %p: must be aligned to its element, %d bytes", name,
         given.data, static_cast<int>(element));
  }
  const struct {
    const char* field;
    int64_t size, stride;
  } dimensions[] = {{"stride_batch", shape.batch, tensor.strides.batch},
                    {"stride_token", shape.tokens, tensor.strides.token},
                    {"stride_head", shape.heads, tensor.strides.head},
                    {"stride_dim", shape.channels, tensor.strides.dim}};
  for (const auto& [field, size, stride] : dimensions) {
    if (stride != 0 || size == 1) continue;
    if (access == Access::kWrite) {
      fail(SAGEATTN_E_ALIASED, "%s.%s = 0: %lld elements of an output would share an address", name,
           field, static_cast<long long>(size));
    }
    if (std::strcmp(field, "stride_dim") == 0) {
      fail(SAGEATTN_E_INVALID_ARGUMENT,
           "%s.stride_dim = 0: must not be 0 beside other strides; give 1 for adjacent channels",
           name);
    }
  }

  tensor.region = strided_region(name, given.data, static_cast<size_t>(element),
                                 {{{shape.batch, tensor.strides.batch},
                                   {shape.tokens, tensor.strides.token},
                                   {shape.heads, tensor.strides.head},
                                   {shape.channels, tensor.strides.dim}}});
  const Region& region = tensor.region;
  if (region.span() > INT64_MAX || region.begin < 0 ||
      region.begin + region.span() > static_cast<int128>(UINTPTR_MAX)) {
    fail(SAGEATTN_E_INVALID_ARGUMENT,
         "%s: its strides (batch %lld, token %lld, head %lld, dim %lld) reach out of the address "
         "space: all its elements must lie within 2^63 bytes",
         name, static_cast<long long>(tensor.strides.batch),
         static_cast<long long>(tensor.strides.token), static_cast<long long>(tensor.strides.head),
         static_cast<long long>(tensor.strides.dim));
  }
  if (access == Access::kWrite && !elements_distinct(region)) {
    fail(SAGEATTN_E_ALIASED,
         "%s: its strides (batch %lld, token %lld, head %lld, dim %lld) may let elements share an "
         "address: each must step over all that the smaller ones span",
         name, static_cast<long long>(tensor.strides.batch),
         static_cast<long long>(tensor.strides.token), static_cast<long long>(tensor.strides.head),
         static_cast<long long>(tensor.strides.dim));
  }
  return tensor;
}

sageattn_const_tensor as_const(const sageattn_tensor& t) {
  return {t.data, t.stride_batch, t.stride_token, t.stride_head, t.stride_dim};
}

// One channel a token and head.
sageattn_const_tensor as_const(const sageattn_lse_tensor& t) {
  return {t.data, t.stride_batch, t.stride_token, t.stride_head, 0};
}

Region check_int32_array(const char* name, const int32_t* data, int64_t count) {
  if (data == nullptr || count == 0) return {};
  if (reinterpret_cast<uintptr_t>(data) % sizeof(int32_t) != 0) {
    fail(SAGEATTN_E_MISALIGNED, "%s = %p: must be aligned to 4 bytes", name,
         static_cast<const void*>(data));
  }
  return array_region(name, data, sizeof(int32_t), count);
}

// ------------------------------------------------------------------------------------------------
// sageattn_execute_args
// ------------------------------------------------------------------------------------------------

void check_limit(const char* field, int64_t value, const char* limit_field, int64_t limit) {
  if (value < 0) {
    fail(SAGEATTN_E_INVALID_ARGUMENT, "%s = %lld: must be 0..%lld", field,
         static_cast<long long>(value), static_cast<long long>(limit));
  }
  if (value > limit) {
    fail(SAGEATTN_E_LIMIT, "%s = %lld: must be at most the plan's %s = %lld", field,
         static_cast<long long>(value), limit_field, static_cast<long long>(limit));
  }
}

void check_lengths(const PlanConfig& plan, const sageattn_execute_args& args) {
  check_limit("batch", args.batch, "max_batch", plan.max_batch);
  if (plan.batch_mode == SAGEATTN_BATCH_VARLEN) {
    check_zero("qo_len", args.qo_len, "with SAGEATTN_BATCH_VARLEN");
    check_zero("kv_len", args.kv_len, "with SAGEATTN_BATCH_VARLEN");
    check_limit("total_qo", args.total_qo, "max_total_qo", plan.max_total_qo);
    check_limit("total_kv", args.total_kv, "max_total_kv", plan.max_total_kv);
    if (args.cu_seqlens_q == nullptr || args.cu_seqlens_kv == nullptr) {
      fail(SAGEATTN_E_INVALID_ARGUMENT, "%s = NULL: required with SAGEATTN_BATCH_VARLEN",
           args.cu_seqlens_q == nullptr ? "cu_seqlens_q" : "cu_seqlens_kv");
    }
    const struct {
      const char* field;
      int64_t stride;
    } strides[] = {{"q.stride_batch", args.q.stride_batch},
                   {"k.stride_batch", args.k.stride_batch},
                   {"v.stride_batch", args.v.stride_batch},
                   {"out.stride_batch", args.out.stride_batch},
                   {"lse.stride_batch", args.lse.stride_batch}};
    for (const auto& [field, stride] : strides) {
      check_zero(field, stride, "with SAGEATTN_BATCH_VARLEN");
    }
  } else {
    check_limit("qo_len", args.qo_len, "max_qo_len", plan.max_qo_len);
    check_limit("kv_len", args.kv_len, "max_kv_len", plan.max_kv_len);
    check_zero("total_qo", args.total_qo, "with SAGEATTN_BATCH_DENSE");
    check_zero("total_kv", args.total_kv, "with SAGEATTN_BATCH_DENSE");
    if (args.cu_seqlens_q != nullptr || args.cu_seqlens_kv != nullptr) {
      fail(SAGEATTN_E_INVALID_ARGUMENT, "%s = %p: must be NULL with SAGEATTN_BATCH_DENSE",
           args.cu_seqlens_q != nullptr ? "cu_seqlens_q" : "cu_seqlens_kv",
           static_cast<const void*>(args.cu_seqlens_q != nullptr ? args.cu_seqlens_q
                                                                 : args.cu_seqlens_kv));
    }
  }
  if (args.lse.data == nullptr) {
    check_zero("lse.stride_batch", args.lse.stride_batch, "while lse.data is NULL");
    check_zero("lse.stride_head", args.lse.stride_head, "while lse.data is NULL");
    check_zero("lse.stride_token", args.lse.stride_token, "while lse.data is NULL");
  }
}

Region check_workspace(const WorkspaceNeed& need, const void* workspace, size_t size) {
  if (need.bytes == 0) return {};
  if (workspace == nullptr) {
    fail(SAGEATTN_E_WORKSPACE, "workspace = NULL: the plan needs %lld bytes",
         static_cast<long long>(need.bytes));
  }
  if (size < static_cast<uint64_t>(need.bytes)) {
    fail(SAGEATTN_E_WORKSPACE, "workspace_size = %zu: must be at least min_workspace = %lld", size,
         static_cast<long long>(need.bytes));
  }
  if (reinterpret_cast<uintptr_t>(workspace) % static_cast<uintptr_t>(need.alignment) != 0) {
    fail(SAGEATTN_E_WORKSPACE, "workspace = %p: must be aligned to workspace_alignment = %d",
         workspace, need.alignment);
  }
  if (size > static_cast<uint64_t>(INT64_MAX)) {
    fail(SAGEATTN_E_WORKSPACE, "workspace_size = %zu: must be below 2^63", size);
  }
  return array_region("workspace", workspace, 1, static_cast<int64_t>(size));
}

Operand operand(const char* field, const Region& region, const void* data) {
  return {field, region.empty() ? nullptr : data};
}

// Whatever is written overlaps nothing else.
void check_aliasing(const Region* written, size_t num_written, const Region* read,
                    size_t num_read) {
  const auto check = [](const Region& output, const Region& other) {
    if (regions_disjoint(output, other)) return;
    fail(SAGEATTN_E_ALIASED,
         "%s: overlaps %s; their address ranges must be apart, or apart modulo a stride of either",
         output.name, other.name);
  };
  for (size_t i = 0; i < num_written; ++i) {
    for (size_t j = i + 1; j < num_written; ++j) check(written[i], written[j]);
    for (size_t j = 0; j < num_read; ++j) check(written[i], read[j]);
  }
}

}  // namespace

void check_context_desc(const sageattn_context_desc& desc) {
  constexpr uint32_t kFlags =
      SAGEATTN_CONTEXT_NO_JIT | SAGEATTN_CONTEXT_NO_DISK_CACHE | SAGEATTN_CONTEXT_CACHE_READ_ONLY;
  if ((desc.flags & ~kFlags) != 0) {
    fail(SAGEATTN_E_INVALID_ARGUMENT, "flags = %u: must be SAGEATTN_CONTEXT_* or-ed (0..%u)",
         desc.flags, kFlags);
  }
  check_ranges(desc, kContextDescRanges);
  if (desc.backend == SAGEATTN_BACKEND_CPU) {
    check_zero("device", desc.device, "with SAGEATTN_BACKEND_CPU");
  }
  if (desc.backend == SAGEATTN_BACKEND_CUDA) {
    check_zero("num_threads", desc.num_threads, "with SAGEATTN_BACKEND_CUDA");
  }
  constexpr int32_t kArchs[] = {0, 80, 86, 89, 90, 120};
  if (std::find(std::begin(kArchs), std::end(kArchs), desc.target_arch) == std::end(kArchs)) {
    fail(SAGEATTN_E_INVALID_ARGUMENT, "target_arch = %d: must be 0, 80, 86, 89, 90 or 120",
         desc.target_arch);
  }
  if ((desc.alloc == nullptr) != (desc.free == nullptr)) {
    fail(SAGEATTN_E_INVALID_ARGUMENT, "%s = NULL: alloc and free must both be set or both be NULL",
         desc.alloc == nullptr ? "alloc" : "free");
  }
}

PlanConfig check_attn_desc(const sageattn_attn_desc& desc, int32_t backend, int32_t arch) {
  check_reserved(desc);
  check_ranges(desc, kAttnDescRanges);
  check_shape(desc);
  check_exact(desc);

  PlanConfig plan{};
  plan.backend = backend;
  plan.arch = arch;
  plan.q_dtype = desc.q_dtype;
  plan.kv_dtype = desc.kv_dtype != 0 ? desc.kv_dtype : desc.q_dtype;
  plan.out_dtype = desc.out_dtype != 0 ? desc.out_dtype : desc.q_dtype;
  plan.layout = desc.layout;
  plan.batch_mode = desc.batch_mode;
  plan.mask = desc.mask;
  plan.window_left = desc.window_left;
  plan.window_right = desc.window_right;
  plan.head_dim = desc.head_dim;
  plan.head_dim_v = desc.head_dim_v != 0 ? desc.head_dim_v : desc.head_dim;
  plan.num_qo_heads = desc.num_qo_heads;
  plan.num_kv_heads = desc.num_kv_heads != 0 ? desc.num_kv_heads : desc.num_qo_heads;
  plan.sm_scale = desc.sm_scale_set != 0
                      ? desc.sm_scale
                      : static_cast<float>(1.0 / std::sqrt(static_cast<double>(desc.head_dim)));
  plan.max_batch = desc.max_batch != 0 ? desc.max_batch : 1;
  plan.max_qo_len = desc.max_qo_len;
  plan.max_kv_len = desc.max_kv_len;
  plan.max_total_qo = desc.max_total_qo != 0
                          ? desc.max_total_qo
                          : static_cast<int64_t>(plan.max_batch) * plan.max_qo_len;
  plan.max_total_kv = desc.max_total_kv != 0
                          ? desc.max_total_kv
                          : static_cast<int64_t>(plan.max_batch) * plan.max_kv_len;
  resolve_numerics(desc, plan);
  check_numerics(desc, plan);
  return plan;
}

Launch check_execute_args(const PlanConfig& plan, const WorkspaceNeed& need,
                          const sageattn_execute_args& args, void* workspace,
                          size_t workspace_size) {
  check_lengths(plan, args);

  const bool varlen = plan.batch_mode == SAGEATTN_BATCH_VARLEN;
  const int64_t batch = varlen ? 1 : args.batch;
  const int64_t qo_tokens = varlen ? args.total_qo : args.qo_len;
  const int64_t kv_tokens = varlen ? args.total_kv : args.kv_len;
  const Tensor q =
      check_tensor("q", args.q, plan.q_dtype, {batch, qo_tokens, plan.num_qo_heads, plan.head_dim},
                   plan.layout, Access::kRead);
  const Tensor k =
      check_tensor("k", args.k, plan.kv_dtype, {batch, kv_tokens, plan.num_kv_heads, plan.head_dim},
                   plan.layout, Access::kRead);
  const Tensor v = check_tensor("v", args.v, plan.kv_dtype,
                                {batch, kv_tokens, plan.num_kv_heads, plan.head_dim_v}, plan.layout,
                                Access::kRead);
  const Tensor out = check_tensor("out", as_const(args.out), plan.out_dtype,
                                  {batch, qo_tokens, plan.num_qo_heads, plan.head_dim_v},
                                  plan.layout, Access::kWrite);
  Tensor lse{};
  if (args.lse.data != nullptr) {
    lse =
        check_tensor("lse", as_const(args.lse), SAGEATTN_F32,
                     {batch, qo_tokens, plan.num_qo_heads, 1}, SAGEATTN_LAYOUT_HND, Access::kWrite);
  }
  const int64_t cuts = args.batch + int64_t{1};
  const Region written[] = {out.region, lse.region,
                            check_int32_array("status", args.status, args.batch),
                            check_workspace(need, workspace, workspace_size)};
  const Region read[] = {q.region,
                         k.region,
                         v.region,
                         check_int32_array("cu_seqlens_q", args.cu_seqlens_q, cuts),
                         check_int32_array("cu_seqlens_kv", args.cu_seqlens_kv, cuts),
                         check_int32_array("seqused_kv", args.seqused_kv, args.batch)};
  check_aliasing(written, std::size(written), read, std::size(read));

  Launch launch{};
  launch.batch = args.batch;
  launch.qo_len = args.qo_len;
  launch.kv_len = args.kv_len;
  launch.total_qo = args.total_qo;
  launch.total_kv = args.total_kv;
  launch.q = args.q.data;
  launch.k = args.k.data;
  launch.v = args.v.data;
  launch.out = args.out.data;
  launch.lse = args.lse.data;
  launch.q_strides = q.strides;
  launch.k_strides = k.strides;
  launch.v_strides = v.strides;
  launch.out_strides = out.strides;
  launch.lse_strides = lse.strides;
  launch.cu_seqlens_q = args.cu_seqlens_q;
  launch.cu_seqlens_kv = args.cu_seqlens_kv;
  launch.seqused_kv = args.seqused_kv;
  launch.status = args.status;
  launch.workspace = workspace;
  launch.workspace_size = workspace_size;
  if (args.batch > 0) {
    launch.operands = {operand("q.data", q.region, args.q.data),
                       operand("k.data", k.region, args.k.data),
                       operand("v.data", v.region, args.v.data),
                       operand("out.data", out.region, args.out.data),
                       operand("lse.data", lse.region, args.lse.data),
                       {"cu_seqlens_q", args.cu_seqlens_q},
                       {"cu_seqlens_kv", args.cu_seqlens_kv},
                       {"seqused_kv", args.seqused_kv},
                       {"status", args.status},
                       {"workspace", need.bytes > 0 ? workspace : nullptr}};
  }
  return launch;
}

Comparison check_compare_args(const sageattn_compare_args& args) {
  check_ranges(args, kCompareArgsRanges);
  const Shape shape = {args.batch, args.len, args.num_heads, args.head_dim};
  const int64_t heads = static_cast<int64_t>(args.batch) * args.num_heads;
  if (heads > INT32_MAX) {
    fail(SAGEATTN_E_INVALID_ARGUMENT, "num_heads = %d: batch * num_heads must be below 2^31",
         args.num_heads);
  }
  if (static_cast<int128>(heads) * args.len * args.head_dim > INT64_MAX) {
    fail(SAGEATTN_E_INVALID_ARGUMENT,
         "len = %d: batch * len * num_heads * head_dim must be below 2^63", args.len);
  }
  const Tensor out =
      check_tensor("out", args.out, args.out_dtype, shape, args.layout, Access::kRead);
  const Tensor ref =
      check_tensor("ref", args.ref, args.ref_dtype, shape, args.layout, Access::kRead);
  return {args,
          out.strides,
          ref.strides,
          {operand("out.data", out.region, args.out.data),
           operand("ref.data", ref.region, args.ref.data)}};
}

}  // namespace sageattn
