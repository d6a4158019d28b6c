// Every way a call can be wrong: the status, a message that names the function and the field, and
// outputs that nobody touched. And what looks wrong but is legal.
#include <cfloat>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "sageattn.h"
#include "src/core/region.h"
#include "tests/catch.h"

namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

template <class T>
T sized() {
  T value{};
  value.struct_size = sizeof value;
  return value;
}

struct Release {
  void operator()(sageattn_context* ctx) const { sageattn_context_destroy(ctx); }
  void operator()(sageattn_plan* plan) const { sageattn_plan_destroy(plan); }
};
using ContextPtr = std::unique_ptr<sageattn_context, Release>;
using PlanPtr = std::unique_ptr<sageattn_plan, Release>;

ContextPtr make_context(int32_t arch = 90) {
  sageattn_context_desc desc = sized<sageattn_context_desc>();
  desc.backend = SAGEATTN_BACKEND_CPU;
  desc.target_arch = arch;
  desc.num_threads = 1;
  sageattn_context* ctx = nullptr;
  REQUIRE(sageattn_context_create(&desc, &ctx, nullptr) == SAGEATTN_OK);
  return ContextPtr(ctx);
}

// The error is `status`, and its message starts with the function and contains each of `words`.
void check_error(const sageattn_error& err, int32_t status, const char* function,
                 const std::vector<std::string>& words) {
  const std::string message = err.message;
  INFO(message);
  CHECK(std::string(sageattn_status_name(err.status)) == sageattn_status_name(status));
  CHECK(message.rfind(std::string(function) + ": ", 0) == 0);
  for (const std::string& word : words) {
    INFO(word);
    CHECK(message.find(word) != std::string::npos);
  }
}

// ---- Contexts ----------------------------------------------------------------------------------

TEST_CASE("context_create") {
  struct Row {
    int32_t status;
    std::vector<std::string> words;
    std::function<void(sageattn_context_desc&)> change;
  };
  const auto alloc = [](void*, size_t, size_t) -> void* { return nullptr; };
  const auto release = [](void*, void*) {};
  const int32_t invalid = SAGEATTN_E_INVALID_ARGUMENT;
  const Row rows[] = {
      {invalid, {"flags = 8"}, [](auto& d) { d.flags = 8; }},
      {invalid, {"flags = 2147483649"}, [](auto& d) { d.flags = 0x80000001u; }},
      {invalid, {"backend = 3"}, [](auto& d) { d.backend = 3; }},
      {invalid, {"backend = -1"}, [](auto& d) { d.backend = -1; }},
      // No driver, or no such ordinal: what is missing depends on the machine.
      {SAGEATTN_E_NO_DEVICE,
       {"sageattn_context_create: "},
       [](auto& d) { d.backend = SAGEATTN_BACKEND_CUDA, d.device = 1 << 20; }},
      {invalid, {"device = -1"}, [](auto& d) { d.device = -1; }},
      {invalid, {"device = 1"}, [](auto& d) { d.device = 1, d.backend = SAGEATTN_BACKEND_CPU; }},
      {invalid, {"target_arch = 75", "80, 86"}, [](auto& d) { d.target_arch = 75; }},
      {invalid, {"target_arch = -90"}, [](auto& d) { d.target_arch = -90; }},
      {invalid, {"num_threads = -1", "1024"}, [](auto& d) { d.num_threads = -1; }},
      {invalid, {"num_threads = 1025", "1024"}, [](auto& d) { d.num_threads = 1025; }},
      {invalid,
       {"num_threads = 7", "SAGEATTN_BACKEND_CUDA"},
       [](auto& d) { d.num_threads = 7, d.backend = SAGEATTN_BACKEND_CUDA; }},
      {invalid, {"free = NULL"}, [&](auto& d) { d.alloc = alloc; }},
      {invalid, {"alloc = NULL"}, [&](auto& d) { d.free = release; }},
      {SAGEATTN_E_OUT_OF_MEMORY, {"memory"}, [&](auto& d) { d.alloc = alloc, d.free = release; }},
  };
  for (const Row& row : rows) {
    sageattn_context_desc desc = sized<sageattn_context_desc>();
    row.change(desc);
    auto* ctx = reinterpret_cast<sageattn_context*>(&desc);
    sageattn_error err = sized<sageattn_error>();
    CHECK(sageattn_context_create(&desc, &ctx, &err) == row.status);
    check_error(err, row.status, "sageattn_context_create", row.words);
    CHECK(ctx == nullptr);
    CHECK(sageattn_context_create(&desc, &ctx, nullptr) == row.status);
  }
  sageattn_error err = sized<sageattn_error>();
  CHECK(sageattn_context_create(nullptr, nullptr, &err) == SAGEATTN_E_INVALID_ARGUMENT);
  check_error(err, SAGEATTN_E_INVALID_ARGUMENT, "sageattn_context_create", {"ctx = NULL"});
}

TEST_CASE("a message that is too long is cut between characters") {
  // No message of today is; so cut an ordinary one by a small struct, at every length.
  for (uint32_t size = 9; size < 60; ++size) {
    sageattn_error err = sized<sageattn_error>();
    err.struct_size = size;
    CHECK(sageattn_context_create(nullptr, nullptr, &err) == SAGEATTN_E_INVALID_ARGUMENT);
    CHECK(std::strlen(err.message) ==
          std::min<size_t>(size - 9, std::strlen("sageattn_context_create: ctx = NULL: must not be "
                                                 "NULL")));
  }
}

TEST_CASE("context_report and blobs") {
  const ContextPtr ctx = make_context();
  const char* function = "sageattn_context_report";
  sageattn_error err = sized<sageattn_error>();
  size_t needed = 0;
  CHECK(sageattn_context_report(nullptr, nullptr, 0, &needed, &err) == SAGEATTN_E_INVALID_ARGUMENT);
  check_error(err, SAGEATTN_E_INVALID_ARGUMENT, function, {"ctx = NULL"});
  CHECK(needed == 0);
  CHECK(sageattn_context_report(ctx.get(), nullptr, 5, &needed, &err) ==
        SAGEATTN_E_INVALID_ARGUMENT);
  check_error(err, SAGEATTN_E_INVALID_ARGUMENT, function, {"text = NULL", "capacity is 5"});
  CHECK(sageattn_context_report(ctx.get(), nullptr, 0, &needed, &err) ==
        SAGEATTN_E_BUFFER_TOO_SMALL);
  check_error(err, SAGEATTN_E_BUFFER_TOO_SMALL, function, {"capacity = 0", std::to_string(needed)});
  REQUIRE(needed > 1);
  std::vector<char> text(needed + 1, 'x');
  CHECK(sageattn_context_report(ctx.get(), text.data(), needed - 1, nullptr, &err) ==
        SAGEATTN_E_BUFFER_TOO_SMALL);
  for (const char c : text) CHECK(c == 'x');
  CHECK(sageattn_context_report(ctx.get(), text.data(), needed, nullptr, &err) == SAGEATTN_OK);
  CHECK(std::strlen(text.data()) == needed - 1);
  CHECK(text[needed] == 'x');
  CHECK(std::string(text.data()).find("backend: CPU") != std::string::npos);

  function = "sageattn_context_import_blob";
  CHECK(sageattn_context_import_blob(nullptr, "x", 1, &err) == SAGEATTN_E_INVALID_ARGUMENT);
  check_error(err, SAGEATTN_E_INVALID_ARGUMENT, function, {"ctx = NULL"});
  CHECK(sageattn_context_import_blob(ctx.get(), nullptr, 1, &err) == SAGEATTN_E_INVALID_ARGUMENT);
  check_error(err, SAGEATTN_E_INVALID_ARGUMENT, function, {"data = NULL"});
  CHECK(sageattn_context_import_blob(ctx.get(), "x", 1, &err) == SAGEATTN_E_UNSUPPORTED);
  check_error(err, SAGEATTN_E_UNSUPPORTED, function, {"data", "CPU backend"});

  CHECK(sageattn_selftest(nullptr, &err) == SAGEATTN_E_INVALID_ARGUMENT);
  check_error(err, SAGEATTN_E_INVALID_ARGUMENT, "sageattn_selftest", {"ctx = NULL"});
}

