#include "src/core/plan.h"

#include <algorithm>
#include <cstdio>

#include "src/core/error.h"
#include "src/core/select.h"
#include "src/core/validate.h"
#include "src/cpu/backend.h"
#include "src/cuda/pointers.h"

namespace sageattn {
namespace {

// "cpu_wgmma_i8_e4m3": backend, kernel family, formats of QK and PV.
void name_kernel(const PlanConfig& plan, char* name, size_t capacity) {
  if (plan.backend == SAGEATTN_BACKEND_CUDA) {
    std::snprintf(name, capacity, "%s", cuda::kernel_name(plan).c_str());
    return;
  }
  if (plan.qk_format == SAGEATTN_QK_NONE) {
    std::snprintf(name, capacity, "cpu_exact");
    return;
  }
  // Indexed by SAGEATTN_KERNEL_*, SAGEATTN_QK_* and SAGEATTN_PV_*.
  static constexpr const char* kKernels[] = {"", "mma_sync", "wgmma"};
  static constexpr const char* kQkFormats[] = {"", "i8", "i4", "", "e4m3"};
  static constexpr const char* kPvFormats[] = {"", "e4m3", "f16", "", "e5m2", "i8"};
  std::snprintf(name, capacity, "cpu_%s_%s_%s", kKernels[plan.kernel], kQkFormats[plan.qk_format],
                kPvFormats[plan.pv_format]);
}

[[noreturn]] void fail_too_many_tiles(const PlanConfig& plan) {
  // The CPU backend quantizes Q as it goes.
  char queries[160] = "";
  if (plan.backend == SAGEATTN_BACKEND_CUDA) {
    std::snprintf(queries, sizeof queries,
                  ", max_qo_len = %d, max_total_qo = %lld, num_qo_heads = %d", plan.max_qo_len,
                  static_cast<long long>(plan.max_total_qo), plan.num_qo_heads);
  }
  fail(SAGEATTN_E_INVALID_ARGUMENT,
       "max_batch = %d%s, max_kv_len = %d, max_total_kv = %lld, num_kv_heads = %d: more tiles than "
       "a "
       "workspace can hold; lower the limits",
       plan.max_batch, queries, plan.max_kv_len, static_cast<long long>(plan.max_total_kv),
       plan.num_kv_heads);
}

WorkspaceNeed workspace_need(const sageattn_plan_info& info) {
  return {info.min_workspace, info.workspace_alignment};
}

}  // namespace

PlanSpec specify_plan(const Context& context, const sageattn_attn_desc& desc) {
  PlanSpec spec{};
  const PlanConfig& plan = spec.config = check_attn_desc(desc, context.backend(), context.arch());

  sageattn_plan_info& info = spec.info;
  info.struct_size = sizeof info;
  info.backend = plan.backend;
  info.arch = plan.arch;
  info.origin = SAGEATTN_ORIGIN_BUILTIN;

  if (plan.backend == SAGEATTN_BACKEND_CUDA) {
    cuda::check_supported(plan);
    const cuda::Need need = cuda::need_of(plan);
    info.min_workspace = need.min_bytes;
    info.preferred_workspace = need.preferred_bytes;
    info.workspace_alignment = cuda::kWorkspaceAlignment;
  } else {
    info.min_workspace = info.preferred_workspace = cpu::workspace_bytes(plan, context.threads());
    info.workspace_alignment = cpu::kWorkspaceAlignment;
  }
  if (info.min_workspace < 0) fail_too_many_tiles(plan);
  if (plan.backend == SAGEATTN_BACKEND_CUDA) {
    const cuda::StaticInfo facts = cuda::static_info(plan);
    info.smem_bytes = facts.smem_bytes;
    info.threads = facts.threads;
    info.launches = facts.launches;
    info.num_kernels = static_cast<int32_t>(cuda::kernels_of(plan).size());
  }

  info.b_q = plan.tile.b_q;
  info.b_k = plan.tile.b_k;
  info.promotion_interval = plan.promotion_interval;
  info.q_dtype = plan.q_dtype;
  info.kv_dtype = plan.kv_dtype;
  info.out_dtype = plan.out_dtype;
  info.head_dim_v = plan.head_dim_v;
  info.num_kv_heads = plan.num_kv_heads;
  info.sm_scale = plan.sm_scale;
  info.qk_format = plan.qk_format;
  info.qk_granularity = plan.qk_granularity;
  info.smooth_q = plan.smooth_q;
  info.smooth_k = plan.smooth_k;
  info.smooth_v = plan.smooth_v;
  info.v_scale = plan.v_scale;
  info.rotation = plan.rotation;
  info.pv_format = plan.pv_format;
  info.row_sum = plan.row_sum;
  info.pv_accum = plan.pv_accum;
  info.kernel = plan.kernel;
  info.pv_model = has_pv_model(plan.pv_format, plan.pv_accum) ? plan.pv_model : 0;
  name_kernel(plan, info.kernel_name, sizeof info.kernel_name);
  return spec;
}

Plan::Plan(Context& context, const PlanSpec& spec) : context_(context), spec_(spec) {
  if (spec.config.backend == SAGEATTN_BACKEND_CUDA) {
    program_.emplace(spec.config, context.target(), context.store());
    const sageattn_kernel_info& attention = program_->kernels().back();
    spec_.info.registers = attention.registers;
    spec_.info.spill_bytes = attention.spill_bytes;
    for (const sageattn_kernel_info& kernel : program_->kernels()) {
      spec_.info.compile_ms += kernel.compile_ms;
      spec_.info.origin = std::max(spec_.info.origin, kernel.origin);
    }
  }
  context_.retain();  // last: nothing fails any more
}

Plan* Plan::create(Context& context, const sageattn_attn_desc& desc) {
  Plan* plan = context.memory().make<Plan>(context, specify_plan(context, desc));
  context.log(SAGEATTN_LOG_INFO, "plan: %s, head_dim %d, head_dim_v %d, workspace %lld bytes",
              plan->info().kernel_name, plan->spec_.config.head_dim, plan->spec_.config.head_dim_v,
              static_cast<long long>(plan->info().min_workspace));
  return plan;
}

void Plan::destroy() {
  Context& context = context_;
  context.memory().destroy(this);
  context.release();
}

void Plan::execute(const sageattn_execute_args& args, void* workspace, size_t workspace_size,
                   CUstream_st* stream, cuda::Observer* observer) const {
  const Launch launch =
      check_execute_args(spec_.config, workspace_need(spec_.info), args, workspace, workspace_size);
  if (program_) return program_->launch(spec_.config, launch, stream, observer);
  if (stream != nullptr) {
    fail(SAGEATTN_E_INVALID_ARGUMENT, "stream = %p: must be NULL with the CPU backend",
         static_cast<void*>(stream));
  }
  cuda::check_on_host(launch.operands);
  cpu::execute(spec_.config, launch, context_.pool());
}

}  // namespace sageattn
