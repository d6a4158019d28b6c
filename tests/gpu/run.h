// One problem on a GPU and on the CPU backend: plans, device memory, results.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "src/core/plan.h"
#include "tests/buffers.h"
#include "tests/gpu/setup.h"
#include "tests/grid.h"

namespace sageattn_test {

struct PlanResult {
  PlanOwner plan;
  int32_t status = SAGEATTN_OK;
  std::string message;
  sageattn_plan_info info = {};
  sageattn::PlanConfig config = {};
};

PlanResult make_plan(sageattn_context* context, const Problem& problem, const Numerics& numerics);
// Throws what goes wrong; Skipped if the backend does not run it.
PlanResult must_plan(const Gpu& gpu, const Problem& problem, const Numerics& numerics);

// The numerics that a CUDA plan resolved to, for the CPU backend.
Numerics same_numerics(const Numerics& numerics, const sageattn_plan_info& info);

// A preset as the GPU tests run it: by mma.sync, and by wgmma.
Numerics gpu_preset(int32_t preset, int32_t arch);
Numerics wgmma_preset(int32_t preset);

struct Outcome {
  int32_t status = SAGEATTN_OK;
  std::string message;
  std::vector<unsigned char> out, lse;  // images
  std::vector<int32_t> words;
  std::vector<unsigned char> workspace;
  std::string violation;  // what was written that must not be, or empty
};

// A problem's memory on the device: a workspace of exactly min_workspace bytes, no better aligned
// than promised, with NaN in it and canaries around it.
class DeviceCase {
 public:
  DeviceCase(const Gpu& gpu, const Problem& problem, const Buffers& buffers,
             const sageattn_plan_info& info);

  sageattn_execute_args args() const;
  void* workspace() const { return arena_.data() + offset_; }
  size_t workspace_size() const { return workspace_size_; }
  int32_t execute(const sageattn_plan* plan, cuda::Stream stream, std::string* message = nullptr);

  void replace_inputs(const Buffers& buffers);
  void clear_outputs();
  // Once the work is done.
  void collect(Outcome& outcome) const;

 private:
  const Problem& problem_;
  const Buffers& buffers_;
  cuda::DeviceMemory q_, k_, v_, out_, lse_, cu_q_, cu_kv_, used_, words_;
  size_t workspace_size_, offset_;
  cuda::DeviceMemory arena_;
};

Outcome run_gpu(const Gpu& gpu, const Problem& problem, const Buffers& buffers,
                const PlanResult& plan);
// Throws what goes wrong. The problem has queries.
Outcome must_run(const Gpu& gpu, const Problem& problem, const Buffers& buffers,
                 const PlanResult& plan);
Outcome run_cpu(const Problem& problem, const Buffers& buffers, const PlanResult& plan);

}  // namespace sageattn_test