// ---- Descs and plans ---------------------------------------------------------------------------

TEST_CASE("attn_desc_init") {
  sageattn_attn_desc desc{};
  sageattn_error err = sized<sageattn_error>();
  const char* function = "sageattn_attn_desc_init";
  const int32_t invalid = SAGEATTN_E_INVALID_ARGUMENT;
  CHECK(sageattn_attn_desc_init(nullptr, sizeof desc, 0, &err) == invalid);
  check_error(err, invalid, function, {"desc = NULL"});
  for (const uint32_t size : {0u, 3u, 65537u}) {
    CHECK(sageattn_attn_desc_init(&desc, size, 0, &err) == invalid);
    check_error(err, invalid, function, {"size = " + std::to_string(size)});
  }
  for (const int32_t preset : {-1, 6, INT32_MAX, INT32_MIN}) {
    CHECK(sageattn_attn_desc_init(&desc, sizeof desc, preset, &err) == invalid);
    check_error(err, invalid, function, {"preset = " + std::to_string(preset)});
  }
  const uint32_t size = offsetof(sageattn_attn_desc, pv_format);
  CHECK(sageattn_attn_desc_init(&desc, size, SAGEATTN_PRESET_SAGE1, &err) == invalid);
  check_error(err, invalid, function, {"size = " + std::to_string(size), "preset 1"});
}

sageattn_attn_desc make_desc() {
  sageattn_attn_desc desc = sized<sageattn_attn_desc>();
  desc.q_dtype = SAGEATTN_F16;
  desc.head_dim = 64;
  desc.num_qo_heads = 4;
  desc.max_qo_len = 16;
  desc.max_kv_len = 16;
  return desc;
}

using Change = std::function<void(sageattn_attn_desc&)>;

void check_refused(sageattn_context* ctx, const sageattn_attn_desc& desc, int32_t status,
                   const std::vector<std::string>& words) {
  sageattn_plan* plan = reinterpret_cast<sageattn_plan*>(ctx);
  sageattn_error err = sized<sageattn_error>();
  CHECK(sageattn_plan_create(ctx, &desc, &plan, &err) == status);
  check_error(err, status, "sageattn_plan_create", words);
  CHECK(plan == nullptr);

  sageattn_plan_info info;
  std::memset(static_cast<void*>(&info), 0x5a, sizeof info);
  info.struct_size = sizeof info;
  err = sized<sageattn_error>();
  CHECK(sageattn_plan_query(ctx, &desc, &info, &err) == status);
  check_error(err, status, "sageattn_plan_query", words);
  CHECK(info.backend == 0x5a5a5a5a);
}

