// libcuda, found at run time: the CUDA types that are needed, declared here so that no toolkit is
// (tests/test_cuda_decls.cpp compares them with cuda.h), and a table of entry points.
#pragma once

#include <cstddef>
#include <cstdint>

// The driver's opaque objects, under its own names: so its handles are ours.
struct CUctx_st;
struct CUmod_st;
struct CUfunc_st;
struct CUstream_st;
struct CUevent_st;
struct CUgraph_st;
struct CUgraphExec_st;

namespace sageattn::cuda {

using Result = int;  // an enumeration in cuda.h, as are the attributes
using Device = int;
using DeviceAttribute = int;
using FunctionAttribute = int;
using PointerAttribute = int;
using DevicePointer = unsigned long long;
using Context = CUctx_st*;
using Module = CUmod_st*;
using Function = CUfunc_st*;
using Stream = CUstream_st*;
using Event = CUevent_st*;
using Graph = CUgraph_st*;
using GraphExec = CUgraphExec_st*;

inline constexpr Result kSuccess = 0;
inline constexpr Result kErrorOutOfMemory = 2;
inline constexpr Result kErrorInvalidImage = 200;
inline constexpr Result kErrorNoBinaryForGpu = 209;
inline constexpr Result kErrorInvalidHandle = 400;
inline constexpr Result kErrorSystemDriverMismatch = 803;
inline constexpr Result kErrorCompatNotSupported = 804;

inline constexpr DeviceAttribute kDeviceClockRate = 13;
inline constexpr DeviceAttribute kDeviceMultiprocessorCount = 16;
inline constexpr DeviceAttribute kDeviceL2CacheSize = 38;
inline constexpr DeviceAttribute kDeviceMajor = 75;
inline constexpr DeviceAttribute kDeviceMinor = 76;
inline constexpr DeviceAttribute kDevicePageableMemoryAccess = 88;
inline constexpr DeviceAttribute kDeviceMaxSharedMemoryOptin = 97;

inline constexpr FunctionAttribute kFunctionMaxThreads = 0;
inline constexpr FunctionAttribute kFunctionSharedSize = 1;
inline constexpr FunctionAttribute kFunctionLocalSize = 3;
inline constexpr FunctionAttribute kFunctionRegisters = 4;
inline constexpr FunctionAttribute kFunctionMaxDynamicShared = 8;

inline constexpr PointerAttribute kPointerMemoryType = 2;
inline constexpr PointerAttribute kPointerDevicePointer = 3;
inline constexpr PointerAttribute kPointerHostPointer = 4;
inline constexpr PointerAttribute kPointerDeviceOrdinal = 9;
inline constexpr PointerAttribute kPointerAccessFlags = 16;
inline constexpr unsigned kMemoryTypeDevice = 2;

// For cuGetProcAddress: a null stream is the legacy default stream, whatever the caller was compiled
// for.
inline constexpr uint64_t kLegacyStream = 1;
inline constexpr unsigned kMemAttachGlobal = 1;
inline constexpr int kCaptureModeThreadLocal = 1;
inline constexpr unsigned kStreamNonBlocking = 1;

inline constexpr int kLaunchProgrammaticSerialization = 6;  // value: whether allowed

// Attributes of a launch.
struct LaunchAttribute {
  int id;
  char pad[4];
  union {
    int allowed;
    alignas(8) char value[64];
  };
};

struct LaunchConfig {
  unsigned grid_x, grid_y, grid_z;
  unsigned block_x, block_y, block_z;
  unsigned shared_bytes;
  Stream stream;
  LaunchAttribute* attributes;
  unsigned num_attributes;
};

// Lowest CUDA version of a driver: the first that knows sm_89 and sm_90 and has cuLaunchKernelEx.
inline constexpr int kMinDriverVersion = 11080;

struct Driver {
  int version;        // of CUDA, e.g. 12080
  char library[256];  // the file it was loaded from
#define CUDA_FUNCTION(name, since, required, arguments) Result(*name) arguments;
#include "src/cuda/driver.def"
#undef CUDA_FUNCTION
};

// Loads a driver library and initialises it. Fails with E_NO_DEVICE or E_DRIVER_TOO_OLD. The
// library stays loaded for ever: streams and modules of the process live in it.
Driver load_driver(const char* library);

// libcuda.so.1, loaded by the first call; what failed then fails again.
const Driver& driver();

// cuPointerGetAttributes of a libcuda.so.1 that is in the process, initialised or not, else null. Loads
// nothing and looks for nothing on disk.
using PointerGetAttributes = decltype(Driver::PointerGetAttributes);
PointerGetAttributes find_loaded_pointer_query();

// Fails with E_CUDA (E_OUT_OF_MEMORY for want of memory), quoting the driver, unless the call
// succeeded. `call` says what was tried, e.g. "cuModuleLoadData(attn_sm80)".
[[gnu::format(printf, 3, 4)]] void check(const Driver& driver, Result result, const char* call,
                                         ...);

}  // namespace sageattn::cuda
