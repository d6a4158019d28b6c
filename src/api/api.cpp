// The C functions of sageattn.h. Each checks its pointers, copies structs in, calls the core and
// copies structs out; guarded() is where exceptions end.
#include <algorithm>
#include <cfenv>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <exception>
#include <new>

#include "include/sageattn.h"
#include "src/api/structs.h"
#include "src/core/compare.h"
#include "src/core/context.h"
#include "src/core/error.h"
#include "src/core/plan.h"
#include "src/core/select.h"
#include "src/core/selftest.h"
#include "src/core/validate.h"
#include "src/cuda/pointers.h"
#include "src/util/source_id.h"

namespace sageattn {
namespace {

// Ends `text`, which holds `capacity` bytes, so that the last character is whole.
void cut_utf8(char* text, size_t capacity) {
  size_t length = strnlen(text, capacity - 1);
  if (length == capacity - 1) {  // maybe cut: drop a character that lacks its last bytes
    size_t start = length;
    while (start > 0 && (text[start - 1] & 0xC0) == 0x80) --start;
    if (start > 0 && (text[start - 1] & 0xC0) == 0xC0) {
      const unsigned char lead = static_cast<unsigned char>(text[start - 1]);
      const size_t bytes = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
      if (length - (start - 1) < bytes) length = start - 1;
    }
  }
  text[length] = '\0';
}

// Fills as much of the caller's error struct as it has.
void write_error(sageattn_error* err, int32_t status, const char* function, const char* message) {
  if (err == nullptr) return;
  sageattn_error error{};
  std::memcpy(&error.struct_size, err, sizeof error.struct_size);
  if (error.struct_size < offsetof(sageattn_error, message)) return;
  const size_t size = std::min<size_t>(error.struct_size, sizeof error);
  const size_t capacity = size - offsetof(sageattn_error, message);
  error.status = status;
  if (status != SAGEATTN_OK && capacity > 0) {
    std::snprintf(error.message, capacity, "%s: %s", function, message);
    cut_utf8(error.message, capacity);
  }
  std::memcpy(err, &error, size);
}

// The default floating-point environment for a while: bits must not depend on a caller that flushes
// subnormals (-ffast-math, torch.set_flush_denormal) or rounds in another direction. Workers of the
// pool set theirs when they start.
class DefaultFloatEnvironment {
 public:
  DefaultFloatEnvironment() {
    std::fegetenv(&callers_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatEnvironment() { std::fesetenv(&callers_); }
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
  DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

 private:
  std::fenv_t callers_;
};

// Runs the body of a function: nothing is thrown past here.
template <class Body>
int32_t guarded(const char* function, sageattn_error* err, const Body& body) noexcept {
  const DefaultFloatEnvironment environment;
  int32_t status = SAGEATTN_E_INTERNAL;
  try {
    body();
    status = SAGEATTN_OK;
    write_error(err, status, function, "");
  } catch (const Error& error) {
    status = error.status;
    write_error(err, status, function, error.message);
  } catch (const std::bad_alloc&) {
    status = SAGEATTN_E_OUT_OF_MEMORY;
    write_error(err, status, function, "out of host memory");
  } catch (const std::exception& exception) {
    write_error(err, status, function, exception.what());
  } catch (...) {
    write_error(err, status, function, "unknown exception");
  }
  return status;
}

// Handles are the objects themselves.
Context* object(sageattn_context* handle) { return reinterpret_cast<Context*>(handle); }
Plan* object(sageattn_plan* handle) { return reinterpret_cast<Plan*>(handle); }
const Plan* object(const sageattn_plan* handle) { return reinterpret_cast<const Plan*>(handle); }

template <class T>
T* required(T* pointer, const char* name) {
  if (pointer == nullptr) fail(SAGEATTN_E_INVALID_ARGUMENT, "%s = NULL: must not be NULL", name);
  return pointer;
}

// Where a function writes a text or blob: [buffer, buffer + capacity) and *needed.
void check_buffer(const void* buffer, const char* name, size_t capacity) {
  if (buffer == nullptr && capacity != 0) {
    fail(SAGEATTN_E_INVALID_ARGUMENT, "%s = NULL: must not be NULL while capacity is %zu", name,
         capacity);
  }
}

void fill_buffer(const void* content, size_t size, void* buffer, size_t capacity, size_t* needed) {
  if (needed != nullptr) *needed = size;
  if (capacity < size) {
    fail(SAGEATTN_E_BUFFER_TOO_SMALL, "capacity = %zu: must be at least %zu", capacity, size);
  }
  std::memcpy(buffer, content, size);
}

}  // namespace
}  // namespace sageattn

using namespace sageattn;

#define SAGEATTN_STRING(x) #x
#define SAGEATTN_VERSION_TEXT(major, minor, patch) \
  SAGEATTN_STRING(major) "." SAGEATTN_STRING(minor) "." SAGEATTN_STRING(patch)

uint32_t sageattn_version(void) { return SAGEATTN_VERSION_NUMBER; }

const char* sageattn_version_string(void) {
  return SAGEATTN_VERSION_TEXT(SAGEATTN_VERSION_MAJOR, SAGEATTN_VERSION_MINOR,
                               SAGEATTN_VERSION_PATCH);
}

const char* sageattn_source_id(void) { return kSourceId; }

int32_t sageattn_context_create(const sageattn_context_desc* desc, sageattn_context** ctx,
                                sageattn_error* err) {
  return guarded("sageattn_context_create", err, [&] {
    *required(ctx, "ctx") = nullptr;
    const auto known = desc != nullptr ? copy_in(desc, "desc") : sageattn_context_desc{};
    *ctx = reinterpret_cast<sageattn_context*>(Context::create(known));
  });
}

void sageattn_context_destroy(sageattn_context* ctx) {
  if (ctx != nullptr) object(ctx)->release();
}

int32_t sageattn_context_report(sageattn_context* ctx, char* text, size_t capacity, size_t* needed,
                                sageattn_error* err) {
  return guarded("sageattn_context_report", err, [&] {
    required(ctx, "ctx");
    check_buffer(text, "text", capacity);
    const auto& report = object(ctx)->report();
    fill_buffer(report.c_str(), report.size() + 1, text, capacity, needed);
  });
}

int32_t sageattn_context_import_blob(sageattn_context* ctx, const void* data, size_t size,
                                     sageattn_error* err) {
  return guarded("sageattn_context_import_blob", err, [&] {
    required(ctx, "ctx");
    required(data, "data");
    if (object(ctx)->backend() == SAGEATTN_BACKEND_CUDA) {
      return object(ctx)->store().import_blob({static_cast<const uint8_t*>(data), size});
    }
    fail(SAGEATTN_E_UNSUPPORTED,
         "data (%zu bytes): the CPU backend has no kernels to import; it needs none", size);
  });
}

int32_t sageattn_context_export_blob(sageattn_context* ctx, void* data, size_t capacity,
                                     size_t* needed, sageattn_error* err) {
  return guarded("sageattn_context_export_blob", err, [&] {
    required(ctx, "ctx");
    check_buffer(data, "data", capacity);
    if (object(ctx)->backend() == SAGEATTN_BACKEND_CUDA) {
      const Bytes blob = object(ctx)->store().export_blob();
      return fill_buffer(blob.data(), blob.size(), data, capacity, needed);
    }
    fail(SAGEATTN_E_UNSUPPORTED, "ctx: the CPU backend has no kernels to export; it needs none");
  });
}

int32_t sageattn_attn_desc_init(sageattn_attn_desc* desc, uint32_t size, int32_t preset,
                                sageattn_error* err) {
  return guarded("sageattn_attn_desc_init", err, [&] {
    required(desc, "desc");
    if (size < sizeof desc->struct_size || size > kMaxStructSize) {
      fail(SAGEATTN_E_INVALID_ARGUMENT, "size = %u: must be sizeof(sageattn_attn_desc), 4..%u",
           size, kMaxStructSize);
    }
    if (preset < SAGEATTN_PRESET_AUTO || preset > SAGEATTN_PRESET_EXACT) {
      fail(SAGEATTN_E_INVALID_ARGUMENT, "preset = %d: must be SAGEATTN_PRESET_* (0..%d)", preset,
           static_cast<int>(SAGEATTN_PRESET_EXACT));
    }
    const sageattn_attn_desc filled = preset_desc(preset);
    const char* bytes = reinterpret_cast<const char*>(&filled);
    for (size_t offset = size; offset < sizeof filled; ++offset) {
      if (bytes[offset] != 0) {
        fail(SAGEATTN_E_INVALID_ARGUMENT,
             "size = %u: preset %d needs the fields up to offset %zu and beyond", size, preset,
             offset);
      }
    }
    std::memset(static_cast<void*>(desc), 0, size);
    std::memcpy(static_cast<void*>(desc), &filled, std::min<size_t>(size, sizeof filled));
    std::memcpy(static_cast<void*>(desc), &size, sizeof size);
  });
}

int32_t sageattn_plan_create(sageattn_context* ctx, const sageattn_attn_desc* desc,
                             sageattn_plan** plan, sageattn_error* err) {
  return guarded("sageattn_plan_create", err, [&] {
    *required(plan, "plan") = nullptr;
    required(ctx, "ctx");
    *plan = reinterpret_cast<sageattn_plan*>(Plan::create(*object(ctx), copy_in(desc, "desc")));
  });
}

void sageattn_plan_destroy(sageattn_plan* plan) {
  if (plan != nullptr) object(plan)->destroy();
}

int32_t sageattn_plan_get_info(const sageattn_plan* plan, sageattn_plan_info* info,
                               sageattn_error* err) {
  return guarded("sageattn_plan_get_info", err, [&] {
    required(plan, "plan");
    struct_size_of(info, "info");
    copy_out(object(plan)->info(), info);
  });
}

int32_t sageattn_plan_get_kernel(const sageattn_plan* plan, int32_t index,
                                 sageattn_kernel_info* info, sageattn_error* err) {
  return guarded("sageattn_plan_get_kernel", err, [&] {
    required(plan, "plan");
    struct_size_of(info, "info");
    const int32_t count = object(plan)->info().num_kernels;
    if (index < 0 || index >= count) {
      fail(SAGEATTN_E_INVALID_ARGUMENT, "index = %d: the plan has %d kernels, counted from 0",
           index, count);
    }
    copy_out(object(plan)->program()->kernels()[static_cast<size_t>(index)], info);
  });
}

int32_t sageattn_plan_query(sageattn_context* ctx, const sageattn_attn_desc* desc,
                            sageattn_plan_info* info, sageattn_error* err) {
  return guarded("sageattn_plan_query", err, [&] {
    required(ctx, "ctx");
    if (info != nullptr) struct_size_of(info, "info");
    const PlanSpec spec = specify_plan(*object(ctx), copy_in(desc, "desc"));
    if (info != nullptr) copy_out(spec.info, info);
  });
}

int32_t sageattn_plan_export_blob(const sageattn_plan* plan, void* data, size_t capacity,
                                  size_t* needed, sageattn_error* err) {
  return guarded("sageattn_plan_export_blob", err, [&] {
    required(plan, "plan");
    check_buffer(data, "data", capacity);
    if (const cuda::Program* program = object(plan)->program()) {
      const Bytes blob = object(plan)->context().store().export_blob(program->images());
      return fill_buffer(blob.data(), blob.size(), data, capacity, needed);
    }
    fail(SAGEATTN_E_UNSUPPORTED, "plan: the CPU backend has no kernels to export; it needs none");
  });
}

int32_t sageattn_execute(const sageattn_plan* plan, const sageattn_execute_args* args,
                         void* workspace, size_t workspace_size, CUstream_st* stream,
                         sageattn_error* err) {
  return guarded("sageattn_execute", err, [&] {
    required(plan, "plan");
    object(plan)->execute(copy_in(args, "args"), workspace, workspace_size, stream);
  });
}

int32_t sageattn_compare(const sageattn_compare_args* args, sageattn_compare_result* result,
                         sageattn_error* err) {
  return guarded("sageattn_compare", err, [&] {
    struct_size_of(result, "result");
    const Comparison comparison = check_compare_args(copy_in(args, "args"));
    cuda::check_on_host(comparison.operands);
    copy_out(compare(comparison), result);
  });
}

int32_t sageattn_selftest(sageattn_context* ctx, sageattn_error* err) {
  return guarded("sageattn_selftest", err, [&] { selftest(*object(required(ctx, "ctx"))); });
}