TEST_CASE("plan_create: fields out of range") {
  struct Row {
    const char* field;
    int32_t sageattn_attn_desc::*member;
    int32_t min, max;
  };
#define ROW(field, min, max) \
  { #field, &sageattn_attn_desc::field, min, max }
  const Row rows[] = {
      ROW(q_dtype, 1, 3),
      ROW(kv_dtype, 0, 3),
      ROW(out_dtype, 0, 3),
      ROW(layout, 0, 1),
      ROW(batch_mode, 0, 1),
      ROW(mask, 0, 3),
      ROW(head_dim, 1, 256),
      ROW(head_dim_v, 0, 256),
      ROW(num_qo_heads, 1, 65536),
      ROW(num_kv_heads, 0, 65536),
      ROW(sm_scale_set, 0, 1),
      ROW(max_batch, 0, 1 << 24),
      ROW(max_qo_len, 1, 1 << 30),
      ROW(max_kv_len, 1, 1 << 30),
      ROW(qk_format, 0, 4),
      ROW(qk_granularity, 0, 5),
      ROW(smooth_q, 0, 2),
      ROW(smooth_k, 0, 2),
      ROW(smooth_v, 0, 3),
      ROW(v_scale, 0, 2),
      ROW(rotation, 0, 2),
      ROW(pv_format, 0, 5),
      ROW(row_sum, 0, 2),
      ROW(pv_accum, 0, 4),
      ROW(promotion_interval, 0, INT32_MAX),
      ROW(kernel, 0, 2),
      ROW(pv_model, 0, 2),
  };
#undef ROW
  const ContextPtr ctx = make_context();
  for (const Row& row : rows) {
    for (const int64_t value :
         {int64_t{row.min} - 1, int64_t{row.max} + 1, int64_t{INT32_MIN}, int64_t{INT32_MAX}}) {
      if (value > INT32_MAX || (value >= row.min && value <= row.max)) continue;
      sageattn_attn_desc desc = make_desc();
      desc.*row.member = static_cast<int32_t>(value);
      check_refused(ctx.get(), desc, SAGEATTN_E_INVALID_ARGUMENT,
                    {std::string(row.field) + " = " + std::to_string(value),
                     std::to_string(row.min) + ".." + std::to_string(row.max)});
    }
  }
}

TEST_CASE("plan_create: what does not go together") {
  struct Row {
    int32_t status;
    std::vector<std::string> words;
    Change change;
    int32_t arch = 90;
  };
  const int32_t invalid = SAGEATTN_E_INVALID_ARGUMENT;
  const int32_t unsupported = SAGEATTN_E_UNSUPPORTED;
  const Row rows[] = {
      // Reserved.
      {unsupported, {"bias"}, [](auto& d) { d.bias = 1; }},
      {unsupported, {"num_sinks"}, [](auto& d) { d.num_sinks = -1; }},
      {unsupported, {"kv_storage"}, [](auto& d) { d.kv_storage = 2; }},
      {unsupported, {"softcap"}, [](auto& d) { d.softcap = 30.0f; }},
      {unsupported, {"softcap"}, [](auto& d) { d.softcap = kNan; }},
      {unsupported, {"reserved"}, [](auto& d) { d.reserved = 1; }},
      // Mask.
      {invalid, {"window_left = 3", "MASK_WINDOW"}, [](auto& d) { d.window_left = 3; }},
      {invalid, {"window_right = -1", "MASK_WINDOW"}, [](auto& d) { d.window_right = -1; }},
      {invalid,
       {"window_left = -2"},
       [](auto& d) { d.mask = SAGEATTN_MASK_WINDOW, d.window_left = -2; }},
      {invalid,
       {"window_right = -2"},
       [](auto& d) { d.mask = SAGEATTN_MASK_WINDOW, d.window_right = -2; }},
      // Heads and scale.
      {invalid, {"num_kv_heads = 3", "num_qo_heads = 4"}, [](auto& d) { d.num_kv_heads = 3; }},
      {invalid, {"num_kv_heads = 8", "num_qo_heads = 4"}, [](auto& d) { d.num_kv_heads = 8; }},
      {invalid, {"sm_scale = 0.5", "sm_scale_set"}, [](auto& d) { d.sm_scale = 0.5f; }},
      {invalid,
       {"sm_scale = 2.1e+38", "2e38"},
       [](auto& d) { d.sm_scale_set = 1, d.sm_scale = 2.1e38f; }},
      {invalid, {"sm_scale = nan", "sm_scale_set"}, [](auto& d) { d.sm_scale = kNan; }},
      {invalid,
       {"sm_scale = inf", "finite"},
       [](auto& d) { d.sm_scale_set = 1, d.sm_scale = kInfinity; }},
      {invalid,
       {"sm_scale = -inf", "finite"},
       [](auto& d) { d.sm_scale_set = 1, d.sm_scale = -kInfinity; }},
      {invalid,
       {"sm_scale = ", "nan", "finite"},
       [](auto& d) { d.sm_scale_set = 1, d.sm_scale = kNan; }},
      // Limits.
      {invalid, {"max_total_qo = 5", "DENSE"}, [](auto& d) { d.max_total_qo = 5; }},
      {invalid, {"max_total_kv = 5", "DENSE"}, [](auto& d) { d.max_total_kv = 5; }},
      {invalid,
       {"max_total_qo = -1"},
       [](auto& d) { d.batch_mode = SAGEATTN_BATCH_VARLEN, d.max_total_qo = -1; }},
      {invalid,
       {"max_total_kv = 18014398509481985"},
       [](auto& d) {
         d.batch_mode = SAGEATTN_BATCH_VARLEN, d.max_total_kv = (int64_t{1} << 54) + 1;
       }},
      {invalid,
       {"max_batch", "max_kv_len", "max_total_kv", "num_kv_heads", "workspace"},
       [](auto& d) {
         d.max_batch = 1 << 24, d.max_qo_len = d.max_kv_len = 1 << 30;
         d.num_qo_heads = 65536, d.head_dim = 256;
       }},
      // No quantization.
      {unsupported,
       {"SAGEATTN_QK_NONE", "pv_format", "1"},
       [](auto& d) { d.qk_format = SAGEATTN_QK_NONE, d.pv_format = SAGEATTN_PV_E4M3; }},
      {unsupported,
       {"SAGEATTN_PV_NONE", "qk_format", "1"},
       [](auto& d) { d.qk_format = SAGEATTN_QK_I8, d.pv_format = SAGEATTN_PV_NONE; }},
      {unsupported,
       {"qk_granularity = 1"},
       [](auto& d) { d.qk_format = SAGEATTN_QK_NONE, d.qk_granularity = 1; }},
      {unsupported,
       {"smooth_q = 1"},
       [](auto& d) { d.qk_format = SAGEATTN_QK_NONE, d.smooth_q = SAGEATTN_SMOOTH_ON; }},
      {unsupported,
       {"smooth_k = 1"},
       [](auto& d) { d.pv_format = SAGEATTN_PV_NONE, d.smooth_k = SAGEATTN_SMOOTH_ON; }},
      {unsupported,
       {"smooth_v = 3"},
       [](auto& d) { d.pv_format = SAGEATTN_PV_NONE, d.smooth_v = SAGEATTN_SMOOTH_V_GROUP; }},
      {unsupported, {"v_scale = 1"}, [](auto& d) { d.qk_format = 3, d.v_scale = 1; }},
      {unsupported, {"rotation = 1"}, [](auto& d) { d.qk_format = 3, d.rotation = 1; }},
      {unsupported, {"row_sum = 1"}, [](auto& d) { d.qk_format = 3, d.row_sum = 1; }},
      {unsupported, {"pv_accum = 3"}, [](auto& d) { d.qk_format = 3, d.pv_accum = 3; }},
      {unsupported,
       {"promotion_interval = 64"},
       [](auto& d) { d.qk_format = 3, d.promotion_interval = 64; }},
      {unsupported, {"kernel = 1"}, [](auto& d) { d.qk_format = 3, d.kernel = 1; }},
      {unsupported, {"pv_model = 2"}, [](auto& d) { d.qk_format = 3, d.pv_model = 2; }},
      // Formats and archs.
      {unsupported,
       {"SAGEATTN_PV_E4M3", "sm_80", "SAGEATTN_PV_F16", "89, 90 or 120"},
       [](auto& d) { d.pv_format = SAGEATTN_PV_E4M3; },
       80},
      {unsupported,
       {"SAGEATTN_PV_E4M3", "sm_86"},
       [](auto& d) { d.pv_format = SAGEATTN_PV_E4M3; },
       86},
      {unsupported,
       {"SAGEATTN_PV_E5M2", "sm_86"},
       [](auto& d) { d.pv_format = SAGEATTN_PV_E5M2; },
       86},
      {unsupported,
       {"SAGEATTN_QK_E4M3", "sm_80", "SAGEATTN_QK_I8"},
       [](auto& d) { d.qk_format = SAGEATTN_QK_E4M3; },
       80},
      // Accumulation.
      {unsupported,
       {"SAGEATTN_PV_ACCUM_F16", "pv_format", "4"},
       [](auto& d) { d.pv_accum = SAGEATTN_PV_ACCUM_F16, d.pv_format = SAGEATTN_PV_E5M2; }},
      {unsupported,
       {"SAGEATTN_PV_ACCUM_F16", "pv_format", "5"},
       [](auto& d) { d.pv_accum = SAGEATTN_PV_ACCUM_F16, d.pv_format = SAGEATTN_PV_I8; }},
      {unsupported,
       {"SAGEATTN_PV_ACCUM_SINGLE_LEVEL", "SAGEATTN_PV_ACCUM_F32"},
       [](auto& d) { d.pv_accum = SAGEATTN_PV_ACCUM_SINGLE_LEVEL, d.pv_format = SAGEATTN_PV_F16; }},
      {unsupported,
       {"SINGLE_LEVEL", "smooth_v", "SAGEATTN_SMOOTH_V_SEQUENCE"},
       [](auto& d) {
         d.pv_accum = SAGEATTN_PV_ACCUM_SINGLE_LEVEL, d.smooth_v = SAGEATTN_SMOOTH_V_GROUP;
       }},
      {unsupported,
       {"SINGLE_LEVEL", "v_scale", "SAGEATTN_V_SCALE_CHANNEL"},
       [](auto& d) {
         d.pv_accum = SAGEATTN_PV_ACCUM_SINGLE_LEVEL, d.v_scale = SAGEATTN_V_SCALE_GROUP;
       }},
      // Promotion.
      {invalid,
       {"promotion_interval = 128", "SINGLE_LEVEL"},
       [](auto& d) { d.pv_accum = SAGEATTN_PV_ACCUM_SINGLE_LEVEL, d.promotion_interval = 128; }},
      {invalid,
       {"promotion_interval = 128", "F32"},
       [](auto& d) { d.pv_accum = SAGEATTN_PV_ACCUM_F32, d.promotion_interval = 128; }},
      {invalid,
       {"promotion_interval = 16", "multiple of 32", "b_k = 128"},
       [](auto& d) { d.promotion_interval = 16; }},
      {invalid, {"promotion_interval = 1"}, [](auto& d) { d.promotion_interval = 1; }},
      {invalid,
       {"promotion_interval = 96", "b_k = 128"},
       [](auto& d) { d.promotion_interval = 96; }},
      {invalid,
       {"promotion_interval = 192", "b_k = 128"},
       [](auto& d) { d.promotion_interval = 192; }},
      {invalid,
       {"promotion_interval = 96", "b_k = 64"},
       [](auto& d) { d.promotion_interval = 96; },
       89},
      {invalid,
       {"promotion_interval = 128", "at most 64"},
       [](auto& d) { d.pv_accum = SAGEATTN_PV_ACCUM_F16, d.promotion_interval = 128; }},
      // Kernel.
      {unsupported,
       {"SAGEATTN_KERNEL_WGMMA", "arch 89", "MMA_SYNC"},
       [](auto& d) { d.kernel = SAGEATTN_KERNEL_WGMMA; },
       89},
      {unsupported,
       {"SAGEATTN_KERNEL_WGMMA", "head_dim 129"},
       [](auto& d) { d.kernel = SAGEATTN_KERNEL_WGMMA, d.head_dim = 129; }},
      {unsupported,
       {"SAGEATTN_KERNEL_WGMMA", "head_dim_v 129"},
       [](auto& d) { d.kernel = SAGEATTN_KERNEL_WGMMA, d.head_dim_v = 129; }},
      {unsupported,
       {"SAGEATTN_KERNEL_WGMMA", "pv_format 2"},
       [](auto& d) { d.kernel = SAGEATTN_KERNEL_WGMMA, d.pv_format = SAGEATTN_PV_F16; }},
      {unsupported,
       {"SAGEATTN_KERNEL_WGMMA", "pv_accum 2"},
       [](auto& d) { d.kernel = SAGEATTN_KERNEL_WGMMA, d.pv_accum = SAGEATTN_PV_ACCUM_F16; }},
      // Model.
      {unsupported,
       {"pv_model = 1", "pv_format 2"},
       [](auto& d) { d.pv_model = 1, d.pv_format = SAGEATTN_PV_F16; }},
      {unsupported,
       {"pv_model = 2", "pv_format 5"},
       [](auto& d) { d.pv_model = 2, d.pv_format = SAGEATTN_PV_I8; }},
      {unsupported,
       {"pv_model = 1", "pv_accum 3"},
       [](auto& d) { d.pv_model = 1, d.pv_accum = SAGEATTN_PV_ACCUM_F32; }},
      {unsupported,
       {"pv_model = 1", "pv_accum 2"},
       [](auto& d) { d.pv_model = 1, d.pv_accum = SAGEATTN_PV_ACCUM_F16; }},
  };
  for (const Row& row : rows) {
    const ContextPtr ctx = make_context(row.arch);
    sageattn_attn_desc desc = make_desc();
    row.change(desc);
    check_refused(ctx.get(), desc, row.status, row.words);
  }
}

TEST_CASE("plan_create: pointers") {
  const ContextPtr ctx = make_context();
  const sageattn_attn_desc desc = make_desc();
  const int32_t invalid = SAGEATTN_E_INVALID_ARGUMENT;
  auto* plan = reinterpret_cast<sageattn_plan*>(ctx.get());
  sageattn_error err = sized<sageattn_error>();
  CHECK(sageattn_plan_create(ctx.get(), &desc, nullptr, &err) == invalid);
  check_error(err, invalid, "sageattn_plan_create", {"plan = NULL"});
  CHECK(sageattn_plan_create(nullptr, &desc, &plan, &err) == invalid);
  check_error(err, invalid, "sageattn_plan_create", {"ctx = NULL"});
  CHECK(plan == nullptr);
  plan = reinterpret_cast<sageattn_plan*>(ctx.get());
  CHECK(sageattn_plan_create(ctx.get(), nullptr, &plan, &err) == invalid);
  check_error(err, invalid, "sageattn_plan_create", {"desc = NULL"});
  CHECK(plan == nullptr);

  CHECK(sageattn_plan_query(nullptr, &desc, nullptr, &err) == invalid);
  check_error(err, invalid, "sageattn_plan_query", {"ctx = NULL"});
  CHECK(sageattn_plan_query(ctx.get(), nullptr, nullptr, &err) == invalid);
  check_error(err, invalid, "sageattn_plan_query", {"desc = NULL"});
  CHECK(sageattn_plan_query(ctx.get(), &desc, nullptr, &err) == SAGEATTN_OK);

  REQUIRE(sageattn_plan_create(ctx.get(), &desc, &plan, &err) == SAGEATTN_OK);
  const PlanPtr owner(plan);
  sageattn_plan_info info = sized<sageattn_plan_info>();
  CHECK(sageattn_plan_get_info(nullptr, &info, &err) == invalid);
  check_error(err, invalid, "sageattn_plan_get_info", {"plan = NULL"});
  CHECK(sageattn_plan_get_info(plan, nullptr, &err) == invalid);
  check_error(err, invalid, "sageattn_plan_get_info", {"info = NULL"});
  sageattn_kernel_info kernel = sized<sageattn_kernel_info>();
  CHECK(sageattn_plan_get_kernel(nullptr, 0, &kernel, &err) == invalid);
  check_error(err, invalid, "sageattn_plan_get_kernel", {"plan = NULL"});
  CHECK(sageattn_plan_get_kernel(plan, 0, nullptr, &err) == invalid);
  check_error(err, invalid, "sageattn_plan_get_kernel", {"info = NULL"});
  for (const int32_t index : {-1, 0}) {  // the CPU backend has none
    CHECK(sageattn_plan_get_kernel(plan, index, &kernel, &err) == invalid);
    check_error(err, invalid, "sageattn_plan_get_kernel",
                {"index = " + std::to_string(index), "0 kernels"});
  }
  size_t needed = 7;
  CHECK(sageattn_context_export_blob(nullptr, nullptr, 0, &needed, &err) == invalid);
  check_error(err, invalid, "sageattn_context_export_blob", {"ctx = NULL"});
  CHECK(sageattn_context_export_blob(ctx.get(), nullptr, 1, &needed, &err) == invalid);
  check_error(err, invalid, "sageattn_context_export_blob", {"data = NULL"});
  CHECK(sageattn_context_export_blob(ctx.get(), nullptr, 0, &needed, &err) ==
        SAGEATTN_E_UNSUPPORTED);
  check_error(err, SAGEATTN_E_UNSUPPORTED, "sageattn_context_export_blob", {"CPU backend"});
  CHECK(sageattn_plan_export_blob(nullptr, nullptr, 0, &needed, &err) == invalid);
  check_error(err, invalid, "sageattn_plan_export_blob", {"plan = NULL"});
  CHECK(sageattn_plan_export_blob(plan, nullptr, 1, &needed, &err) == invalid);
  check_error(err, invalid, "sageattn_plan_export_blob", {"data = NULL"});
  CHECK(sageattn_plan_export_blob(plan, nullptr, 0, &needed, &err) == SAGEATTN_E_UNSUPPORTED);
  check_error(err, SAGEATTN_E_UNSUPPORTED, "sageattn_plan_export_blob", {"CPU backend"});
  CHECK(needed == 7);
}

TEST_CASE("plan_create: unusual and legal") {
  const Change changes[] = {
      [](auto& d) { d.head_dim = 1, d.head_dim_v = 256; },
      [](auto& d) { d.num_qo_heads = 65536, d.num_kv_heads = 1; },
      [](auto& d) { d.sm_scale_set = 1, d.sm_scale = -2.0f; },
      [](auto& d) { d.sm_scale_set = 1, d.sm_scale = -2e38f; },
      [](auto& d) { d.sm_scale = -0.0f; },
      [](auto& d) { d.mask = SAGEATTN_MASK_WINDOW, d.window_left = d.window_right = -1; },
      [](auto& d) { d.mask = SAGEATTN_MASK_WINDOW, d.window_left = INT32_MAX; },
      [](auto& d) { d.mask = SAGEATTN_MASK_WINDOW; },
      [](auto& d) { d.batch_mode = SAGEATTN_BATCH_VARLEN, d.max_total_qo = 1; },
      [](auto& d) { d.promotion_interval = 1 << 20; },
      [](auto& d) { d.kernel = SAGEATTN_KERNEL_WGMMA; },
      [](auto& d) { d.kernel = SAGEATTN_KERNEL_WGMMA, d.pv_accum = SAGEATTN_PV_ACCUM_F32; },
      [](auto& d) { d.kernel = SAGEATTN_KERNEL_MMA_SYNC, d.pv_format = SAGEATTN_PV_E4M3; },
      [](auto& d) { d.pv_accum = SAGEATTN_PV_ACCUM_SINGLE_LEVEL, d.pv_model = 2; },
  };
  const ContextPtr ctx = make_context();
  for (const Change& change : changes) {
    sageattn_attn_desc desc = make_desc();
    change(desc);
    sageattn_plan* plan = nullptr;
    sageattn_error err = sized<sageattn_error>();
    const int32_t status = sageattn_plan_create(ctx.get(), &desc, &plan, &err);
    INFO(err.message);
    CHECK(status == SAGEATTN_OK);
    sageattn_plan_destroy(plan);
  }
}

// ---- Execute -----------------------------------------------------------------------------------

constexpr int kBatch = 2, kQo = 3, kKv = 5, kQoHeads = 4, kKvHeads = 2, kDim = 8;
constexpr size_t kPad = 64;  // elements before each tensor, for negative strides and overlaps

// A small problem, inputs 0, with room around each buffer.
class Problem {
 public:
  explicit Problem(int32_t batch_mode) : ctx_(make_context()) {
    sageattn_attn_desc desc = make_desc();
    desc.head_dim = kDim;
    desc.num_qo_heads = kQoHeads;
    desc.num_kv_heads = kKvHeads;
    desc.out_dtype = SAGEATTN_F32;
    desc.batch_mode = batch_mode;
    desc.max_batch = kBatch;
    desc.max_qo_len = 4;
    desc.max_kv_len = 8;
    sageattn_plan* made = nullptr;
    REQUIRE(sageattn_plan_create(ctx_.get(), &desc, &made, nullptr) == SAGEATTN_OK);
    plan_.reset(made);
    sageattn_plan_info info = sized<sageattn_plan_info>();
    REQUIRE(sageattn_plan_get_info(plan_.get(), &info, nullptr) == SAGEATTN_OK);
    workspace_size = static_cast<size_t>(info.min_workspace);
    alignment = static_cast<size_t>(info.workspace_alignment);
    memory_.resize(workspace_size + 2 * alignment);
    void* aligned = memory_.data();
    size_t space = memory_.size();
    workspace = static_cast<char*>(std::align(alignment, workspace_size, aligned, space));

    args = sized<sageattn_execute_args>();
    args.batch = kBatch;
    if (batch_mode == SAGEATTN_BATCH_DENSE) {
      args.qo_len = kQo;
      args.kv_len = kKv;
    } else {
      args.total_qo = kBatch * kQo;
      args.total_kv = kBatch * kKv;
      args.cu_seqlens_q = cu_q;
      args.cu_seqlens_kv = cu_kv;
    }
    args.q.data = q.data() + kPad;
    args.k.data = k.data() + kPad;
    args.v.data = v.data() + kPad;
    args.out.data = out.data() + kPad;
    args.lse.data = lse.data() + kPad;
    args.status = status + 1;
    args.seqused_kv = seqused;
  }

  int32_t execute(sageattn_error* err) {
    return sageattn_execute(plan_.get(), &args, workspace, workspace_size, stream, err);
  }
  sageattn_plan* plan() { return plan_.get(); }

  bool untouched() const {
    for (const float x : out)
      if (x != 77.0f) return false;
    for (const float x : lse)
      if (x != 77.0f) return false;
    for (const int32_t x : status)
      if (x != 77) return false;
    for (const uint16_t x : q)
      if (x != 0) return false;
    for (const uint16_t x : k)
      if (x != 0) return false;
    for (const uint16_t x : v)
      if (x != 0) return false;
    return cu_q[1] == kQo && cu_kv[1] == kKv && seqused[0] == kKv;
  }

  sageattn_execute_args args;
  char* workspace = nullptr;
  size_t workspace_size = 0, alignment = 0;
  CUstream_st* stream = nullptr;

  std::vector<uint16_t> q = std::vector<uint16_t>(kPad * 2 + kBatch * kQo * kQoHeads * kDim);
  std::vector<uint16_t> k = std::vector<uint16_t>(kPad * 2 + kBatch * kKv * kKvHeads * kDim);
  std::vector<uint16_t> v = std::vector<uint16_t>(kPad * 2 + kBatch * kKv * kKvHeads * kDim);
  std::vector<float> out = std::vector<float>(kPad * 2 + kBatch * kQo * kQoHeads * kDim, 77.0f);
  std::vector<float> lse = std::vector<float>(kPad * 2 + kBatch * kQo * kQoHeads, 77.0f);
  int32_t status[4] = {77, 77, 77, 77};
  int32_t cu_q[3] = {0, kQo, 2 * kQo}, cu_kv[3] = {0, kKv, 2 * kKv};
  int32_t seqused[2] = {kKv, kKv};

 private:
  ContextPtr ctx_;
  PlanPtr plan_;
  std::vector<char> memory_;
};

// A pointer into the bytes of another type; never dereferenced by the test.
template <class T>
T* at(void* base, ptrdiff_t bytes) {
  return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(base) + static_cast<uintptr_t>(bytes));
}

