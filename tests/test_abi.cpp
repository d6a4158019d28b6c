// The binary interface, pinned: sizes, offsets and values on LP64 machines. What fails here breaks
// every program and binding that was built before. Adding is fine: append.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "sageattn.h"
#include "tests/catch.h"

static_assert(sizeof(void*) == 8 && sizeof(size_t) == 8, "the numbers below are for LP64");

namespace {

#define PIN_SIZE(type, size) CHECK(sizeof(type) == (size))
#define PIN(type, field, offset) CHECK(offsetof(type, field) == (offset))

TEST_CASE("layout of sageattn_error") {
  PIN_SIZE(sageattn_error, 1024);
  PIN(sageattn_error, struct_size, 0);
  PIN(sageattn_error, status, 4);
  PIN(sageattn_error, message, 8);
}

TEST_CASE("layout of sageattn_context_desc") {
  PIN_SIZE(sageattn_context_desc, 80);
  PIN(sageattn_context_desc, struct_size, 0);
  PIN(sageattn_context_desc, flags, 4);
  PIN(sageattn_context_desc, backend, 8);
  PIN(sageattn_context_desc, device, 12);
  PIN(sageattn_context_desc, target_arch, 16);
  PIN(sageattn_context_desc, num_threads, 20);
  PIN(sageattn_context_desc, cache_dir, 24);
  PIN(sageattn_context_desc, nvrtc_path, 32);
  PIN(sageattn_context_desc, alloc, 40);
  PIN(sageattn_context_desc, free, 48);
  PIN(sageattn_context_desc, allocator_user, 56);
  PIN(sageattn_context_desc, log, 64);
  PIN(sageattn_context_desc, log_user, 72);
}

TEST_CASE("layout of sageattn_attn_desc") {
  PIN_SIZE(sageattn_attn_desc, 160);
  PIN(sageattn_attn_desc, struct_size, 0);
  PIN(sageattn_attn_desc, q_dtype, 4);
  PIN(sageattn_attn_desc, kv_dtype, 8);
  PIN(sageattn_attn_desc, out_dtype, 12);
  PIN(sageattn_attn_desc, layout, 16);
  PIN(sageattn_attn_desc, batch_mode, 20);
  PIN(sageattn_attn_desc, mask, 24);
  PIN(sageattn_attn_desc, window_left, 28);
  PIN(sageattn_attn_desc, window_right, 32);
  PIN(sageattn_attn_desc, head_dim, 36);
  PIN(sageattn_attn_desc, head_dim_v, 40);
  PIN(sageattn_attn_desc, num_qo_heads, 44);
  PIN(sageattn_attn_desc, num_kv_heads, 48);
  PIN(sageattn_attn_desc, sm_scale_set, 52);
  PIN(sageattn_attn_desc, sm_scale, 56);
  PIN(sageattn_attn_desc, max_batch, 60);
  PIN(sageattn_attn_desc, max_qo_len, 64);
  PIN(sageattn_attn_desc, max_kv_len, 68);
  PIN(sageattn_attn_desc, max_total_qo, 72);
  PIN(sageattn_attn_desc, max_total_kv, 80);
  PIN(sageattn_attn_desc, qk_format, 88);
  PIN(sageattn_attn_desc, qk_granularity, 92);
  PIN(sageattn_attn_desc, smooth_q, 96);
  PIN(sageattn_attn_desc, smooth_k, 100);
  PIN(sageattn_attn_desc, smooth_v, 104);
  PIN(sageattn_attn_desc, v_scale, 108);
  PIN(sageattn_attn_desc, rotation, 112);
  PIN(sageattn_attn_desc, pv_format, 116);
  PIN(sageattn_attn_desc, row_sum, 120);
  PIN(sageattn_attn_desc, pv_accum, 124);
  PIN(sageattn_attn_desc, promotion_interval, 128);
  PIN(sageattn_attn_desc, kernel, 132);
  PIN(sageattn_attn_desc, pv_model, 136);
  PIN(sageattn_attn_desc, bias, 140);
  PIN(sageattn_attn_desc, num_sinks, 144);
  PIN(sageattn_attn_desc, kv_storage, 148);
  PIN(sageattn_attn_desc, softcap, 152);
  PIN(sageattn_attn_desc, reserved, 156);
}

TEST_CASE("layout of sageattn_plan_info") {
  PIN_SIZE(sageattn_plan_info, 216);
  PIN(sageattn_plan_info, struct_size, 0);
  PIN(sageattn_plan_info, backend, 4);
  PIN(sageattn_plan_info, arch, 8);
  PIN(sageattn_plan_info, origin, 12);
  PIN(sageattn_plan_info, min_workspace, 16);
  PIN(sageattn_plan_info, preferred_workspace, 24);
  PIN(sageattn_plan_info, workspace_alignment, 32);
  PIN(sageattn_plan_info, registers, 36);
  PIN(sageattn_plan_info, spill_bytes, 40);
  PIN(sageattn_plan_info, smem_bytes, 44);
  PIN(sageattn_plan_info, threads, 48);
  PIN(sageattn_plan_info, launches, 52);
  PIN(sageattn_plan_info, compile_ms, 56);
  PIN(sageattn_plan_info, b_q, 60);
  PIN(sageattn_plan_info, b_k, 64);
  PIN(sageattn_plan_info, promotion_interval, 68);
  PIN(sageattn_plan_info, q_dtype, 72);
  PIN(sageattn_plan_info, kv_dtype, 76);
  PIN(sageattn_plan_info, out_dtype, 80);
  PIN(sageattn_plan_info, head_dim_v, 84);
  PIN(sageattn_plan_info, num_kv_heads, 88);
  PIN(sageattn_plan_info, sm_scale, 92);
  PIN(sageattn_plan_info, qk_format, 96);
  PIN(sageattn_plan_info, qk_granularity, 100);
  PIN(sageattn_plan_info, smooth_q, 104);
  PIN(sageattn_plan_info, smooth_k, 108);
  PIN(sageattn_plan_info, smooth_v, 112);
  PIN(sageattn_plan_info, v_scale, 116);
  PIN(sageattn_plan_info, rotation, 120);
  PIN(sageattn_plan_info, pv_format, 124);
  PIN(sageattn_plan_info, row_sum, 128);
  PIN(sageattn_plan_info, pv_accum, 132);
  PIN(sageattn_plan_info, kernel, 136);
  PIN(sageattn_plan_info, pv_model, 140);
  PIN(sageattn_plan_info, kernel_name, 144);
  PIN(sageattn_plan_info, num_kernels, 208);
  PIN(sageattn_plan_info, reserved, 212);
}

TEST_CASE("layout of sageattn_kernel_info") {
  PIN_SIZE(sageattn_kernel_info, 224);
  PIN(sageattn_kernel_info, struct_size, 0);
  PIN(sageattn_kernel_info, arch, 4);
  PIN(sageattn_kernel_info, origin, 8);
  PIN(sageattn_kernel_info, registers, 12);
  PIN(sageattn_kernel_info, spill_bytes, 16);
  PIN(sageattn_kernel_info, smem_bytes, 20);
  PIN(sageattn_kernel_info, threads, 24);
  PIN(sageattn_kernel_info, compile_ms, 28);
  PIN(sageattn_kernel_info, name, 32);
  PIN(sageattn_kernel_info, macros, 96);
}

TEST_CASE("layout of sageattn_const_tensor") {
  PIN_SIZE(sageattn_const_tensor, 40);
  PIN(sageattn_const_tensor, data, 0);
  PIN(sageattn_const_tensor, stride_batch, 8);
  PIN(sageattn_const_tensor, stride_token, 16);
  PIN(sageattn_const_tensor, stride_head, 24);
  PIN(sageattn_const_tensor, stride_dim, 32);
}

TEST_CASE("layout of sageattn_tensor") {
  PIN_SIZE(sageattn_tensor, 40);
  PIN(sageattn_tensor, data, 0);
  PIN(sageattn_tensor, stride_batch, 8);
  PIN(sageattn_tensor, stride_token, 16);
  PIN(sageattn_tensor, stride_head, 24);
  PIN(sageattn_tensor, stride_dim, 32);
}

TEST_CASE("layout of sageattn_lse_tensor") {
  PIN_SIZE(sageattn_lse_tensor, 32);
  PIN(sageattn_lse_tensor, data, 0);
  PIN(sageattn_lse_tensor, stride_batch, 8);
  PIN(sageattn_lse_tensor, stride_head, 16);
  PIN(sageattn_lse_tensor, stride_token, 24);
}

TEST_CASE("layout of sageattn_execute_args") {
  PIN_SIZE(sageattn_execute_args, 256);
  PIN(sageattn_execute_args, struct_size, 0);
  PIN(sageattn_execute_args, batch, 4);
  PIN(sageattn_execute_args, qo_len, 8);
  PIN(sageattn_execute_args, kv_len, 12);
  PIN(sageattn_execute_args, total_qo, 16);
  PIN(sageattn_execute_args, total_kv, 24);
  PIN(sageattn_execute_args, q, 32);
  PIN(sageattn_execute_args, k, 72);
  PIN(sageattn_execute_args, v, 112);
  PIN(sageattn_execute_args, out, 152);
  PIN(sageattn_execute_args, lse, 192);
  PIN(sageattn_execute_args, cu_seqlens_q, 224);
  PIN(sageattn_execute_args, cu_seqlens_kv, 232);
  PIN(sageattn_execute_args, seqused_kv, 240);
  PIN(sageattn_execute_args, status, 248);
}

TEST_CASE("layout of sageattn_compare_args") {
  PIN_SIZE(sageattn_compare_args, 112);
  PIN(sageattn_compare_args, struct_size, 0);
  PIN(sageattn_compare_args, out_dtype, 4);
  PIN(sageattn_compare_args, ref_dtype, 8);
  PIN(sageattn_compare_args, layout, 12);
  PIN(sageattn_compare_args, batch, 16);
  PIN(sageattn_compare_args, len, 20);
  PIN(sageattn_compare_args, num_heads, 24);
  PIN(sageattn_compare_args, head_dim, 28);
  PIN(sageattn_compare_args, out, 32);
  PIN(sageattn_compare_args, ref, 72);
}

TEST_CASE("layout of sageattn_compare_result") {
  PIN_SIZE(sageattn_compare_result, 104);
  PIN(sageattn_compare_result, struct_size, 0);
  PIN(sageattn_compare_result, worst_head, 4);
  PIN(sageattn_compare_result, count, 8);
  PIN(sageattn_compare_result, nonfinite_out, 16);
  PIN(sageattn_compare_result, nonfinite_ref, 24);
  PIN(sageattn_compare_result, cos_sim, 32);
  PIN(sageattn_compare_result, rel_l1, 40);
  PIN(sageattn_compare_result, rmse, 48);
  PIN(sageattn_compare_result, rel_error, 56);
  PIN(sageattn_compare_result, max_abs_error, 64);
  PIN(sageattn_compare_result, worst_cos_sim, 72);
  PIN(sageattn_compare_result, worst_rel_l1, 80);
  PIN(sageattn_compare_result, worst_rmse, 88);
  PIN(sageattn_compare_result, worst_rel_error, 96);
}

TEST_CASE("values of constants") {
  const struct {
    int32_t value, pinned;
  } constants[] = {
      {SAGEATTN_OK, 0},
      {SAGEATTN_E_INVALID_ARGUMENT, 100},
      {SAGEATTN_E_UNKNOWN_FIELD, 101},
      {SAGEATTN_E_MISALIGNED, 102},
      {SAGEATTN_E_ALIASED, 103},
      {SAGEATTN_E_LIMIT, 104},
      {SAGEATTN_E_WORKSPACE, 105},
      {SAGEATTN_E_BUFFER_TOO_SMALL, 106},
      {SAGEATTN_E_UNSUPPORTED, 200},
      {SAGEATTN_E_NO_DEVICE, 201},
      {SAGEATTN_E_DRIVER_TOO_OLD, 202},
      {SAGEATTN_E_NVRTC_NOT_FOUND, 203},
      {SAGEATTN_E_NVRTC_TOO_OLD, 204},
      {SAGEATTN_E_KERNEL_MISSING, 205},
      {SAGEATTN_E_BAD_BLOB, 206},
      {SAGEATTN_E_OUT_OF_MEMORY, 300},
      {SAGEATTN_E_CUDA, 400},
      {SAGEATTN_E_COMPILE, 401},
      {SAGEATTN_E_SELFTEST, 402},
      {SAGEATTN_E_INTERNAL, 500},
      {SAGEATTN_CONTEXT_NO_JIT, 1},
      {SAGEATTN_CONTEXT_NO_DISK_CACHE, 2},
      {SAGEATTN_CONTEXT_CACHE_READ_ONLY, 4},
      {SAGEATTN_BACKEND_AUTO, 0},
      {SAGEATTN_BACKEND_CUDA, 1},
      {SAGEATTN_BACKEND_CPU, 2},
      {SAGEATTN_LOG_INFO, 1},
      {SAGEATTN_LOG_WARNING, 2},
      {SAGEATTN_PRESET_AUTO, 0},
      {SAGEATTN_PRESET_SAGE1, 1},
      {SAGEATTN_PRESET_SAGE2_8B, 2},
      {SAGEATTN_PRESET_SAGE2_4B, 3},
      {SAGEATTN_PRESET_SAGE2PP, 4},
      {SAGEATTN_PRESET_EXACT, 5},
      {SAGEATTN_F16, 1},
      {SAGEATTN_BF16, 2},
      {SAGEATTN_F32, 3},
      {SAGEATTN_LAYOUT_NHD, 0},
      {SAGEATTN_LAYOUT_HND, 1},
      {SAGEATTN_BATCH_DENSE, 0},
      {SAGEATTN_BATCH_VARLEN, 1},
      {SAGEATTN_MASK_NONE, 0},
      {SAGEATTN_MASK_CAUSAL_BOTTOM_RIGHT, 1},
      {SAGEATTN_MASK_CAUSAL_TOP_LEFT, 2},
      {SAGEATTN_MASK_WINDOW, 3},
      {SAGEATTN_QK_AUTO, 0},
      {SAGEATTN_QK_I8, 1},
      {SAGEATTN_QK_I4, 2},
      {SAGEATTN_QK_NONE, 3},
      {SAGEATTN_QK_E4M3, 4},
      {SAGEATTN_GRANULARITY_AUTO, 0},
      {SAGEATTN_GRANULARITY_PER_THREAD, 1},
      {SAGEATTN_GRANULARITY_PER_WARP, 2},
      {SAGEATTN_GRANULARITY_PER_BLOCK, 3},
      {SAGEATTN_GRANULARITY_PER_TOKEN, 4},
      {SAGEATTN_GRANULARITY_PER_TENSOR, 5},
      {SAGEATTN_SMOOTH_AUTO, 0},
      {SAGEATTN_SMOOTH_ON, 1},
      {SAGEATTN_SMOOTH_OFF, 2},
      {SAGEATTN_SMOOTH_V_AUTO, 0},
      {SAGEATTN_SMOOTH_V_OFF, 1},
      {SAGEATTN_SMOOTH_V_SEQUENCE, 2},
      {SAGEATTN_SMOOTH_V_GROUP, 3},
      {SAGEATTN_V_SCALE_AUTO, 0},
      {SAGEATTN_V_SCALE_CHANNEL, 1},
      {SAGEATTN_V_SCALE_GROUP, 2},
      {SAGEATTN_ROTATION_NONE, 0},
      {SAGEATTN_ROTATION_HADAMARD, 1},
      {SAGEATTN_ROTATION_SMOOTHATTN, 2},
      {SAGEATTN_PV_AUTO, 0},
      {SAGEATTN_PV_E4M3, 1},
      {SAGEATTN_PV_F16, 2},
      {SAGEATTN_PV_NONE, 3},
      {SAGEATTN_PV_E5M2, 4},
      {SAGEATTN_PV_I8, 5},
      {SAGEATTN_ROW_SUM_AUTO, 0},
      {SAGEATTN_ROW_SUM_P, 1},
      {SAGEATTN_ROW_SUM_ROUNDED_P, 2},
      {SAGEATTN_PV_ACCUM_AUTO, 0},
      {SAGEATTN_PV_ACCUM_TWO_LEVEL, 1},
      {SAGEATTN_PV_ACCUM_F16, 2},
      {SAGEATTN_PV_ACCUM_F32, 3},
      {SAGEATTN_PV_ACCUM_SINGLE_LEVEL, 4},
      {SAGEATTN_KERNEL_AUTO, 0},
      {SAGEATTN_KERNEL_MMA_SYNC, 1},
      {SAGEATTN_KERNEL_WGMMA, 2},
      {SAGEATTN_PV_MODEL_AUTO, 0},
      {SAGEATTN_PV_MODEL_QMMA13, 1},
      {SAGEATTN_PV_MODEL_HMMA, 2},
      {SAGEATTN_ORIGIN_BUILTIN, 0},
      {SAGEATTN_ORIGIN_MEMORY, 1},
      {SAGEATTN_ORIGIN_BLOB, 2},
      {SAGEATTN_ORIGIN_DISK, 3},
      {SAGEATTN_ORIGIN_COMPILED, 4},
      {SAGEATTN_SEQUENCE_OK, 0},
      {SAGEATTN_SEQUENCE_BAD_LENGTHS, 1},
  };
  for (const auto& [value, pinned] : constants) CHECK(value == pinned);
}

TEST_CASE("names of statuses") {
#define NAMED(status) CHECK(std::string(sageattn_status_name(status)) == #status)
  NAMED(SAGEATTN_OK);
  NAMED(SAGEATTN_E_INVALID_ARGUMENT);
  NAMED(SAGEATTN_E_UNKNOWN_FIELD);
  NAMED(SAGEATTN_E_MISALIGNED);
  NAMED(SAGEATTN_E_ALIASED);
  NAMED(SAGEATTN_E_LIMIT);
  NAMED(SAGEATTN_E_WORKSPACE);
  NAMED(SAGEATTN_E_BUFFER_TOO_SMALL);
  NAMED(SAGEATTN_E_UNSUPPORTED);
  NAMED(SAGEATTN_E_NO_DEVICE);
  NAMED(SAGEATTN_E_DRIVER_TOO_OLD);
  NAMED(SAGEATTN_E_NVRTC_NOT_FOUND);
  NAMED(SAGEATTN_E_NVRTC_TOO_OLD);
  NAMED(SAGEATTN_E_KERNEL_MISSING);
  NAMED(SAGEATTN_E_BAD_BLOB);
  NAMED(SAGEATTN_E_OUT_OF_MEMORY);
  NAMED(SAGEATTN_E_CUDA);
  NAMED(SAGEATTN_E_COMPILE);
  NAMED(SAGEATTN_E_SELFTEST);
  NAMED(SAGEATTN_E_INTERNAL);
#undef NAMED
  for (const int32_t status : {-1, 1, 99, 107, 199, 501, INT32_MAX, INT32_MIN}) {
    CHECK(std::string(sageattn_status_name(status)) == "unknown status");
  }
}

// ---- struct_size --------------------------------------------------------------------------------

// As a newer header would have it: `extra` holds fields that this library does not know.
template <class T>
struct Longer {
  T known{};
  char extra[16]{};

