// The kernel launches of one execute, as data. Nothing here touches a driver.
#include <algorithm>
#include <bit>
#include <cmath>

#include "include/sageattn.h"
#include "ptx/common/params.h"
#include "ptx/tile/tiles.h"
#include "src/core/error.h"
#include "src/core/region.h"
#include "src/cpu/formats.h"
#include "src/cpu/quantize.h"
#include "src/cuda/backend.h"

namespace sageattn::cuda {
namespace {

View view_of(const PlanConfig& plan, const void* data, const Strides& strides, int32_t dtype,
             int32_t channels) {
  // Packed sequences are told apart by their tokens alone.
  const int64_t batch = plan.batch_mode == SAGEATTN_BATCH_VARLEN ? 0 : strides.batch;
  return {
      const_cast<void*>(data), batch, strides.token, strides.head, strides.dim, dtype, channels};
}

// The limits of a plan may have more blocks than 64 bits can count.
int64_t blocks_of(int64_t a, int64_t b) {
  int64_t product;
  return __builtin_mul_overflow(a, b, &product) ? INT64_MAX : product;
}

// All that the launches of one execute share.
struct Task {
  Task(const PlanConfig& p, const Launch& l)
      : plan(p),
        launch(l),
        shape(p),
        extent(extent_of(p, l)),
        areas(carve(p, extent, l.workspace)) {
    const bool varlen = plan.batch_mode == SAGEATTN_BATCH_VARLEN;
    const bool table = varlen || launch.seqused_kv != nullptr;
    sequences = {table ? areas.sequences : nullptr,
                 launch.batch,
                 launch.qo_len,
                 launch.kv_len,
                 static_cast<i32>(extent.max_q_tiles),
                 static_cast<i32>(extent.max_k_tiles),
                 static_cast<i32>(extent.max_v_groups)};
    heads = {plan.num_qo_heads, plan.num_kv_heads, extent.q_tiles,
             extent.k_tiles,    extent.v_groups,   extent.batch};
    k = view_of(plan, launch.k, launch.k_strides, plan.kv_dtype, plan.head_dim);
    v = view_of(plan, launch.v, launch.v_strides, plan.kv_dtype, plan.head_dim_v);
    product_bf16 = plan.q_dtype == SAGEATTN_F16 && plan.kv_dtype == SAGEATTN_F16 ? 0 : 1;
    v_group = shape.grouped ? plan.promotion_interval : 0;
    v_smooth = plan.smooth_v == SAGEATTN_SMOOTH_V_OFF ? 0 : 1;
    max_code = plan.pv_accum == SAGEATTN_PV_ACCUM_F16 ? 2.25f : 448.0f;
    const bool k_stats = plan.smooth_k == SAGEATTN_SMOOTH_ON, v_stats = shape.v_statistics;
    if (!shape.exact && (k_stats || v_stats)) {
      const int64_t chunks = ceil_div(extent.max_k_tiles * plan.tile.b_k, int64_t{kChunkTokens});
      // From 8192 tokens on tasks of both would take too long.
      stats_split = k_stats && v_stats && chunks >= 4 * kStatsTasks ? 1 : 0;
      stats_tasks = static_cast<i32>(std::min(chunks, int64_t{kStatsTasks})) << stats_split;
      stats_steps =
          ceil_div(chunks, int64_t{kStatsTasks}) * (k_stats && v_stats ? 2 : 1) >> stats_split;
    }
  }