struct ExecuteRow {
  int32_t status;
  std::vector<std::string> words;
  std::function<void(Problem&)> change;
};

void check_rows(int32_t batch_mode, const std::vector<ExecuteRow>& rows) {
  for (const ExecuteRow& row : rows) {
    Problem problem(batch_mode);
    row.change(problem);
    sageattn_error err = sized<sageattn_error>();
    CHECK(problem.execute(&err) == row.status);
    check_error(err, row.status, "sageattn_execute", row.words);
    CHECK(problem.untouched());
  }
}

constexpr int32_t kInvalid = SAGEATTN_E_INVALID_ARGUMENT;
constexpr int32_t kLimit = SAGEATTN_E_LIMIT;
constexpr int32_t kMisaligned = SAGEATTN_E_MISALIGNED;
constexpr int32_t kAliased = SAGEATTN_E_ALIASED;
constexpr int32_t kWorkspace = SAGEATTN_E_WORKSPACE;

TEST_CASE("execute: lengths, DENSE") {
  check_rows(
      SAGEATTN_BATCH_DENSE,
      {
          {kInvalid, {"batch = -1"}, [](auto& p) { p.args.batch = -1; }},
          {kLimit, {"batch = 3", "max_batch = 2"}, [](auto& p) { p.args.batch = 3; }},
          {kInvalid, {"qo_len = -1"}, [](auto& p) { p.args.qo_len = -1; }},
          {kLimit, {"qo_len = 5", "max_qo_len = 4"}, [](auto& p) { p.args.qo_len = 5; }},
          {kInvalid, {"kv_len = -5"}, [](auto& p) { p.args.kv_len = -5; }},
          {kLimit, {"kv_len = 9", "max_kv_len = 8"}, [](auto& p) { p.args.kv_len = 9; }},
          {kInvalid, {"total_qo = 6", "DENSE"}, [](auto& p) { p.args.total_qo = 6; }},
          {kInvalid, {"total_kv = 6", "DENSE"}, [](auto& p) { p.args.total_kv = 6; }},
          {kInvalid, {"cu_seqlens_q", "DENSE"}, [](auto& p) { p.args.cu_seqlens_q = p.cu_q; }},
          {kInvalid, {"cu_seqlens_kv", "DENSE"}, [](auto& p) { p.args.cu_seqlens_kv = p.cu_kv; }},
      });
}

