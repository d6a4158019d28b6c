// Our declarations of the driver's types, constants and functions are those of cuda.h. A check at
// compile time, where there is a toolkit; without one the test is empty.
#include "src/cuda/driver.h"
#include "tests/catch.h"

#if __has_include(<cuda.h>) && __has_include(<cudaTypedefs.h>)
#include <cuda.h>
#include <cudaTypedefs.h>

#include <cstddef>
#include <type_traits>

namespace {

namespace ours = sageattn::cuda;

// Whether two types are passed alike: enumerations as int, structs by the size of what is pointed to.
template <class A, class B>
constexpr bool alike() {
  if constexpr (std::is_same_v<A, B>) {
    return true;
  } else if constexpr (std::is_pointer_v<A> && std::is_pointer_v<B>) {
    using X = std::remove_pointer_t<A>;
    using Y = std::remove_pointer_t<B>;
    return std::is_const_v<X> == std::is_const_v<Y> &&
           alike<std::remove_const_t<X>, std::remove_const_t<Y>>();
  } else if constexpr (std::is_pointer_v<A> || std::is_pointer_v<B>) {
    return false;
  } else if constexpr (std::is_class_v<A> && std::is_class_v<B>) {
    return sizeof(A) == sizeof(B) && alignof(A) == alignof(B);
  } else {
    return (std::is_enum_v<A> || std::is_integral_v<A>)&&(
               std::is_enum_v<B> || std::is_integral_v<B>)&&sizeof(A) == sizeof(B) &&
           (std::is_enum_v<A> || std::is_enum_v<B> || std::is_signed_v<A> == std::is_signed_v<B>);
  }
}

template <class Ours, class Theirs>
struct SameFunction : std::false_type {};
template <class R, class... A, class S, class... B>
struct SameFunction<R (*)(A...), S (*)(B...)> {
  static constexpr bool value = [] {
    if constexpr (sizeof...(A) == sizeof...(B)) return (alike<R, S>() && ... && alike<A, B>());
    return false;
  }();
};

// The version asked for is one that cudaTypedefs.h knows, with our arguments.
#define CUDA_FUNCTION(name, version, required, arguments)                                     \
  static_assert(SameFunction<decltype(ours::Driver::name), PFN_cu##name##_v##version>::value, \
                "cu" #name);
#include "src/cuda/driver.def"
#undef CUDA_FUNCTION

static_assert(ours::kSuccess == CUDA_SUCCESS);
static_assert(ours::kErrorOutOfMemory == CUDA_ERROR_OUT_OF_MEMORY);
static_assert(ours::kErrorInvalidImage == CUDA_ERROR_INVALID_IMAGE);
static_assert(ours::kErrorNoBinaryForGpu == CUDA_ERROR_NO_BINARY_FOR_GPU);
static_assert(ours::kErrorInvalidHandle == CUDA_ERROR_INVALID_HANDLE);
static_assert(ours::kErrorSystemDriverMismatch == CUDA_ERROR_SYSTEM_DRIVER_MISMATCH);
static_assert(ours::kErrorCompatNotSupported == CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE);
static_assert(ours::kDeviceClockRate == CU_DEVICE_ATTRIBUTE_CLOCK_RATE);
static_assert(ours::kDeviceMultiprocessorCount == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
static_assert(ours::kDeviceL2CacheSize == CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE);
static_assert(ours::kDeviceMajor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
static_assert(ours::kDeviceMinor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
static_assert(ours::kDevicePageableMemoryAccess == CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS);
static_assert(ours::kPointerMemoryType == CU_POINTER_ATTRIBUTE_MEMORY_TYPE);
static_assert(ours::kPointerDevicePointer == CU_POINTER_ATTRIBUTE_DEVICE_POINTER);
static_assert(ours::kPointerHostPointer == CU_POINTER_ATTRIBUTE_HOST_POINTER);
static_assert(ours::kPointerDeviceOrdinal == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);
static_assert(ours::kPointerAccessFlags == CU_POINTER_ATTRIBUTE_ACCESS_FLAGS);
static_assert(ours::kMemoryTypeDevice == CU_MEMORYTYPE_DEVICE);
static_assert(ours::kDeviceMaxSharedMemoryOptin ==
              CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
static_assert(ours::kFunctionMaxThreads == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK);
static_assert(ours::kFunctionSharedSize == CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES);
static_assert(ours::kFunctionLocalSize == CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES);
static_assert(ours::kFunctionRegisters == CU_FUNC_ATTRIBUTE_NUM_REGS);
static_assert(ours::kFunctionMaxDynamicShared == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
static_assert(ours::kMemAttachGlobal == CU_MEM_ATTACH_GLOBAL);
static_assert(ours::kCaptureModeThreadLocal == CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
static_assert(ours::kStreamNonBlocking == CU_STREAM_NON_BLOCKING);
static_assert(ours::kLaunchProgrammaticSerialization ==
              CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);
static_assert(ours::kLegacyStream == CU_GET_PROC_ADDRESS_LEGACY_STREAM);

static_assert(std::is_same_v<ours::Context, CUcontext>);
static_assert(std::is_same_v<ours::Stream, CUstream>);
static_assert(std::is_same_v<ours::DevicePointer, CUdeviceptr>);

#define SAME_FIELD(field, theirs) \
  static_assert(offsetof(ours::LaunchConfig, field) == offsetof(CUlaunchConfig, theirs))
SAME_FIELD(grid_x, gridDimX);
SAME_FIELD(grid_z, gridDimZ);
SAME_FIELD(block_x, blockDimX);
SAME_FIELD(block_z, blockDimZ);
SAME_FIELD(shared_bytes, sharedMemBytes);
SAME_FIELD(stream, hStream);
SAME_FIELD(attributes, attrs);
SAME_FIELD(num_attributes, numAttrs);
#undef SAME_FIELD
static_assert(sizeof(ours::LaunchAttribute) == sizeof(CUlaunchAttribute));
static_assert(offsetof(ours::LaunchAttribute, value) == offsetof(CUlaunchAttribute, value));
static_assert(offsetof(ours::LaunchAttribute, allowed) ==
              offsetof(CUlaunchAttribute, value.programmaticStreamSerializationAllowed));

}  // namespace
#endif

TEST_CASE("Declarations of the driver are those of cuda.h") {
  // Checked above, at compile time.
  SUCCEED();
}