  const PlanConfig& plan;
  const Launch& launch;
  Shape shape;
  Extent extent;
  Areas areas;
  Sequences sequences;
  Heads heads;
  View k, v;
  i32 product_bf16, v_group, v_smooth;
  float max_code;
  // Statistics of `prepare`: tasks for each pair of sequence and kv head, and chunks of a task.
  i32 stats_tasks = 0, stats_split = 0;
  int64_t stats_steps = 0;
};

void resolve_lengths(const Task& t, Sink& sink) {
  const Launch& launch = t.launch;
  const bool counts =
      t.extent.max_q_tiles > 0 && (t.stats_tasks > 0 || t.areas.next_item != nullptr);
  // The table is also what sets the status words.
  if (t.sequences.table == nullptr && launch.status == nullptr && !counts) return;
  SequencesParams p{};
  p.cu_seqlens_q = launch.cu_seqlens_q;
  p.cu_seqlens_kv = launch.cu_seqlens_kv;
  p.seqused_kv = launch.seqused_kv;
  p.status = launch.status;
  p.table = t.areas.sequences;
  p.total_q = launch.total_qo;
  p.total_kv = launch.total_kv;
  p.batch = launch.batch;
  p.qo_len = launch.qo_len;
  p.kv_len = launch.kv_len;
  p.max_qo_len = t.plan.max_qo_len;
  p.max_kv_len = t.plan.max_kv_len;
  p.b_q = t.plan.tile.b_q;
  p.b_k = t.plan.tile.b_k;
  p.v_group = t.v_group;
  if (counts) {
    p.counters = t.areas.counters;
    p.counter_count = static_cast<i32>(t.areas.counter_count);
  }
  p.followed = t.extent.max_q_tiles > 0 ? 1 : 0;
  sink.launch(Kernel::kSequences, 1, &p);
}

// Whether the rows of a tensor cannot be read in pieces of 16 bytes.
bool is_irregular(const View& view) {
  const int64_t size = dtype_size(view.dtype);
  const auto whole = [&](int64_t elements) { return elements * size % 16 == 0; };
  return reinterpret_cast<uintptr_t>(view.data) % 16 != 0 || view.dim != 1 ||
         view.channels % 8 != 0 || !whole(view.batch) || !whole(view.head) || !whole(view.token);
}

// Of prepare, which leaves there what smoothing took out of K's scores, and of attention.
template <class Params>
void set_lse(const Task& t, Params& p) {
  p.lse = t.launch.lse;
  p.lse_batch = t.plan.batch_mode == SAGEATTN_BATCH_VARLEN ? 0 : t.launch.lse_strides.batch;
  p.lse_head = t.launch.lse_strides.head;
  p.lse_token = t.launch.lse_strides.token;
}

void prepare(const Task& t, Sink& sink) {
  const PlanConfig& plan = t.plan;
  PrepareParams p{};
  p.sequences = t.sequences;
  p.heads = t.heads;
  p.q = view_of(plan, t.launch.q, t.launch.q_strides, plan.q_dtype, plan.head_dim);
  p.k = t.k;
  p.v = t.v;
  p.irregular = (is_irregular(p.q) ? kIrregularQ : 0) | (is_irregular(p.k) ? kIrregularK : 0) |
                (is_irregular(p.v) ? kIrregularV : 0);
  p.counters = t.areas.counters;
  p.stats_tasks = t.stats_tasks;
  p.stats_split = t.stats_split;
  p.smooth_q = plan.smooth_q == SAGEATTN_SMOOTH_ON ? 1 : 0;
  p.granularity = plan.qk_granularity;
  if (plan.rotation == SAGEATTN_ROTATION_HADAMARD) {
    p.hadamard_dim = static_cast<i32>(std::bit_ceil(static_cast<uint32_t>(plan.head_dim)));
    p.hadamard_norm = static_cast<float>(1 / std::sqrt(static_cast<double>(p.hadamard_dim)));
  }
  p.product_bf16 = t.product_bf16;
  p.sm_scale = plan.sm_scale;
  p.qk_max_code = plan.qk_format == SAGEATTN_QK_I4 ? 7.0f : 127.0f;
  p.q_codes = t.areas.q_codes;
  p.k_codes = t.areas.k_codes;
  p.v_codes = t.areas.v_codes;
  p.q_scale = t.areas.q_scale;
  p.k_scale = t.areas.k_scale;
  p.k_mean = t.areas.k_mean;
  p.q_mean = t.areas.q_mean;
  if (t.areas.k_mean != nullptr) set_lse(t, p);
  p.v_scale = t.areas.v_scale;
  p.v_mean = t.areas.v_mean;
  p.v_group = t.v_group;
  p.v_smooth = t.v_smooth;
  p.v_max_code = t.max_code;

  const int64_t pairs = t.extent.batch * plan.num_kv_heads;
  const int64_t stats = p.stats_tasks;
  const int64_t tiles =
      PrepareTask({t.shape.d_tile, t.shape.dv_tile}, t.shape.wgmma)
          .tile_tasks<int64_t>(t.extent.max_k_tiles, plan.num_qo_heads / plan.num_kv_heads,
                               t.extent.max_q_tiles);
  // Blocks between a head's statistics and its tiles: more than run at a time, and more where a task of
  // statistics takes longer, but else as few as may be, so that L2 still holds its tokens.
  if (stats > 0) {
    const int64_t between = 1500 + 50 * t.stats_steps;
    p.lag = static_cast<i32>(std::min(pairs, 1 + ceil_div(between, stats + tiles)));
  }
  sink.launch(Kernel::kPrepare, blocks_of(pairs, stats + tiles), &p);
}

AttnParams attention_params(const Task& t) {
  const PlanConfig& plan = t.plan;
  AttnParams p{};
  p.sequences = t.sequences;
  p.heads = t.heads;
  p.q_codes = t.areas.q_codes;
  p.k_codes = t.areas.k_codes;
  p.v_codes = t.areas.v_codes;
  p.q_scale = t.areas.q_scale;
  p.k_scale = t.areas.k_scale;
  p.v_scale = t.areas.v_scale;
  p.v_mean = t.areas.v_mean;
  p.ds = t.areas.ds;
  p.ds_pitch = ds_pitch(plan, t.extent);
  p.out = view_of(plan, t.launch.out, t.launch.out_strides, plan.out_dtype, plan.head_dim_v);
  set_lse(t, p);
  p.lse_biased = t.areas.k_mean != nullptr ? 1 : 0;
  p.mask = plan.mask;
  p.window_left = plan.window_left;
  p.window_right = plan.window_right;
  p.score_scale = cpu::score_scale(plan);
  p.v_grouped = t.shape.grouped ? 1 : 0;
  p.v_group_tiles = std::max(1, plan.promotion_interval / plan.tile.b_k);
  p.out_in_pieces = is_irregular(p.out) ? 0 : 1;
  p.next_item = t.areas.next_item;
  p.v_smooth = t.v_smooth;
  return p;
}

void correct_scores(const Task& t, const AttnParams& p, Sink& sink) {
  CorrectionParams c{};
  c.sequences = t.sequences;
  c.heads = t.heads;
  c.k = t.k;
  c.k_mean = t.areas.k_mean;
  c.q_mean = t.areas.q_mean;
  c.ds = t.areas.ds;
  c.ds_pitch = p.ds_pitch;
  c.first_head = p.first_head;
  c.head_count = p.head_count;
  c.first_q_tile = p.first_q_tile;
  c.q_tile_count = p.q_tile_count;
  c.score_scale = p.score_scale;
  c.product_bf16 = t.product_bf16;
  c.irregular_k = is_irregular(c.k) ? 1 : 0;
  c.b_q = t.plan.tile.b_q;
  c.b_k = t.plan.tile.b_k;
  c.next_item = t.areas.next_item;
  const CorrectionTask task(t.plan.num_qo_heads / t.plan.num_kv_heads, c.first_head, c.head_count,
                            c.q_tile_count);
  const int64_t pieces = task.pieces(t.extent.max_k_tiles * c.b_k);
  sink.launch(Kernel::kCorrection, t.extent.batch * task.parts * task.chunks * pieces, &c);
}

DsRun run_of(const Task& t) {
  return ds_run(t.plan, t.extent, static_cast<int64_t>(t.launch.workspace_size));
}

// A run of at most `run`, from this head and tile of queries on.
void attend_run(const Task& t, const DsRun& run, int64_t head, int64_t tile, AttnParams& p,
                Sink& sink) {
  p.first_head = static_cast<i32>(head);
  p.head_count = static_cast<i32>(std::min(run.heads, t.plan.num_qo_heads - head));
  p.first_q_tile = static_cast<i32>(tile);
  p.q_tile_count = static_cast<i32>(std::min(run.q_tiles, t.extent.max_q_tiles - tile));
  p.followed = head + p.head_count < t.plan.num_qo_heads ||
                       int64_t{p.first_q_tile} + p.q_tile_count < t.extent.max_q_tiles
                   ? 1
                   : 0;
  if (t.areas.ds != nullptr && t.extent.max_k_tiles > 0) correct_scores(t, p, sink);
  sink.launch(Kernel::kAttention, blocks_of(t.extent.batch * p.head_count, p.q_tile_count), &p);
}

// For as many query heads, or tiles of queries of one, at a time as the correction of their scores
// has room.
void attend(const Task& t, Sink& sink) {
  AttnParams p = attention_params(t);
  const DsRun run = run_of(t);
  for (int64_t head = 0; head < t.plan.num_qo_heads; head += run.heads) {
    for (int64_t tile = 0; tile < t.extent.max_q_tiles; tile += run.q_tiles) {
      attend_run(t, run, head, tile, p, sink);
    }
  }
}

void prepare_all(const Task& t, Sink& sink) {
  resolve_lengths(t, sink);
  // Without a query there is nothing to do, and without a key every row is empty, and attention looks
  // at nothing but lengths.
  if (t.extent.max_q_tiles > 0 && t.extent.max_k_tiles > 0) prepare(t, sink);
}

// Counts the launches of a plan's limits, which no grid of an execute exceeds.
class Counter final : public Sink {
 public:
  explicit Counter(const PlanConfig& plan) : plan_(plan) {}
  void launch(Kernel, int64_t blocks, const void*) override {
    ++count;
    if (blocks <= kMaxBlocks) return;
    fail(SAGEATTN_E_UNSUPPORTED,
         "max_batch = %d, max_qo_len = %d, max_kv_len = %d, num_qo_heads = %d, num_kv_heads = %d: "
         "need %lld blocks in one kernel launch, CUDA has at most %lld; lower the limits",
         plan_.max_batch, plan_.max_qo_len, plan_.max_kv_len, plan_.num_qo_heads,
         plan_.num_kv_heads, static_cast<long long>(blocks), static_cast<long long>(kMaxBlocks));
  }
  int64_t count = 0;