TEST_CASE("execute: lengths, VARLEN") {
  check_rows(
      SAGEATTN_BATCH_VARLEN,
      {
          {kInvalid, {"qo_len = 3", "VARLEN"}, [](auto& p) { p.args.qo_len = 3; }},
          {kInvalid, {"kv_len = 3", "VARLEN"}, [](auto& p) { p.args.kv_len = 3; }},
          {kInvalid, {"total_qo = -1"}, [](auto& p) { p.args.total_qo = -1; }},
          {kLimit, {"total_qo = 9", "max_total_qo = 8"}, [](auto& p) { p.args.total_qo = 9; }},
          {kInvalid, {"total_kv = -1"}, [](auto& p) { p.args.total_kv = -1; }},
          {kLimit, {"total_kv = 17", "max_total_kv = 16"}, [](auto& p) { p.args.total_kv = 17; }},
          {kLimit, {"batch = 3", "max_batch = 2"}, [](auto& p) { p.args.batch = 3; }},
          {kInvalid, {"cu_seqlens_q = NULL"}, [](auto& p) { p.args.cu_seqlens_q = nullptr; }},
          {kInvalid, {"cu_seqlens_kv = NULL"}, [](auto& p) { p.args.cu_seqlens_kv = nullptr; }},
          {kMisaligned,
           {"cu_seqlens_q", "4"},
           [](auto& p) { p.args.cu_seqlens_q = at<int32_t>(p.cu_q, 2); }},
          {kMisaligned,
           {"cu_seqlens_kv", "4"},
           [](auto& p) { p.args.cu_seqlens_kv = at<int32_t>(p.cu_kv, 1); }},
          {kInvalid, {"q.stride_batch = 1"}, [](auto& p) { p.args.q.stride_batch = 1; }},
          {kInvalid, {"k.stride_batch = 1"}, [](auto& p) { p.args.k.stride_batch = 1; }},
          {kInvalid, {"v.stride_batch = 1"}, [](auto& p) { p.args.v.stride_batch = 1; }},
          {kInvalid, {"out.stride_batch = 1"}, [](auto& p) { p.args.out.stride_batch = 1; }},
          {kInvalid, {"lse.stride_batch = 1"}, [](auto& p) { p.args.lse.stride_batch = 1; }},
          {kAliased, {"out", "cu_seqlens_q"}, [](auto& p) { p.args.out.data = p.cu_q; }},
          {kAliased,
           {"lse", "cu_seqlens_kv"},
           [](auto& p) { p.args.lse.data = at<float>(p.cu_kv, 8); }},
          {kAliased, {"status", "cu_seqlens_q"}, [](auto& p) { p.args.status = p.cu_q + 2; }},
      });
}

