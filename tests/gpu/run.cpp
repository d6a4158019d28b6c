#include "tests/gpu/run.h"

#include <algorithm>
#include <cstring>

namespace sageattn_test {

namespace {

constexpr size_t kWorkspaceGuard = 1 << 16;  // bytes

std::vector<unsigned char> download(const cuda::DeviceMemory& memory) {
  std::vector<unsigned char> content(memory.size());
  memory.download(content.data(), content.size());
  return content;
}

}  // namespace

PlanResult make_plan(sageattn_context* context, const Problem& p, const Numerics& numerics) {
  sageattn_attn_desc desc = make_desc(p, numerics);
  set_limits(p, desc);
  PlanResult result;
  sageattn_error error = {};
  error.struct_size = sizeof error;
  sageattn_plan* plan = nullptr;
  result.status = sageattn_plan_create(context, &desc, &plan, &error);
  result.message = error.message;
  if (result.status != SAGEATTN_OK) return result;
  result.plan.reset(plan);
  result.info.struct_size = sizeof result.info;
  must(sageattn_plan_get_info(plan, &result.info, &error), error);
  result.config =
      sageattn::specify_plan(*reinterpret_cast<const sageattn::Context*>(context), desc).config;
  return result;
}

PlanResult must_plan(const Gpu& gpu, const Problem& p, const Numerics& numerics) {
  PlanResult plan = make_plan(gpu.context(), p, numerics);
  if (plan.status == SAGEATTN_E_UNSUPPORTED) throw Skipped(plan.message);
  if (plan.status != SAGEATTN_OK) throw std::runtime_error(plan.message);
  return plan;
}

Numerics same_numerics(const Numerics& numerics, const sageattn_plan_info& info) {
  Numerics same = numerics;
  same.arch = info.arch;
  if (info.qk_format == SAGEATTN_QK_NONE) return same;
  sageattn_attn_desc& d = same.desc;
  d.qk_format = info.qk_format;
  d.qk_granularity = info.qk_granularity;
  d.smooth_q = info.smooth_q;
  d.smooth_k = info.smooth_k;
  d.smooth_v = info.smooth_v;
  d.v_scale = info.v_scale;
  d.rotation = info.rotation;
  d.pv_format = info.pv_format;
  d.row_sum = info.row_sum;
  d.pv_accum = info.pv_accum;
  d.promotion_interval = info.promotion_interval;
  d.kernel = info.kernel;
  return same;
}

Numerics gpu_preset(int32_t preset, int32_t arch) {
  Numerics numerics = preset_numerics(preset, arch);
  if (preset != SAGEATTN_PRESET_EXACT) numerics.desc.kernel = SAGEATTN_KERNEL_MMA_SYNC;
  return numerics;
}

Numerics wgmma_preset(int32_t preset) {
  Numerics numerics = preset_numerics(preset, 90);
  numerics.name += "+wgmma";
  numerics.desc.kernel = SAGEATTN_KERNEL_WGMMA;
  numerics.max_dim = 128;
  return numerics;
}

DeviceCase::DeviceCase(const Gpu& gpu, const Problem& p, const Buffers& buffers,
                       const sageattn_plan_info& info)
    : problem_(p),
      buffers_(buffers),
      q_(cuda::DeviceMemory::copy_of(gpu.api, buffers.q.image)),
      k_(cuda::DeviceMemory::copy_of(gpu.api, buffers.k.image)),
      v_(cuda::DeviceMemory::copy_of(gpu.api, buffers.v.image)),
      out_(cuda::DeviceMemory::copy_of(gpu.api, buffers.out.image)),
      lse_(cuda::DeviceMemory::copy_of(gpu.api, buffers.lse.image)),
      cu_q_(cuda::DeviceMemory::copy_of(gpu.api, buffers.cu_q)),
      cu_kv_(cuda::DeviceMemory::copy_of(gpu.api, buffers.cu_kv)),
      used_(cuda::DeviceMemory::copy_of(gpu.api, buffers.used)),
      words_(cuda::DeviceMemory::copy_of(gpu.api, buffers.status)),
      workspace_size_(static_cast<size_t>(info.min_workspace)),
      offset_(kWorkspaceGuard + static_cast<size_t>(info.workspace_alignment)),
      arena_(gpu.api, offset_ + workspace_size_ + kWorkspaceGuard) {
  std::vector<unsigned char> image(arena_.size(), kWorkspaceCanary);
  std::memset(&image[offset_], 0xFF, workspace_size_);
  arena_.upload(image.data(), image.size());
}

sageattn_execute_args DeviceCase::args() const {
  return make_args(problem_, buffers_,
                   {q_.data(), k_.data(), v_.data(), out_.data(), lse_.data(), cu_q_.as<int32_t>(),
                    cu_kv_.as<int32_t>(), used_.as<int32_t>(), words_.as<int32_t>()});
}

int32_t DeviceCase::execute(const sageattn_plan* plan, cuda::Stream stream, std::string* message) {
  sageattn_error error = {};
  error.struct_size = sizeof error;
  const sageattn_execute_args a = args();
  const int32_t status = sageattn_execute(plan, &a, workspace(), workspace_size_, stream, &error);
  if (message != nullptr) *message = error.message;
  return status;
}

void DeviceCase::replace_inputs(const Buffers& b) {
  q_.upload(b.q.image.data(), b.q.image.size());
  k_.upload(b.k.image.data(), b.k.image.size());
  v_.upload(b.v.image.data(), b.v.image.size());
}

void DeviceCase::clear_outputs() {
  out_.fill(kCanary);
  lse_.fill(kCanary);
}

void DeviceCase::collect(Outcome& outcome) const {
  outcome.out = download(out_);
  outcome.lse = download(lse_);
  outcome.words.resize(buffers_.status.size());
  words_.download(outcome.words.data(), words_.size());
  const std::vector<unsigned char> arena = download(arena_);
  const auto start = arena.begin() + static_cast<int64_t>(offset_);
  const auto end = start + static_cast<int64_t>(workspace_size_);
  outcome.workspace.assign(start, end);
  const auto canary = [](unsigned char x) { return x == kWorkspaceCanary; };
  if (!std::all_of(arena.begin(), start, canary) || !std::all_of(end, arena.end(), canary)) {
    outcome.violation = "memory around the workspace was written";
  }
  if (!status_guards_hold(outcome.words)) {
    outcome.violation = "memory around the status words was written";
  }
  if (download(q_) != buffers_.q.image || download(k_) != buffers_.k.image ||
      download(v_) != buffers_.v.image) {
    outcome.violation = "an input was written";
  }
}

Outcome run_gpu(const Gpu& gpu, const Problem& p, const Buffers& buffers, const PlanResult& plan) {
  const cuda::CurrentContext current(gpu.api, gpu.device);
  const cuda::StreamOwner stream(gpu.api);
  DeviceCase on_device(gpu, p, buffers, plan.info);
  Outcome outcome;
  outcome.status = on_device.execute(plan.plan.get(), stream.get(), &outcome.message);
  stream.wait();
  on_device.collect(outcome);
  return outcome;
}

Outcome must_run(const Gpu& gpu, const Problem& p, const Buffers& buffers, const PlanResult& plan) {
  Outcome outcome = run_gpu(gpu, p, buffers, plan);
  if (outcome.status != SAGEATTN_OK) throw std::runtime_error(outcome.message);
  if (!outcome.violation.empty()) throw std::runtime_error(outcome.violation);
  if (outcome.out == buffers.out.image) throw std::runtime_error("nothing was written");
  return outcome;
}

Outcome run_cpu(const Problem& p, const Buffers& buffers, const PlanResult& plan) {
  Buffers copy = buffers;
  const sageattn_execute_args args = make_args(p, copy, addresses_of(copy));
  const auto alignment = static_cast<size_t>(plan.info.workspace_alignment);
  const auto size = static_cast<size_t>(plan.info.min_workspace);
  std::vector<unsigned char> arena(size + alignment);
  unsigned char* workspace = arena.data();
  while (reinterpret_cast<uintptr_t>(workspace) % alignment != 0) ++workspace;
  sageattn_error error = {};
  error.struct_size = sizeof error;
  Outcome outcome;
  outcome.status = sageattn_execute(plan.plan.get(), &args, workspace, size, nullptr, &error);
  outcome.message = error.message;
  outcome.out = copy.out.image;
  outcome.lse = copy.lse.image;
  outcome.words = copy.status;
  return outcome;
}

}  // namespace sageattn_test