 private:
  const PlanConfig& plan_;
};

}  // namespace

void enumerate_launches(const PlanConfig& plan, const Launch& launch, Sink& sink) {
  if (launch.batch == 0) return;
  const Task task(plan, launch);
  prepare_all(task, sink);
  attend(task, sink);
}

StaticInfo static_info(const PlanConfig& plan) {
  Launch launch{};
  launch.batch = plan.max_batch;
  if (plan.batch_mode == SAGEATTN_BATCH_VARLEN) {
    launch.total_qo = plan.max_total_qo;
    launch.total_kv = plan.max_total_kv;
  } else {
    launch.qo_len = plan.max_qo_len;
    launch.kv_len = plan.max_kv_len;
  }
  // Any address but null will do: nothing is launched.
  // NOLINTNEXTLINE(performance-no-int-to-ptr)
  launch.workspace = reinterpret_cast<void*>(uintptr_t{kWorkspaceAlignment});
  launch.workspace_size = static_cast<size_t>(need_of(plan).preferred_bytes);
  // There may be billions of runs. The first is the largest and stands for all.
  const Task task(plan, launch);
  Counter before(plan), each(plan);
  prepare_all(task, before);
  const DsRun run = run_of(task);
  AttnParams p = attention_params(task);
  attend_run(task, run, 0, 0, p, each);
  const int64_t runs = ceil_div(int64_t{plan.num_qo_heads}, run.heads) *
                       ceil_div(task.extent.max_q_tiles, run.q_tiles);
  const int64_t launches = before.count + each.count * runs;
  const KernelUse attention = kernels_of(plan).back();
  return {attention.shared_bytes, attention.threads,
          static_cast<int32_t>(std::min<int64_t>(launches, INT32_MAX))};
}

}  // namespace sageattn::cuda