TEST_CASE("execute: pointers") {
  check_rows(
      SAGEATTN_BATCH_DENSE,
      {
          {kInvalid, {"q.data = NULL"}, [](auto& p) { p.args.q.data = nullptr; }},
          {kInvalid, {"k.data = NULL"}, [](auto& p) { p.args.k.data = nullptr; }},
          {kInvalid, {"v.data = NULL"}, [](auto& p) { p.args.v.data = nullptr; }},
          {kInvalid, {"out.data = NULL"}, [](auto& p) { p.args.out.data = nullptr; }},
          {kMisaligned,
           {"q.data", "2 bytes"},
           [](auto& p) { p.args.q.data = at<void>(p.q.data(), 1); }},
          {kMisaligned,
           {"k.data", "2 bytes"},
           [](auto& p) { p.args.k.data = at<void>(p.k.data(), 3); }},
          {kMisaligned,
           {"v.data", "2 bytes"},
           [](auto& p) { p.args.v.data = at<void>(p.v.data(), 5); }},
          {kMisaligned,
           {"out.data", "4 bytes"},
           [](auto& p) { p.args.out.data = at<void>(p.out.data(), 2); }},
          {kMisaligned,
           {"lse.data", "4 bytes"},
           [](auto& p) { p.args.lse.data = at<float>(p.lse.data(), 2); }},
          {kMisaligned,
           {"status", "4 bytes"},
           [](auto& p) { p.args.status = at<int32_t>(p.status, 1); }},
          {kMisaligned,
           {"seqused_kv", "4 bytes"},
           [](auto& p) { p.args.seqused_kv = at<int32_t>(p.seqused, 2); }},
          {kInvalid, {"stream", "CPU"}, [](auto& p) { p.stream = at<CUstream_st>(p.status, 0); }},
          {kWorkspace, {"workspace = NULL"}, [](auto& p) { p.workspace = nullptr; }},
          {kWorkspace, {"workspace_size = 0"}, [](auto& p) { p.workspace_size = 0; }},
          {kWorkspace, {"workspace_size", "min_workspace"}, [](auto& p) { --p.workspace_size; }},
          {kWorkspace, {"workspace = ", "workspace_alignment"}, [](auto& p) { p.workspace += 1; }},
          {kWorkspace,
           {"workspace = ", "workspace_alignment"},
           [](auto& p) { p.workspace += p.alignment / 2; }},
          {kWorkspace, {"workspace_size", "2^63"}, [](auto& p) { p.workspace_size = SIZE_MAX; }},
      });

  Problem problem(SAGEATTN_BATCH_DENSE);
  sageattn_error err = sized<sageattn_error>();
  CHECK(sageattn_execute(nullptr, &problem.args, problem.workspace, problem.workspace_size, nullptr,
                         &err) == kInvalid);
  check_error(err, kInvalid, "sageattn_execute", {"plan = NULL"});
  CHECK(sageattn_execute(problem.plan(), nullptr, problem.workspace, problem.workspace_size,
                         nullptr, &err) == kInvalid);
  check_error(err, kInvalid, "sageattn_execute", {"args = NULL"});
}

constexpr int64_t kHuge = INT64_MAX / 4;

TEST_CASE("execute: strides") {
  check_rows(SAGEATTN_BATCH_DENSE,
             {
                 {kInvalid, {"q.stride_dim = 0"}, [](auto& p) { p.args.q.stride_token = 8; }},
                 {kInvalid, {"k.stride_dim = 0"}, [](auto& p) { p.args.k.stride_head = 8; }},
                 {kInvalid, {"v.stride_dim = 0"}, [](auto& p) { p.args.v.stride_batch = 8; }},
                 {kAliased,
                  {"out.stride_batch = 0"},
                  [](auto& p) {
                    p.args.out = {p.args.out.data, 0, 32, 8, 1};
                  }},
                 {kAliased,
                  {"out.stride_token = 0"},
                  [](auto& p) {
                    p.args.out = {p.args.out.data, 96, 0, 8, 1};
                  }},
                 {kAliased,
                  {"out.stride_head = 0"},
                  [](auto& p) {
                    p.args.out = {p.args.out.data, 96, 32, 0, 1};
                  }},
                 {kAliased,
                  {"out.stride_dim = 0"},
                  [](auto& p) {
                    p.args.out = {p.args.out.data, 96, 32, 8, 0};
                  }},
                 {kAliased,
                  {"out", "strides", "dim 1"},  // heads overlap
                  [](auto& p) {
                    p.args.out = {p.args.out.data, 96, 32, 7, 1};
                  }},
                 {kAliased,
                  {"out", "strides"},  // tokens overlap, backwards
                  [](auto& p) {
                    p.args.out = {p.args.out.data, 96, -8, 8, 1};
                  }},
                 {kAliased,
                  {"out", "strides"},  // the batch items overlap
                  [](auto& p) {
                    p.args.out = {p.args.out.data, 95, 32, 8, 1};
                  }},
                 {kAliased,
                  {"lse.stride_batch = 0"},
                  [](auto& p) { p.args.lse.stride_head = 3, p.args.lse.stride_token = 1; }},
                 {kAliased,
                  {"lse", "strides"},
                  [](auto& p) {
                    p.args.lse = {p.args.lse.data, 12, 2, 1};
                  }},
                 {kInvalid,
                  {"lse.stride_head = 3", "NULL"},
                  [](auto& p) {
                    p.args.lse = {nullptr, 0, 3, 0};
                  }},
                 {kInvalid,
                  {"lse.stride_token = 3", "NULL"},
                  [](auto& p) {
                    p.args.lse = {nullptr, 0, 0, 3};
                  }},
                 {kInvalid,
                  {"lse.stride_batch = 3", "NULL"},
                  [](auto& p) {
                    p.args.lse = {nullptr, 3, 0, 0};
                  }},
                 {kInvalid,
                  {"q: its strides", "address space"},
                  [](auto& p) {
                    p.args.q = {p.args.q.data, 96, INT64_MAX, 8, 1};
                  }},
                 {kInvalid,
                  {"q: its strides", "address space"},
                  [](auto& p) {
                    p.args.q = {p.args.q.data, 96, INT64_MIN, 8, 1};
                  }},
                 {kInvalid,
                  {"k: its strides", "address space"},  // the sum overflows, no term does
                  [](auto& p) {
                    p.args.k = {p.args.k.data, kHuge, kHuge / 4 + 8, 8, 1};
                  }},
                 {kInvalid,
                  {"v: its strides", "address space"},  // below address 0
                  [](auto& p) {
                    p.args.v = {p.args.v.data, -(int64_t{1} << 60), 16, 8, 1};
                  }},
                 {kInvalid,
                  {"out: its strides", "address space"},
                  [](auto& p) {
                    p.args.out = {p.args.out.data, INT64_MIN, 32, 8, 1};
                  }},
                 {kInvalid,
                  {"lse: its strides", "address space"},
                  [](auto& p) {
                    p.args.lse = {p.args.lse.data, INT64_MAX, 3, 1};
                  }},
             });
}

