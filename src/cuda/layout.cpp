#include "src/cuda/layout.h"

#include <algorithm>

#include "include/sageattn.h"
#include "ptx/tile/dims.h"
#include "ptx/tile/tiles.h"
#include "src/core/region.h"

namespace sageattn::cuda {
namespace {

// Takes aligned pieces off a buffer, or counts them. Products of three limits exceed 64 bits, so
// sizes have 128; the largest possible ones stay below 2^80.
class Carver {
 public:
  explicit Carver(void* base) : base_(static_cast<char*>(base)) {}

  template <typename T>
  T* take(int128 count) {
    const int128 at = size_;
    const int128 bytes = count * static_cast<int128>(sizeof(T));
    size_ += (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
    return base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + static_cast<int64_t>(at));
  }

  int128 size() const { return size_; }

 private:
  char* base_;
  int128 size_ = 0;
};

struct Sizes {
  int128 copies, spare;  // in this order
};

Sizes walk(const PlanConfig& plan, const Extent& e, void* base, Areas& areas) {
  Carver c(base);
  const Shape shape(plan);
  const int128 q_tiles = int128{e.q_tiles} * plan.num_qo_heads;
  const int128 k_tiles = int128{e.k_tiles} * plan.num_kv_heads;
  const int128 v_rows = int128{e.v_groups} * plan.num_kv_heads;
  areas.q_codes = c.take<unsigned char>(q_tiles * plan.tile.b_q * shape.qk_row_bytes);
  areas.k_codes = c.take<unsigned char>(k_tiles * plan.tile.b_k * shape.qk_row_bytes);
  areas.v_codes = c.take<unsigned char>(k_tiles * plan.tile.b_k * shape.v_row_bytes);
  if (!shape.exact) {
    areas.q_scale = c.take<float>(q_tiles * shape.q_groups);
    areas.k_scale = c.take<float>(k_tiles * 4);
    // Tiles that did not find the scales themselves read their inverses behind them.
    areas.v_scale = c.take<float>(v_rows * shape.dv_tile * (shape.v_statistics ? 2 : 1));
    areas.v_mean = c.take<float>(v_rows * shape.dv_tile);
  }
  const bool smooth_q = plan.smooth_q == SAGEATTN_SMOOTH_ON;
  if (smooth_q) areas.q_mean = c.take<float>(q_tiles * shape.d_tile);
  if (plan.smooth_k == SAGEATTN_SMOOTH_ON) {
    areas.k_mean = c.take<float>(int128{e.batch} * plan.num_kv_heads * shape.d_tile);
  }
  Sizes sizes{};
  sizes.copies = c.size();

  areas.sequences = c.take<SequenceEntry>(e.batch);
  if (!shape.exact) {
    const int128 count = int128{e.batch} * plan.num_kv_heads + (shape.v_statistics ? v_rows : 0) +
                         (shape.wgmma ? 1 : 0);
    areas.counters = c.take<i32>(count);
    areas.counter_count = static_cast<i64>(count);
    if (shape.wgmma && base != nullptr) areas.next_item = areas.counters + areas.counter_count - 1;
  }
  if (smooth_q) areas.ds = c.take<float>(0);
  sizes.spare = c.size() - sizes.copies;
  return sizes;
}

// Tiles of `size` that sequences of at most max_len and `total` tokens in all can have.
int64_t tiles_of(int64_t batch, int64_t max_len, int64_t total, int64_t size) {
  return std::min(batch * ceil_div(max_len, size), total / size + batch);
}

Extent make_extent(const PlanConfig& plan, int64_t batch, int64_t max_qo, int64_t total_qo,
                   int64_t max_kv, int64_t total_kv) {
  Extent e{};
  e.batch = batch;
  max_qo = std::min(max_qo, total_qo);
  max_kv = std::min(max_kv, total_kv);
  e.q_tiles = tiles_of(batch, max_qo, total_qo, plan.tile.b_q);
  e.k_tiles = tiles_of(batch, max_kv, total_kv, plan.tile.b_k);
  e.max_q_tiles = ceil_div(max_qo, plan.tile.b_q);
  e.max_k_tiles = ceil_div(max_kv, plan.tile.b_k);
  if (Shape(plan).grouped) {
    e.v_groups = tiles_of(batch, max_kv, total_kv, plan.promotion_interval);
    e.max_v_groups = ceil_div(max_kv, plan.promotion_interval);
  } else {
    e.v_groups = batch;
    e.max_v_groups = 1;
  }
  return e;
}

// Of ds: one tile of queries of one head.
int128 ds_row_bytes(const PlanConfig& plan, const Extent& extent) {
  return int128{ds_pitch(plan, extent)} * int128{sizeof(float)};
}

}  // namespace

Shape::Shape(const PlanConfig& plan) {
  exact = plan.qk_format == SAGEATTN_QK_NONE;
  wgmma = !exact && plan.kernel == SAGEATTN_KERNEL_WGMMA;
  grouped = !exact &&
            (plan.v_scale == SAGEATTN_V_SCALE_GROUP || plan.smooth_v == SAGEATTN_SMOOTH_V_GROUP);
  v_statistics = !exact && (!grouped || wgmma);
  const HeadDims dims = head_dims(plan.head_dim, plan.head_dim_v);
  d_tile = dims.qk;
  dv_tile = dims.v;
  // wgmma has no product of 4-bit codes: they lie in bytes.
  const bool nibbles = plan.qk_format == SAGEATTN_QK_I4 && !wgmma;
  qk_row_bytes = exact ? d_tile * 2 : nibbles ? d_tile / 2 : d_tile;
  v_row_bytes = plan.pv_format == SAGEATTN_PV_E4M3 ? dv_tile : dv_tile * 2;
  q_groups = plan.tile.b_q / plan.tile.rows_per_warp * 8;
}

Extent extent_of(const PlanConfig& plan) {
  return make_extent(plan, plan.max_batch, plan.max_qo_len, plan.max_total_qo, plan.max_kv_len,
                     plan.max_total_kv);
}

Extent extent_of(const PlanConfig& plan, const Launch& launch) {
  if (plan.batch_mode == SAGEATTN_BATCH_VARLEN) {
    return make_extent(plan, launch.batch, plan.max_qo_len, launch.total_qo, plan.max_kv_len,
                       launch.total_kv);
  }
  return make_extent(plan, launch.batch, launch.qo_len, int64_t{launch.batch} * launch.qo_len,
                     launch.kv_len, int64_t{launch.batch} * launch.kv_len);
}

int64_t ds_pitch(const PlanConfig& plan, const Extent& extent) {
  return extent.k_tiles * plan.tile.b_k;
}

Need need_of(const PlanConfig& plan) {
  Areas areas{};
  const Extent extent = extent_of(plan);
  const Sizes sizes = walk(plan, extent, nullptr, areas);
  int128 least = 0, most = 0;
  if (plan.smooth_q == SAGEATTN_SMOOTH_ON) {
    const int128 row = ds_row_bytes(plan, extent);
    const int128 all = row * extent.max_q_tiles * plan.num_qo_heads;
    least = std::min(all, std::max(row, kSpareBytes - sizes.spare));
    most = std::min(all, std::max(least, kPreferredSpareBytes - sizes.spare));
  }
  const int128 fixed = sizes.copies + sizes.spare;
  if (fixed + most > INT64_MAX) return {-1, -1, -1};
  return {static_cast<int64_t>(sizes.copies), static_cast<int64_t>(fixed + least),
          static_cast<int64_t>(fixed + most)};
}

Areas carve(const PlanConfig& plan, const Extent& extent, void* workspace) {
  Areas areas{};
  walk(plan, extent, workspace, areas);
  return areas;
}

DsRun ds_run(const PlanConfig& plan, const Extent& extent, int64_t bytes) {
  const DsRun all{plan.num_qo_heads, extent.max_q_tiles};
  const int128 row = ds_row_bytes(plan, extent);
  if (plan.smooth_q != SAGEATTN_SMOOTH_ON || row == 0 || all.q_tiles == 0) return all;
  Areas areas{};
  const Sizes sizes = walk(plan, extent, nullptr, areas);
  // Of the correction, for each kCorrectionTiles tiles of queries of a head at most.
  const int64_t blocks = extent.batch * CorrectionTask::pieces(extent.max_k_tiles * plan.tile.b_k);
  const int64_t chunks = std::max<int64_t>(kMaxBlocks / blocks, 1);
  const int128 rows = std::min<int128>({(bytes - sizes.copies - sizes.spare) / row,
                                        kMaxBlocks / extent.batch, chunks * kCorrectionTiles});
  if (rows < all.q_tiles) return {1, static_cast<int64_t>(rows)};
  const int64_t heads = std::min(
      std::max<int64_t>(chunks / ceil_div(all.q_tiles, int64_t{kCorrectionTiles}), 1), all.heads);
  return {static_cast<int64_t>(std::min<int128>(rows / all.q_tiles, heads)), all.q_tiles};
}

}  // namespace sageattn::cuda