  Longer() { known.struct_size = sizeof *this; }
};

sageattn_error new_error() {
  sageattn_error err{};
  err.struct_size = sizeof err;
  return err;
}

sageattn_context* new_context() {
  sageattn_context_desc desc{};
  desc.struct_size = sizeof desc;
  desc.backend = SAGEATTN_BACKEND_CPU;
  desc.num_threads = 1;
  sageattn_context* ctx = nullptr;
  REQUIRE(sageattn_context_create(&desc, &ctx, nullptr) == SAGEATTN_OK);
  return ctx;
}

void fill(sageattn_attn_desc& desc) {
  desc.q_dtype = SAGEATTN_F16;
  desc.head_dim = 8;
  desc.num_qo_heads = 1;
  desc.max_qo_len = 4;
  desc.max_kv_len = 4;
}

// Calls a function with an input struct of every way to be longer, and of no size at all.
template <class T, class Fill, class Call>
void check_input_struct(const char* parameter, const Fill& fill_known, const Call& call) {
  Longer<T> longer;
  fill_known(longer.known);
  CHECK(call(&longer.known, nullptr) == SAGEATTN_OK);

  for (size_t i = 0; i < sizeof longer.extra; ++i) {
    std::memset(longer.extra, 0, sizeof longer.extra);
    longer.extra[i] = 1;
    sageattn_error err = new_error();
    CHECK(call(&longer.known, &err) == SAGEATTN_E_UNKNOWN_FIELD);
    CHECK(err.status == SAGEATTN_E_UNKNOWN_FIELD);
    INFO(err.message);
    CHECK(std::string(err.message).find(parameter) != std::string::npos);
    CHECK(std::string(err.message).find(std::to_string(sizeof(T) + i)) != std::string::npos);
  }

  for (const uint32_t size : {0u, 3u, 65537u, UINT32_MAX}) {
    longer.known.struct_size = size;
    sageattn_error err = new_error();
    CHECK(call(&longer.known, &err) == SAGEATTN_E_INVALID_ARGUMENT);
    INFO(err.message);
    CHECK(std::string(err.message).find("struct_size = " + std::to_string(size)) !=
          std::string::npos);
  }
}

TEST_CASE("context_desc: longer and shorter") {
  const auto call = [](const sageattn_context_desc* desc, sageattn_error* err) {
    sageattn_context* ctx = nullptr;
    const int32_t status = sageattn_context_create(desc, &ctx, err);
    CHECK((ctx != nullptr) == (status == SAGEATTN_OK));
    sageattn_context_destroy(ctx);
    return status;
  };
  check_input_struct<sageattn_context_desc>(
      "desc", [](sageattn_context_desc&) {}, call);

  // What lies behind a short struct is not read.
  sageattn_context_desc desc;
  std::memset(static_cast<void*>(&desc), 0xff, sizeof desc);
  desc.struct_size = 4;
  CHECK(call(&desc, nullptr) == SAGEATTN_OK);
  desc.struct_size = offsetof(sageattn_context_desc, device);
  desc.flags = 0;
  desc.backend = SAGEATTN_BACKEND_CPU;
  CHECK(call(&desc, nullptr) == SAGEATTN_OK);
  desc.struct_size = offsetof(sageattn_context_desc, target_arch);
  CHECK(call(&desc, nullptr) == SAGEATTN_E_INVALID_ARGUMENT);  // device is -1
}

TEST_CASE("attn_desc: longer and shorter") {
  sageattn_context* ctx = new_context();
  const auto call = [ctx](const sageattn_attn_desc* desc, sageattn_error* err) {
    sageattn_plan* plan = nullptr;
    const int32_t status = sageattn_plan_create(ctx, desc, &plan, err);
    CHECK((plan != nullptr) == (status == SAGEATTN_OK));
    sageattn_plan_destroy(plan);
    CHECK(sageattn_plan_query(ctx, desc, nullptr, err) == status);
    return status;
  };
  check_input_struct<sageattn_attn_desc>("desc", fill, call);

  sageattn_attn_desc desc;
  std::memset(static_cast<void*>(&desc), 0, sizeof desc);
  fill(desc);
  std::memset(&desc.max_total_qo, 0xff, sizeof desc - offsetof(sageattn_attn_desc, max_total_qo));
  desc.struct_size = offsetof(sageattn_attn_desc, max_total_qo);
  CHECK(call(&desc, nullptr) == SAGEATTN_OK);
  desc.struct_size = sizeof desc;
  CHECK(call(&desc, nullptr) != SAGEATTN_OK);
  sageattn_context_destroy(ctx);
}

TEST_CASE("execute_args: longer and shorter") {
  sageattn_context* ctx = new_context();
  sageattn_attn_desc desc{};
  desc.struct_size = sizeof desc;
  fill(desc);
  sageattn_plan* plan = nullptr;
  REQUIRE(sageattn_plan_create(ctx, &desc, &plan, nullptr) == SAGEATTN_OK);
  sageattn_plan_info info{};
  info.struct_size = sizeof info;
  REQUIRE(sageattn_plan_get_info(plan, &info, nullptr) == SAGEATTN_OK);
  std::vector<char> buffer(static_cast<size_t>(info.min_workspace + info.workspace_alignment));
  const auto alignment = static_cast<uintptr_t>(info.workspace_alignment);
  const uintptr_t address = reinterpret_cast<uintptr_t>(buffer.data());
  char* workspace = buffer.data() + (alignment - address % alignment) % alignment;

  const auto call = [&](const sageattn_execute_args* args, sageattn_error* err) {
    return sageattn_execute(plan, args, workspace, static_cast<size_t>(info.min_workspace), nullptr,
                            err);
  };
  check_input_struct<sageattn_execute_args>(
      "args", [](sageattn_execute_args&) {}, call);

  sageattn_execute_args args;
  std::memset(static_cast<void*>(&args), 0xff, sizeof args);
  args.struct_size = 4;  // batch 0: nothing to do
  CHECK(call(&args, nullptr) == SAGEATTN_OK);
  args.struct_size = 8;
  CHECK(call(&args, nullptr) == SAGEATTN_E_INVALID_ARGUMENT);  // batch is -1
  sageattn_plan_destroy(plan);
  sageattn_context_destroy(ctx);
}

TEST_CASE("compare_args and compare_result: longer and shorter") {
  sageattn_compare_result result{};
  result.struct_size = sizeof result;
  const auto call = [&](const sageattn_compare_args* args, sageattn_error* err) {
    return sageattn_compare(args, &result, err);
  };
  const auto fill_args = [](sageattn_compare_args& args) {
    args.out_dtype = args.ref_dtype = SAGEATTN_F32;
  };
  check_input_struct<sageattn_compare_args>("args", fill_args, call);

  sageattn_compare_args args{};
  args.struct_size = offsetof(sageattn_compare_args, layout);
  fill_args(args);
  args.batch = -1;  // not read
  std::memset(static_cast<void*>(&result), 0x5a, sizeof result);
  result.struct_size = offsetof(sageattn_compare_result, count);
  CHECK(call(&args, nullptr) == SAGEATTN_OK);
  CHECK(result.struct_size == offsetof(sageattn_compare_result, count));
  CHECK(result.worst_head == -1);
  CHECK(result.count == 0x5a5a5a5a5a5a5a5a);  // beyond the caller's size
}

TEST_CASE("plan_info is written as far as both sides know it") {
  sageattn_context* ctx = new_context();
  sageattn_attn_desc desc{};
  desc.struct_size = sizeof desc;
  fill(desc);
  sageattn_plan* plan = nullptr;
  REQUIRE(sageattn_plan_create(ctx, &desc, &plan, nullptr) == SAGEATTN_OK);

  for (const bool query : {false, true}) {
    const auto call = [&](sageattn_plan_info* info, sageattn_error* err) {
      return query ? sageattn_plan_query(ctx, &desc, info, err)
                   : sageattn_plan_get_info(plan, info, err);
    };
    sageattn_plan_info info;
    std::memset(static_cast<void*>(&info), 0x5a, sizeof info);
    info.struct_size = offsetof(sageattn_plan_info, origin);
    CHECK(call(&info, nullptr) == SAGEATTN_OK);
    CHECK(info.struct_size == offsetof(sageattn_plan_info, origin));
    CHECK(info.backend == SAGEATTN_BACKEND_CPU);
    CHECK(info.arch == 90);
    CHECK(info.origin == 0x5a5a5a5a);

    Longer<sageattn_plan_info> longer;
    std::memset(longer.extra, 0x5a, sizeof longer.extra);
    CHECK(call(&longer.known, nullptr) == SAGEATTN_OK);
    CHECK(longer.known.struct_size == sizeof longer);
    CHECK(longer.known.b_k > 0);
    for (const char byte : longer.extra) CHECK(byte == 0x5a);

    sageattn_error err = new_error();
    info.struct_size = 0;
    CHECK(call(&info, &err) == SAGEATTN_E_INVALID_ARGUMENT);
    CHECK(std::string(err.message).find("info->struct_size = 0") != std::string::npos);
  }
  sageattn_plan_destroy(plan);
  sageattn_context_destroy(ctx);
}

TEST_CASE("error struct of any size") {
  sageattn_context* ctx = nullptr;
  sageattn_context_desc desc{};  // struct_size 0 is an error
  const std::string full = [&] {
    sageattn_error err = new_error();
    CHECK(sageattn_context_create(&desc, &ctx, &err) == SAGEATTN_E_INVALID_ARGUMENT);
    return std::string(err.message);
  }();
  REQUIRE(full.size() > 40);

  for (uint32_t size = 0; size <= 40; ++size) {
    alignas(8) char bytes[48];
    std::memset(bytes, 0x5a, sizeof bytes);
    std::memcpy(bytes, &size, sizeof size);
    char before[48];
    std::memcpy(before, bytes, sizeof before);
    CHECK(sageattn_context_create(&desc, &ctx, reinterpret_cast<sageattn_error*>(bytes)) ==
          SAGEATTN_E_INVALID_ARGUMENT);
    CHECK(std::memcmp(bytes + size, before + size, sizeof bytes - size) == 0);
    if (size < 8) {  // ignored: no room for the status
      CHECK(std::memcmp(bytes, before, sizeof bytes) == 0);
      continue;
    }
    int32_t status;
    std::memcpy(&status, bytes + 4, sizeof status);
    CHECK(status == SAGEATTN_E_INVALID_ARGUMENT);
    if (size > 8) CHECK(std::string(bytes + 8) == full.substr(0, size - 9));
  }

  // A success clears it; a longer struct is written as far as it is known.
  Longer<sageattn_error> longer;
  std::memset(longer.extra, 0x5a, sizeof longer.extra);
  longer.known.status = 7;
  longer.known.message[0] = 'x';
  CHECK(sageattn_context_create(nullptr, &ctx, &longer.known) == SAGEATTN_OK);
  CHECK(longer.known.status == SAGEATTN_OK);
  CHECK(longer.known.message[0] == 0);
  for (const char byte : longer.extra) CHECK(byte == 0x5a);
  sageattn_context_destroy(ctx);
}

TEST_CASE("attn_desc_init writes exactly its size") {
  for (int32_t preset = SAGEATTN_PRESET_AUTO; preset <= SAGEATTN_PRESET_EXACT; ++preset) {
    for (uint32_t size = 0; size <= 200; ++size) {
      alignas(8) unsigned char bytes[208];
      std::memset(bytes, 0x5a, sizeof bytes);
      const int32_t status = sageattn_attn_desc_init(reinterpret_cast<sageattn_attn_desc*>(bytes),
                                                     size, preset, nullptr);
      if (size >= sizeof(sageattn_attn_desc)) CHECK(status == SAGEATTN_OK);
      if (size < 4) CHECK(status == SAGEATTN_E_INVALID_ARGUMENT);
      if (size == 4) CHECK((status == SAGEATTN_OK) == (preset == SAGEATTN_PRESET_AUTO));
      for (size_t i = status == SAGEATTN_OK ? size : 0; i < sizeof bytes; ++i) {
        REQUIRE(bytes[i] == 0x5a);
      }
      if (status != SAGEATTN_OK) continue;
      uint32_t written;
      std::memcpy(&written, bytes, sizeof written);
      CHECK(written == size);
      for (size_t i = sizeof(sageattn_attn_desc); i < size; ++i) REQUIRE(bytes[i] == 0);
    }
  }
}

TEST_CASE("version") {
  CHECK(sageattn_version() == SAGEATTN_VERSION_NUMBER);
  CHECK(std::string(sageattn_version_string()) == std::to_string(SAGEATTN_VERSION_MAJOR) + "." +
                                                      std::to_string(SAGEATTN_VERSION_MINOR) + "." +
                                                      std::to_string(SAGEATTN_VERSION_PATCH));
  const std::string id = sageattn_source_id();
  CHECK(id.size() == 64);
  CHECK(id.find_first_not_of("0123456789abcdef") == std::string::npos);
}

}  // namespace