TEST_CASE("execute: more elements than 64 bits count are refused, not wrapped around") {
  const ContextPtr ctx = make_context();
  for (const int32_t layout : {SAGEATTN_LAYOUT_NHD, SAGEATTN_LAYOUT_HND}) {
    for (const int32_t mode : {SAGEATTN_BATCH_DENSE, SAGEATTN_BATCH_VARLEN}) {
      const bool varlen = mode == SAGEATTN_BATCH_VARLEN;
      sageattn_attn_desc desc = sized<sageattn_attn_desc>();
      desc.qk_format = SAGEATTN_QK_NONE;  // a workspace that does not grow with the queries
      desc.pv_format = SAGEATTN_PV_NONE;
      desc.q_dtype = SAGEATTN_F32;
      desc.layout = layout;
      desc.batch_mode = mode;
      desc.head_dim = 256;
      desc.num_qo_heads = 65536;
      desc.num_kv_heads = 1;
      desc.max_batch = 1 << 24;
      desc.max_qo_len = 1 << 30;
      desc.max_kv_len = 1;
      sageattn_plan* made = nullptr;
      sageattn_error err = sized<sageattn_error>();
      sageattn_plan_create(ctx.get(), &desc, &made, &err);
      INFO(err.message);
      REQUIRE(made != nullptr);
      const PlanPtr plan(made);

      float word = 0;
      int32_t cu[2] = {0, 1};
      sageattn_execute_args args = sized<sageattn_execute_args>();
      args.batch = varlen ? 1 : 1 << 24;
      args.q.data = args.k.data = args.v.data = &word;
      args.out.data = &word;
      if (varlen) {
        args.total_qo = int64_t{1} << 54;
        args.total_kv = 1;
        args.cu_seqlens_q = args.cu_seqlens_kv = cu;
      } else {
        args.qo_len = 1 << 30;
        args.kv_len = 1;
      }
      CHECK(sageattn_execute(plan.get(), &args, nullptr, 0, nullptr, &err) == kInvalid);
      check_error(err, kInvalid, "sageattn_execute", {"q: ", "reach out of the address space"});
    }
  }
}

TEST_CASE("execute: overlaps") {
  check_rows(
      SAGEATTN_BATCH_DENSE,
      {
          {kAliased, {"out", "overlaps q"}, [](auto& p) { p.args.out.data = p.q.data() + kPad; }},
          {kAliased,
           {"out", "overlaps k"},  // by its last element
           [](auto& p) {
             p.args.out.data = p.k.data() + kPad + kBatch * kKv * kKvHeads * kDim - 2;
           }},
          {kAliased,
           {"out", "overlaps v"},  // by v's first element
           [](auto& p) { p.args.v.data = p.out.data() + kPad + 191; }},
          {kAliased,
           {"out", "overlaps lse"},
           [](auto& p) { p.args.lse.data = p.out.data() + kPad + 191; }},
          {kAliased,
           {"out", "overlaps status"},
           [](auto& p) { p.args.status = at<int32_t>(p.out.data(), 4 * kPad); }},
          {kAliased,
           {"out", "overlaps seqused_kv"},
           [](auto& p) { p.args.seqused_kv = at<int32_t>(p.out.data(), 4 * kPad); }},
          {kAliased, {"out", "overlaps workspace"}, [](auto& p) { p.args.out.data = p.workspace; }},
          {kAliased,
           {"lse", "overlaps q"},
           [](auto& p) { p.args.lse.data = at<float>(p.q.data(), 2 * kPad); }},
          {kAliased,
           {"lse", "overlaps workspace"},
           [](auto& p) { p.args.lse.data = at<float>(p.workspace, 0); }},
          {kAliased, {"status", "overlaps seqused_kv"}, [](auto& p) { p.args.status = p.seqused; }},
          {kAliased,
           {"status", "overlaps workspace"},
           [](auto& p) { p.args.status = at<int32_t>(p.workspace, 0); }},
          {kAliased, {"workspace", "overlaps q"}, [](auto& p) { p.args.q.data = p.workspace; }},
          {kAliased,
           {"workspace", "overlaps seqused_kv"},
           [](auto& p) { p.args.seqused_kv = at<int32_t>(p.workspace, 4); }},
          // Columns of one array, but not apart: out starts in the last head of q.
          {kAliased,
           {"out", "overlaps q"},
           [](auto& p) {
             p.args.q = {p.out.data() + kPad, 64 * kQo, 64, 8, 1};
             p.args.out = {p.out.data() + kPad + 12, 32 * kQo, 32, 8, 1};
           }},
          // A mirrored view covers the same bytes.
          {kAliased,
           {"out", "overlaps lse"},
           [](auto& p) {
             p.args.out = {p.out.data() + kPad + 191, -96, -32, -8, -1};
             p.args.lse.data = p.out.data() + kPad;
           }},
      });
}

TEST_CASE("execute: unusual and legal") {
  const std::function<void(Problem&)> changes[] = {
      [](auto&) {},
      [](auto& p) { p.args.batch = 0, p.args.status = nullptr, p.args.seqused_kv = nullptr; },
      [](auto& p) {  // nothing to touch: pointers and strides are not looked at
        p.args.batch = 0;
        p.args.q = {nullptr, 1, 2, 3, 0};
        p.args.out = {at<void>(p.out.data(), 1), 0, 0, 5, 0};
        p.args.lse.data = at<float>(p.lse.data(), 1);
      },
      [](auto& p) {
        p.args.qo_len = 0;
        p.args.q.data = p.args.out.data = nullptr;
      },
      [](auto& p) {
        p.args.kv_len = 0;
        p.args.k.data = p.args.v.data = nullptr;
        p.args.seqused_kv = nullptr;
      },
      [](auto& p) { p.args.lse.data = nullptr, p.args.status = nullptr; },
      [](auto& p) {
        p.args.out = {p.args.out.data, 96, 8, 24, 1};
      },  // head-major
      [](auto& p) {
        p.args.out = {p.args.out.data, 1, 2, 6, 24};
      },  // channel-major
      [](auto& p) {
        p.args.out = {p.args.out.data, 100, 33, 8, 1};
      },  // padded
      [](auto& p) {
        p.args.out = {p.out.data() + kPad + 191, -96, -32, -8, -1};
      },
      [](auto& p) {
        p.args.lse = {p.args.lse.data, 1, 6, 2};
      },
      [](auto& p) {
        p.args.k = {p.args.k.data, 0, 8, 0, 1};
      },  // expanded
      [](auto& p) {
        p.args.v = {p.args.v.data, 0, 0, 0, 1};
      },
      [](auto& p) {  // strides of dimensions of size 1 are ignored
        p.args.batch = 1;
        p.args.qo_len = 1;
        p.args.q = {p.args.q.data, INT64_MIN, INT64_MAX, 8, 1};
        p.args.out = {p.args.out.data, 0, INT64_MIN, 8, 1};
        p.args.lse = {p.args.lse.data, INT64_MAX, 1, INT64_MIN};
      },
      [](auto& p) {  // q and out are columns of one array of 48 floats a token
        p.out.assign(2 * kPad + 48 * kBatch * kQo, 0.0f);
        p.args.q = {p.out.data() + kPad, 96 * kQo, 96, 8, 1};
        p.args.out = {p.out.data() + kPad + 16, 48 * kQo, 48, 8, 1};
      },
      [](auto& p) {  // and the lse is one more column of it, q is two tokens later
        p.out.assign(2 * kPad + 64 * (kBatch * kQo + 2), 0.0f);
        p.args.q = {p.out.data() + kPad + 64 * 2, 128 * kQo, 128, 8, 1};
        p.args.out = {p.out.data() + kPad + 16, 64 * kQo, 64, 8, 1};
        p.args.lse = {p.out.data() + kPad + 48, 64 * kQo, 1, 64};
      },
      [](auto& p) {  // adjacent
        p.lse.resize(2 * kPad + 24 + 192, 77.0f);
        p.args.lse.data = p.lse.data() + kPad;
        p.args.out.data = p.lse.data() + kPad + 24;
      },
  };
  size_t index = 0;
  for (const auto& change : changes) {
    INFO("change " << index++);
    Problem problem(SAGEATTN_BATCH_DENSE);
    change(problem);
    sageattn_error err = sized<sageattn_error>();
    const int32_t status = problem.execute(&err);
    INFO(err.message);
    CHECK(status == SAGEATTN_OK);
    CHECK(err.status == SAGEATTN_OK);
    CHECK(err.message[0] == 0);
  }

  Problem varlen(SAGEATTN_BATCH_VARLEN);
  CHECK(varlen.execute(nullptr) == SAGEATTN_OK);
  varlen.args.batch = 0;
  varlen.args.total_qo = varlen.args.total_kv = 0;
  varlen.args.q.data = varlen.args.k.data = varlen.args.v.data = varlen.args.out.data = nullptr;
  CHECK(varlen.execute(nullptr) == SAGEATTN_OK);
}

