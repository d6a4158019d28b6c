// The CUDA backend: what src/core needs of it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "include/sageattn.h"
#include "src/core/config.h"
#include "src/core/error.h"
#include "src/cuda/device.h"
#include "src/cuda/kernels.h"
#include "src/cuda/layout.h"
#include "src/jit/store.h"

namespace sageattn::cuda {

// What a context compiles for, and where it runs.
struct Target {
  int32_t arch;              // features: 80, 86, 89, 90, 120
  int32_t binary;            // kernels are compiled for sm_<binary>
  const DeviceInfo* device;  // null: plans can be made, queried and exported, but not executed
  Error no_device;           // then, why
};

// target_arch 0: the device's own. Otherwise the device need not exist, nor be of that arch, until
// something is executed. Fails as open_device.
Target find_target(int32_t ordinal, int32_t target_arch);

// Lines "key: value" for sageattn_context_report.
std::string describe(const Target& target);

// What of sageattn_plan_info is known without compiling.
struct StaticInfo {
  int32_t smem_bytes, threads;  // of the attention kernel
  int32_t launches;             // with the preferred workspace; INT32_MAX if there are more
};
// Fails with UNSUPPORTED if a launch within the plan's limits could need more than kMaxBlocks.
StaticInfo static_info(const PlanConfig& plan);

// Sees each kernel launch, in order; each starts when the last has ended. For benchmarks and tests.
class Observer {
 public:
  virtual ~Observer() = default;
  virtual void before(const std::string& kernel, int64_t blocks) = 0;
  virtual void after() = 0;
};

// A plan's kernels, compiled and, if the target has a device, loaded. Immutable.
class Program {
 public:
  // The plan has passed check_supported. Fails as KernelStore::get and with E_CUDA.
  Program(const PlanConfig& plan, const Target& target, jit::KernelStore& store);

  // Enqueues one checked launch: no allocation, no synchronisation, nothing that a stream capture
  // forbids. The current context of the thread is what it was afterwards.
  void launch(const PlanConfig& plan, const Launch& launch, Stream stream,
              Observer* observer = nullptr) const;

  // In the order of an execute.
  const std::vector<sageattn_kernel_info>& kernels() const { return infos_; }

  // For sageattn_plan_export_blob.
  const std::vector<std::shared_ptr<const jit::KernelImage>>& images() const { return images_; }

 private:
  struct Loaded {
    Function function = nullptr;
    int threads = 0, shared_bytes = 0;
    bool stays = false;
    std::string name;
  };

  Target target_;
  Loaded kernels_[kNumKernels];  // by Kernel
  std::vector<sageattn_kernel_info> infos_;
  std::vector<std::shared_ptr<const jit::KernelImage>> images_;
};

// Receives the launches of an execute: where Program sends them to the driver, a test looks at them.
class Sink {
 public:
  virtual ~Sink() = default;
  // `params`: one of the structs of ptx/common/params.h, valid during the call.
  virtual void launch(Kernel kernel, int64_t blocks, const void* params) = 0;
};

// The launches of one execute, in order.
void enumerate_launches(const PlanConfig& plan, const Launch& launch, Sink& sink);

}  // namespace sageattn::cuda