TEST_CASE("overlap: never called apart, or distinct, when it is not") {
  // Small random tensors whose bytes can be listed.
  std::mt19937 random(1);
  const auto below = [&](int n) {
    return static_cast<int64_t>(random() % static_cast<unsigned>(n));
  };
  struct Listed {
    sageattn::Region region;
    std::set<int64_t> bytes;
    bool distinct = true;
  };
  const auto make = [&] {
    Listed listed;
    const int64_t element = int64_t{2} << below(2);
    const int64_t base = 4096 + element * below(32);
    std::array<std::pair<int64_t, int64_t>, 4> dimensions;
    for (auto& [size, stride] : dimensions) size = 1 + below(3), stride = below(25) - 8;
    listed.region = sageattn::strided_region("", reinterpret_cast<void*>(base),
                                             static_cast<size_t>(element), dimensions);
    const auto [d0, d1, d2, d3] = dimensions;
    for (int64_t i = 0; i < d0.first * d1.first * d2.first * d3.first; ++i) {
      const int64_t index = i % d0.first * d0.second + i / d0.first % d1.first * d1.second +
                            i / (d0.first * d1.first) % d2.first * d2.second +
                            i / (d0.first * d1.first * d2.first) * d3.second;
      for (int64_t byte = 0; byte < element; ++byte) {
        listed.distinct &= listed.bytes.insert(base + index * element + byte).second;
      }
    }
    return listed;
  };
  int apart = 0, distinct = 0;
  bool right = true;
  for (int repeat = 0; repeat < 20000; ++repeat) {
    const Listed a = make(), b = make();
    right &= static_cast<int64_t>(a.region.begin) == *a.bytes.begin();
    right &= static_cast<int64_t>(a.region.begin + a.region.span()) == *a.bytes.rbegin() + 1;
    if (sageattn::elements_distinct(a.region)) right &= a.distinct, ++distinct;
    if (sageattn::regions_disjoint(a.region, b.region)) {
      ++apart;
      for (const int64_t byte : a.bytes) right &= b.bytes.count(byte) == 0;
    }
    right &= sageattn::regions_disjoint(a.region, b.region) ==
             sageattn::regions_disjoint(b.region, a.region);
  }
  CHECK(right);
  CHECK(apart > 1000);
  CHECK(distinct > 1000);
}

// ---- Compare -----------------------------------------------------------------------------------

TEST_CASE("compare") {
  struct Row {
    int32_t status;
    std::vector<std::string> words;
    std::function<void(sageattn_compare_args&)> change;
  };
  float values[24] = {};
  const Row rows[] = {
      {kInvalid, {"out_dtype = 0"}, [](auto& a) { a.out_dtype = 0; }},
      {kInvalid, {"out_dtype = 4"}, [](auto& a) { a.out_dtype = 4; }},
      {kInvalid, {"ref_dtype = -1"}, [](auto& a) { a.ref_dtype = -1; }},
      {kInvalid, {"layout = 2"}, [](auto& a) { a.layout = 2; }},
      {kInvalid, {"batch = -1"}, [](auto& a) { a.batch = -1; }},
      {kInvalid, {"len = -1"}, [](auto& a) { a.len = -1; }},
      {kInvalid, {"num_heads = -1"}, [](auto& a) { a.num_heads = -1; }},
      {kInvalid, {"head_dim = -1"}, [](auto& a) { a.head_dim = -1; }},
      {kInvalid, {"num_heads = 65536", "2^31"}, [](auto& a) { a.batch = a.num_heads = 65536; }},
      {kInvalid,
       {"len = 2147483647", "2^63"},
       [](auto& a) { a.len = a.head_dim = INT32_MAX, a.num_heads = 4; }},
      {kInvalid, {"out.data = NULL"}, [](auto& a) { a.out.data = nullptr; }},
      {kInvalid, {"ref.data = NULL"}, [](auto& a) { a.ref.data = nullptr; }},
      {kMisaligned, {"out.data"}, [&](auto& a) { a.out.data = at<void>(values, 2); }},
      {kInvalid, {"ref.stride_dim = 0"}, [](auto& a) { a.ref.stride_token = 4; }},
      {kInvalid,
       {"out: its strides"},
       [](auto& a) { a.out.stride_token = INT64_MAX, a.out.stride_dim = 1; }},
  };
  for (const Row& row : rows) {
    sageattn_compare_args args = sized<sageattn_compare_args>();
    args.out_dtype = args.ref_dtype = SAGEATTN_F32;
    args.batch = 1, args.len = 3, args.num_heads = 2, args.head_dim = 4;
    args.out.data = args.ref.data = values;
    row.change(args);
    sageattn_compare_result result = sized<sageattn_compare_result>();
    result.count = 77;
    sageattn_error err = sized<sageattn_error>();
    CHECK(sageattn_compare(&args, &result, &err) == row.status);
    check_error(err, row.status, "sageattn_compare", row.words);
    CHECK(result.count == 77);
  }
  sageattn_compare_args args = sized<sageattn_compare_args>();
  args.out_dtype = args.ref_dtype = SAGEATTN_F32;
  sageattn_compare_result result = sized<sageattn_compare_result>();
  sageattn_error err = sized<sageattn_error>();
  CHECK(sageattn_compare(nullptr, &result, &err) == kInvalid);
  check_error(err, kInvalid, "sageattn_compare", {"args = NULL"});
  CHECK(sageattn_compare(&args, nullptr, &err) == kInvalid);
  check_error(err, kInvalid, "sageattn_compare", {"result = NULL"});
  args.num_heads = 0, args.batch = args.len = args.head_dim = INT32_MAX;  // no elements
  CHECK(sageattn_compare(&args, &result, &err) == SAGEATTN_OK);
  CHECK(result.count == 0);
  CHECK(result.worst_head == -1);
}

}  // namespace
