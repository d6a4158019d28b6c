// How the CUDA backend divides a workspace, which plans it takes, and what it launches. No GPU: all
// of it is arithmetic on the host.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "include/sageattn.h"
#include "ptx/tile/tiles.h"
#include "src/core/error.h"
#include "src/core/select.h"
#include "src/core/validate.h"
#include "src/cuda/backend.h"
#include "tests/catch.h"

using namespace sageattn;

namespace {

struct Case {
  const char* name;
  int32_t preset, arch;
  int32_t head_dim, head_dim_v, qo_heads, kv_heads, batch, qo_len, kv_len;
  bool varlen;
  int32_t kernel = SAGEATTN_KERNEL_AUTO;
};

const Case kCases[] = {
    {"small", SAGEATTN_PRESET_SAGE2_8B, 89, 64, 64, 2, 1, 1, 1, 1, false},
    {"plain", SAGEATTN_PRESET_SAGE2_8B, 89, 128, 128, 32, 32, 4, 4096, 4096, false},
    {"hopper", SAGEATTN_PRESET_AUTO, 90, 128, 128, 32, 8, 2, 1000, 3000, false},
    {"sage1", SAGEATTN_PRESET_SAGE1, 80, 80, 80, 12, 4, 3, 77, 1500, false},
    {"4b", SAGEATTN_PRESET_SAGE2_4B, 89, 128, 128, 32, 32, 4, 4096, 4096, false},
    {"4b long", SAGEATTN_PRESET_SAGE2_4B, 89, 128, 128, 32, 32, 1, 32768, 32768, false},
    {"pp", SAGEATTN_PRESET_SAGE2PP, 120, 40, 100, 6, 3, 2, 300, 200, false},
    {"wide", SAGEATTN_PRESET_SAGE1, 86, 192, 128, 16, 16, 2, 500, 500, false},
    {"wide v", SAGEATTN_PRESET_SAGE1, 86, 64, 256, 16, 2, 2, 500, 500, false},
    {"exact", SAGEATTN_PRESET_EXACT, 90, 128, 128, 8, 8, 2, 600, 700, false},
    {"4b longer", SAGEATTN_PRESET_SAGE2_4B, 89, 128, 128, 8, 8, 4, 32768, 32768, false},
    {"4b longest", SAGEATTN_PRESET_SAGE2_4B, 89, 64, 64, 1, 1, 1, 1 << 22, 1 << 22, false},
    {"packed", SAGEATTN_PRESET_SAGE2_8B, 89, 128, 128, 8, 4, 50, 2000, 3000, true},
    {"packed 4b", SAGEATTN_PRESET_SAGE2_4B, 89, 64, 64, 8, 4, 7, 300, 300, true},
    // check_supported refuses these as yet.
    {"wgmma", SAGEATTN_PRESET_SAGE2_8B, 90, 128, 128, 32, 8, 2, 1000, 3000, false,
     SAGEATTN_KERNEL_WGMMA},
    {"packed wgmma 4b", SAGEATTN_PRESET_SAGE2_4B, 90, 64, 64, 8, 4, 7, 300, 3000, true,
     SAGEATTN_KERNEL_WGMMA},
};

sageattn_attn_desc desc_of(const Case& c) {
  sageattn_attn_desc desc = preset_desc(c.preset);
  desc.q_dtype = SAGEATTN_BF16;
  desc.head_dim = c.head_dim;
  desc.head_dim_v = c.head_dim_v;
  desc.num_qo_heads = c.qo_heads;
  desc.num_kv_heads = c.kv_heads;
  desc.max_batch = c.batch;
  desc.max_qo_len = c.qo_len;
  desc.max_kv_len = c.kv_len;
  desc.kernel = c.kernel;
  if (c.varlen) {
    desc.batch_mode = SAGEATTN_BATCH_VARLEN;
    desc.max_total_qo = int64_t{c.batch} * c.qo_len / 3;
    desc.max_total_kv = int64_t{c.batch} * c.kv_len / 2;
  }
  return desc;
}

PlanConfig plan_of(const Case& c) {
  return check_attn_desc(desc_of(c), SAGEATTN_BACKEND_CUDA, c.arch);
}

Launch launch_of(const PlanConfig& plan, int64_t workspace_size) {
  Launch launch{};
  launch.batch = plan.max_batch;
  if (plan.batch_mode == SAGEATTN_BATCH_VARLEN) {
    launch.total_qo = plan.max_total_qo;
    launch.total_kv = plan.max_total_kv;
  } else {
    launch.qo_len = plan.max_qo_len;
    launch.kv_len = plan.max_kv_len;
  }
  launch.workspace = reinterpret_cast<void*>(uintptr_t{1} << 40);  // looked at by nobody
  launch.workspace_size = static_cast<size_t>(workspace_size);
  return launch;
}

// Start and size of each area, in bytes, as the kernels use it.
std::vector<std::pair<const void*, int64_t>> pieces(const PlanConfig& plan, const cuda::Extent& e,
                                                    const cuda::Areas& a) {
  const cuda::Shape s(plan);
  const int64_t q_tiles = e.q_tiles * plan.num_qo_heads, k_tiles = e.k_tiles * plan.num_kv_heads;
  const int64_t v_rows = e.v_groups * plan.num_kv_heads;
  return {{a.sequences, e.batch * int64_t{sizeof(SequenceEntry)}},
          // Of K, of V, and attention's.
          {a.counters,
           (e.batch * plan.num_kv_heads + (s.v_statistics ? v_rows : 0) + (s.wgmma ? 1 : 0)) * 4},
          {a.q_codes, q_tiles * plan.tile.b_q * s.qk_row_bytes},
          {a.k_codes, k_tiles * plan.tile.b_k * s.qk_row_bytes},
          {a.v_codes, k_tiles * plan.tile.b_k * s.v_row_bytes},
          {a.q_scale, q_tiles * 32 * 4},
          {a.k_scale, k_tiles * 4 * 4},
          {a.v_scale, v_rows * s.dv_tile * 4 * (s.v_statistics ? 2 : 1)},
          {a.v_mean, v_rows * s.dv_tile * 4},
          {a.k_mean, e.batch * plan.num_kv_heads * s.d_tile * 4},
          {a.q_mean, q_tiles * s.d_tile * 4}};
}

struct Recorder final : cuda::Sink {
  struct Entry {
    cuda::Kernel kernel;
    int64_t blocks;
    AttnParams attention;
    CorrectionParams correction;
    PrepareParams prepare;
    SequencesParams sequences;
  };
  void launch(cuda::Kernel kernel, int64_t blocks, const void* params) override {
    Entry entry{kernel, blocks, {}, {}, {}, {}};
    if (kernel == cuda::Kernel::kSequences) {
      std::memcpy(&entry.sequences, params, sizeof entry.sequences);
    }
    if (kernel == cuda::Kernel::kAttention) {
      std::memcpy(&entry.attention, params, sizeof entry.attention);
    }
    if (kernel == cuda::Kernel::kCorrection) {
      std::memcpy(&entry.correction, params, sizeof entry.correction);
    }
    if (kernel == cuda::Kernel::kPrepare) {
      std::memcpy(&entry.prepare, params, sizeof entry.prepare);
    }
    entries.push_back(entry);
  }
  std::vector<Entry> entries;
};

int32_t status_of(const sageattn_attn_desc& desc, int32_t arch, std::string* message = nullptr) {
  try {
    cuda::check_supported(check_attn_desc(desc, SAGEATTN_BACKEND_CUDA, arch));
  } catch (const Error& error) {
    if (message != nullptr) *message = error.message;
    return error.status;
  }
  return SAGEATTN_OK;
}

}  // namespace

TEST_CASE("CUDA workspace: areas lie apart, aligned, within the size asked for") {
  for (const Case& c : kCases) {
    INFO(c.name);
    const PlanConfig plan = plan_of(c);
    const cuda::Need need = cuda::need_of(plan);
    REQUIRE(need.min_bytes > 0);
    CHECK(need.preferred_bytes >= need.min_bytes);

    // Of the largest launch, and of smaller ones: they must not need more.
    for (const int divisor : {1, 2, 7}) {
      Launch launch = launch_of(plan, need.min_bytes);
      launch.batch = std::max(1, launch.batch / divisor);
      launch.qo_len /= divisor;
      launch.kv_len /= divisor;
      launch.total_qo /= divisor;
      launch.total_kv /= divisor;
      const cuda::Extent e = cuda::extent_of(plan, launch);
      const cuda::Areas areas = cuda::carve(plan, e, launch.workspace);
      auto list = pieces(plan, e, areas);
      const cuda::DsRun run = cuda::ds_run(plan, e, need.min_bytes);
      CHECK(run.heads >= 1);
      CHECK(run.heads <= plan.num_qo_heads);
      CHECK((run.q_tiles >= 1 || e.max_q_tiles == 0));
      CHECK((run.q_tiles == e.max_q_tiles || run.heads == 1));
      const int64_t ds_bytes = cuda::ds_pitch(plan, e) * run.q_tiles * run.heads * 4;
      if (areas.ds != nullptr) list.emplace_back(areas.ds, ds_bytes);

      std::erase_if(list, [](const auto& p) { return p.first == nullptr; });
      std::sort(list.begin(), list.end());
      const auto base = reinterpret_cast<uintptr_t>(launch.workspace);
      uintptr_t end = base;
      for (const auto& [start, size] : list) {
        const auto at = reinterpret_cast<uintptr_t>(start);
        CHECK(at >= end);
        CHECK(at % cuda::kWorkspaceAlignment == 0);
        end = at + static_cast<uintptr_t>(size);
      }
      CHECK(end <= base + static_cast<uintptr_t>(need.min_bytes));
    }
  }
}

// Codes of whole tiles of every sequence, and the scales and means of their groups, in bytes.
static int64_t bytes_of_copies(const PlanConfig& plan) {
  const cuda::Extent e = cuda::extent_of(plan);
  const cuda::Shape s(plan);
  const int64_t q_tiles = e.q_tiles * plan.num_qo_heads, k_tiles = e.k_tiles * plan.num_kv_heads;
  int64_t bytes = q_tiles * plan.tile.b_q * s.qk_row_bytes +
                  k_tiles * plan.tile.b_k * (s.qk_row_bytes + s.v_row_bytes);
  if (s.exact) return bytes;
  bytes += q_tiles * 32 * 4 + k_tiles * 4 * 4;
  bytes += e.v_groups * plan.num_kv_heads * s.dv_tile * 4 * (s.v_statistics ? 3 : 2);
  if (plan.smooth_k == SAGEATTN_SMOOTH_ON) {
    bytes += int64_t{plan.max_batch} * plan.num_kv_heads * s.d_tile * 4;
  }
  if (plan.smooth_q == SAGEATTN_SMOOTH_ON) bytes += q_tiles * s.d_tile * 4;
  return bytes;
}

TEST_CASE("CUDA workspace: at most the quantized copies and 64 MB") {
  for (const Case& c : kCases) {
    INFO(c.name);
    const PlanConfig plan = plan_of(c);
    const cuda::Need need = cuda::need_of(plan);
    const int64_t copies = bytes_of_copies(plan);
    CHECK(need.copies >= copies);
    CHECK(need.copies <= copies + 9 * cuda::kWorkspaceAlignment);
    CHECK(need.min_bytes <= need.copies + cuda::kSpareBytes);
    CHECK(need.preferred_bytes <= need.copies + cuda::kPreferredSpareBytes);
  }
}

// Whether an LSE is asked for makes no difference: a workspace does not depend on it.
TEST_CASE("CUDA workspace: 64 MB beside the copies at any length, up to one row of dS") {
  for (const int32_t preset :
       {SAGEATTN_PRESET_SAGE1, SAGEATTN_PRESET_SAGE2_8B, SAGEATTN_PRESET_SAGE2_4B,
        SAGEATTN_PRESET_SAGE2PP, SAGEATTN_PRESET_EXACT}) {
    for (const int32_t batch : {1, 4, 64}) {
      for (const int32_t length :
           {1, 1 << 10, 1 << 15, 1 << 17, 1 << 18, 1 << 22, (1 << 24) - 4096, 1 << 24, 1 << 30}) {
        CAPTURE(preset, batch, length);
        Case c = kCases[1];
        c.batch = batch;
        c.qo_len = c.kv_len = length;
        sageattn_attn_desc desc = desc_of(c);
        sageattn_attn_desc numerics = preset_desc(preset);
        numerics.smooth_q = preset == SAGEATTN_PRESET_EXACT ? 0 : SAGEATTN_SMOOTH_ON;
        desc.qk_format = numerics.qk_format;
        desc.qk_granularity = numerics.qk_granularity;
        desc.smooth_q = numerics.smooth_q;
        desc.smooth_k = numerics.smooth_k;
        desc.smooth_v = numerics.smooth_v;
        desc.v_scale = numerics.v_scale;
        desc.pv_format = numerics.pv_format;
        desc.pv_accum = numerics.pv_accum;
        const PlanConfig plan = check_attn_desc(desc, SAGEATTN_BACKEND_CUDA, c.arch);
        const cuda::Need need = cuda::need_of(plan);
        CHECK(need.copies <= bytes_of_copies(plan) + 9 * cuda::kWorkspaceAlignment);
        const bool smooth_q = plan.smooth_q == SAGEATTN_SMOOTH_ON;
        const int64_t keys = int64_t{batch} * length;
        if (!smooth_q || keys < 1 << 24) {
          CHECK(need.min_bytes <= need.copies + cuda::kSpareBytes);
        } else {
          CHECK(need.min_bytes <= need.copies + keys * 4 + (64 << 10));
        }
        CHECK(cuda::ds_run(plan, cuda::extent_of(plan), need.min_bytes).q_tiles >= 1);
      }
    }
  }
}

TEST_CASE("CUDA launches: the LSE carries what smoothing took out of K, if it was smoothed") {
  for (const Case& c : kCases) {
    for (const bool smooth : {false, true}) {
      for (const bool wanted : {false, true}) {
        CAPTURE(c.name, smooth, wanted);
        sageattn_attn_desc desc = desc_of(c);
        const bool exact = c.preset == SAGEATTN_PRESET_EXACT;
        if (!exact) desc.smooth_k = smooth ? SAGEATTN_SMOOTH_ON : SAGEATTN_SMOOTH_OFF;
        const PlanConfig plan = check_attn_desc(desc, SAGEATTN_BACKEND_CUDA, c.arch);
        Launch launch = launch_of(plan, cuda::need_of(plan).min_bytes);
        float lse = 0;
        if (wanted) launch.lse = &lse;
        launch.lse_strides = {1000, 10, 100, 0};
        Recorder recorder;
        cuda::enumerate_launches(plan, launch, recorder);
        const int64_t batch_stride = c.varlen ? 0 : launch.lse_strides.batch;
        for (const Recorder::Entry& entry : recorder.entries) {
          if (entry.kernel == cuda::Kernel::kPrepare) {
            CHECK(entry.prepare.lse == (smooth && !exact ? launch.lse : nullptr));
            if (entry.prepare.lse == nullptr) continue;
            CHECK(entry.prepare.lse_batch == batch_stride);
            CHECK(entry.prepare.lse_head == launch.lse_strides.head);
            CHECK(entry.prepare.lse_token == launch.lse_strides.token);
          }
          if (entry.kernel == cuda::Kernel::kAttention) {
            CHECK(entry.attention.lse == launch.lse);
            CHECK(entry.attention.lse_biased == (smooth && !exact ? 1 : 0));
            CHECK(entry.attention.lse_batch == batch_stride);
            CHECK(entry.attention.lse_head == launch.lse_strides.head);
            CHECK(entry.attention.lse_token == launch.lse_strides.token);
          }
        }
      }
    }
  }
}

TEST_CASE("CUDA workspace: limits whose product overflows are refused, not wrapped") {
  Case c = kCases[4];
  c.batch = 1 << 24;
  c.qo_heads = c.kv_heads = 65536;
  c.qo_len = c.kv_len = 1 << 30;
  const cuda::Need need = cuda::need_of(plan_of(c));
  CHECK(need.min_bytes == -1);
  CHECK(need.preferred_bytes == -1);
}

// Of `score_correction`, for a run.
static int64_t correction_blocks(const PlanConfig& plan, const cuda::Extent& e, int64_t first_head,
                                 int64_t head_count, int64_t q_tile_count) {
  const CorrectionTask task(plan.num_qo_heads / plan.num_kv_heads, static_cast<i32>(first_head),
                            static_cast<i32>(head_count), static_cast<i32>(q_tile_count));
  return e.batch * task.parts * task.chunks * ((e.max_k_tiles * plan.tile.b_k + 255) / 256);
}

TEST_CASE("CUDA correction: blocks take each tile of each head of a run once") {
  for (const int group : {1, 3, 8, 40}) {
    for (const int q_tiles : {1, 7, 100, 128, 129, 256, 257, 1000}) {
      for (const int first : {0, 2, 5}) {
        for (const int count : {1, 4, 43}) {
          const CorrectionTask task(group, first, count, q_tiles);
          int next = first;
          for (int part = 0; part < task.parts; ++part) {
            int begin, end;
            task.heads_of(part, begin, end);
            CHECK(begin == next);
            CHECK(begin < end);
            CHECK(begin / group == (end - 1) / group);
            CHECK((end - begin == 1 || (end - begin) * q_tiles <= kCorrectionTiles));
            next = end;
          }
          CHECK(next == first + count);
          CHECK(task.chunks == (q_tiles + kCorrectionTiles - 1) / kCorrectionTiles);
          CHECK((task.chunks == 1 || task.heads == 1));
        }
      }
    }
  }
}

TEST_CASE("CUDA launches: no workspace is so large that a run exceeds a launch") {
  Case keys = kCases[4], queries = kCases[4];
  keys.qo_heads = 65536;
  keys.kv_heads = 1;
  keys.qo_len = 1;
  keys.kv_len = 1 << 22;
  queries.qo_heads = 1024;
  queries.kv_heads = 1;
  queries.batch = 16;
  queries.qo_len = 1 << 25;
  queries.kv_len = 1;
  for (const Case& c : {keys, queries}) {
    const PlanConfig plan = plan_of(c);
    const cuda::Extent e = cuda::extent_of(plan);
    const cuda::DsRun run = cuda::ds_run(plan, e, INT64_MAX);
    CHECK(e.batch * run.heads * run.q_tiles <= cuda::kMaxBlocks);
    CHECK(correction_blocks(plan, e, 0, run.heads, run.q_tiles) <= cuda::kMaxBlocks);
    CHECK(run.heads > 1);
    CHECK(run.heads < plan.num_qo_heads);
  }
}

TEST_CASE("CUDA launches: each tile of each head once, in runs that fit") {
  for (const Case& c : kCases) {
    INFO(c.name);
    const PlanConfig plan = plan_of(c);
    const cuda::Need need = cuda::need_of(plan);
    for (const int64_t bytes : {need.min_bytes, need.preferred_bytes}) {
      const Launch launch = launch_of(plan, bytes);
      Recorder recorder;
      cuda::enumerate_launches(plan, launch, recorder);
      const cuda::Extent e = cuda::extent_of(plan, launch);
      int64_t next = 0;  // head * q tiles + tile
      int64_t blocks = 0;
      const CorrectionParams* correction = nullptr;
      for (const Recorder::Entry& entry : recorder.entries) {
        CHECK(entry.blocks > 0);
        if (entry.kernel == cuda::Kernel::kCorrection) correction = &entry.correction;
        if (entry.kernel != cuda::Kernel::kAttention) continue;
        const AttnParams& attention = entry.attention;
        CHECK(attention.first_head * e.max_q_tiles + attention.first_q_tile == next);
        // Whole heads, or a part of one.
        CHECK((attention.q_tile_count == e.max_q_tiles || attention.head_count == 1));
        CHECK(attention.first_q_tile + attention.q_tile_count <= e.max_q_tiles);
        CHECK(entry.blocks == e.batch * attention.head_count * attention.q_tile_count);
        if (plan.smooth_q == SAGEATTN_SMOOTH_ON) {
          REQUIRE(correction != nullptr);
          CHECK(correction->first_head == entry.attention.first_head);
          CHECK(correction->head_count == entry.attention.head_count);
          CHECK(correction->first_q_tile == entry.attention.first_q_tile);
          CHECK(correction->q_tile_count == entry.attention.q_tile_count);
          const auto* ds = reinterpret_cast<const char*>(attention.ds);
          const int64_t rows = int64_t{attention.head_count} * attention.q_tile_count;
          CHECK(ds + rows * attention.ds_pitch * 4 <=
                static_cast<const char*>(launch.workspace) + launch.workspace_size);
          CHECK(correction->ds == entry.attention.ds);
          CHECK(correction->ds_pitch == entry.attention.ds_pitch);
        }
        CHECK(attention.followed == (&entry == &recorder.entries.back() ? 0 : 1));
        next += int64_t{attention.head_count} * attention.q_tile_count;
        blocks += entry.blocks;
      }
      CHECK(next == plan.num_qo_heads * e.max_q_tiles);
      CHECK(blocks == e.batch * e.max_q_tiles * plan.num_qo_heads);
      if (bytes == need.preferred_bytes) {
        CHECK(cuda::static_info(plan).launches == static_cast<int>(recorder.entries.size()));
      }
    }
  }
}

TEST_CASE("CUDA launches of wgmma: V's groups, codes in bytes, and a counter that is cleared") {
  for (const Case& c : kCases) {
    INFO(c.name);
    const PlanConfig plan = plan_of(c);
    const cuda::Shape shape(plan);
    CHECK(shape.wgmma == (plan.kernel == SAGEATTN_KERNEL_WGMMA));
    const Launch launch = launch_of(plan, cuda::need_of(plan).min_bytes);
    const cuda::Extent e = cuda::extent_of(plan, launch);
    const cuda::Areas areas = cuda::carve(plan, e, launch.workspace);
    CHECK((areas.next_item != nullptr) == shape.wgmma);
    if (!shape.wgmma) continue;
    CHECK(plan.tile.b_k == 128);
    CHECK(shape.qk_row_bytes == shape.d_tile);
    CHECK(shape.q_groups == 32);
    CHECK(plan.promotion_interval == 1024);
    CHECK(e.max_v_groups == (c.kv_len + 1023) / 1024);
    CHECK(areas.next_item == areas.counters + areas.counter_count - 1);

    Recorder recorder;
    cuda::enumerate_launches(plan, launch, recorder);
    // Counters are cleared first, attention's again with each correction.
    REQUIRE(recorder.entries.front().kernel == cuda::Kernel::kSequences);
    CHECK(recorder.entries.front().sequences.counters == areas.counters);
    CHECK(recorder.entries.front().sequences.counter_count == areas.counter_count);
    for (const Recorder::Entry& entry : recorder.entries) {
      if (entry.kernel == cuda::Kernel::kPrepare) {
        CHECK(entry.prepare.v_group == plan.promotion_interval);
        CHECK(entry.prepare.stats_tasks == 32);
        CHECK(entry.prepare.qk_max_code == (plan.qk_format == SAGEATTN_QK_I4 ? 7.0f : 127.0f));
        // A tile of K, one of V, or two of queries.
        const int64_t tiles =
            2 * e.max_k_tiles + plan.num_qo_heads / plan.num_kv_heads * ((e.max_q_tiles + 1) / 2);
        CHECK(entry.blocks == e.batch * plan.num_kv_heads * (32 + tiles));
      }
      if (entry.kernel == cuda::Kernel::kCorrection) {
        CHECK(entry.correction.next_item == areas.next_item);
        CHECK(entry.blocks == correction_blocks(plan, e, entry.correction.first_head,
                                                entry.correction.head_count,
                                                entry.correction.q_tile_count));
      }
    }
  }
}

// A launch whose arguments all differ, with rows that can be read in 16-byte pieces.
static Launch distinct_launch_of(const PlanConfig& plan) {
  static int32_t cu_q, cu_kv, used, status;
  Launch launch = launch_of(plan, cuda::need_of(plan).min_bytes);
  const auto address = [](uintptr_t number) { return reinterpret_cast<void*>(number << 32); };
  launch.q = address(1);
  launch.k = address(2);
  launch.v = address(3);
  launch.out = address(4);
  launch.lse = static_cast<float*>(address(5));
  launch.q_strides = {1 << 30, 1 << 20, 1 << 10, 1};
  launch.k_strides = {3 << 28, 3 << 18, 3 << 8, 1};
  launch.v_strides = {5 << 28, 5 << 18, 5 << 8, 1};
  launch.out_strides = {7 << 28, 7 << 18, 7 << 8, 2};
  launch.lse_strides = {11, 12, 13, 0};
  if (plan.batch_mode == SAGEATTN_BATCH_VARLEN) {
    launch.cu_seqlens_q = &cu_q;
    launch.cu_seqlens_kv = &cu_kv;
  }
  launch.seqused_kv = &used;
  launch.status = &status;
  return launch;
}

static void check_view(const View& view, const PlanConfig& plan, const void* data,
                       const Strides& strides, int32_t dtype, int32_t channels) {
  CHECK(view.data == data);
  CHECK(view.batch == (plan.batch_mode == SAGEATTN_BATCH_VARLEN ? 0 : strides.batch));
  CHECK(view.token == strides.token);
  CHECK(view.head == strides.head);
  CHECK(view.dim == strides.dim);
  CHECK(view.dtype == dtype);
  CHECK(view.channels == channels);
}

// What all kernels are told of the sequences and heads.
static void check_common(const Sequences& s, const Heads& h, const PlanConfig& plan,
                         const Launch& launch, const cuda::Areas& areas) {
  const cuda::Extent e = cuda::extent_of(plan, launch);
  const bool table = plan.batch_mode == SAGEATTN_BATCH_VARLEN || launch.seqused_kv != nullptr;
  CHECK(s.table == (table ? areas.sequences : nullptr));
  CHECK(s.batch == launch.batch);
  CHECK(s.qo_len == launch.qo_len);
  CHECK(s.kv_len == launch.kv_len);
  CHECK(s.q_tiles == e.max_q_tiles);
  CHECK(s.k_tiles == e.max_k_tiles);
  CHECK(s.v_groups == e.max_v_groups);
  CHECK(h.qo == plan.num_qo_heads);
  CHECK(h.kv == plan.num_kv_heads);
  CHECK(h.q_tiles == e.q_tiles);
  CHECK(h.k_tiles == e.k_tiles);
  CHECK(h.v_groups == e.v_groups);
  CHECK(h.sequences == launch.batch);
}

static void check_launches(const PlanConfig& plan, const Launch& launch) {
  const cuda::Extent e = cuda::extent_of(plan, launch);
  const cuda::Areas areas = cuda::carve(plan, e, launch.workspace);
  const bool exact = plan.qk_format == SAGEATTN_QK_NONE;
  const bool e4m3 = plan.pv_format == SAGEATTN_PV_E4M3;
  const bool wgmma = plan.kernel == SAGEATTN_KERNEL_WGMMA;
  const bool grouped = !exact && (plan.v_scale == SAGEATTN_V_SCALE_GROUP ||
                                  plan.smooth_v == SAGEATTN_SMOOTH_V_GROUP);
  const bool k_stats = !exact && plan.smooth_k == SAGEATTN_SMOOTH_ON;
  const bool v_stats = !exact && (wgmma || !grouped);
  const int v_group = grouped ? plan.promotion_interval : 0;
  const int product_bf16 = plan.q_dtype == SAGEATTN_F16 && plan.kv_dtype == SAGEATTN_F16 ? 0 : 1;
  const int64_t pairs = int64_t{launch.batch} * plan.num_kv_heads;

  Recorder recorder;
  cuda::enumerate_launches(plan, launch, recorder);
  int seen[cuda::kNumKernels] = {};
  for (const Recorder::Entry& entry : recorder.entries) {
    ++seen[static_cast<int>(entry.kernel)];
    if (entry.kernel == cuda::Kernel::kSequences) {
      const SequencesParams& p = entry.sequences;
      CHECK(p.followed == (&entry == &recorder.entries.back() ? 0 : 1));
      CHECK(p.cu_seqlens_q == launch.cu_seqlens_q);
      CHECK(p.cu_seqlens_kv == launch.cu_seqlens_kv);
      CHECK(p.seqused_kv == launch.seqused_kv);
      CHECK(p.status == launch.status);
      CHECK(p.table == areas.sequences);
      CHECK(p.total_q == launch.total_qo);
      CHECK(p.total_kv == launch.total_kv);
      CHECK(p.batch == launch.batch);
      CHECK(p.qo_len == launch.qo_len);
      CHECK(p.kv_len == launch.kv_len);
      CHECK(p.max_qo_len == plan.max_qo_len);
      CHECK(p.max_kv_len == plan.max_kv_len);
      CHECK(p.b_q == plan.tile.b_q);
      CHECK(p.b_k == plan.tile.b_k);
      CHECK(p.v_group == v_group);
      if (k_stats || v_stats) {
        CHECK(p.counters == areas.counters);
        CHECK(p.counter_count == areas.counter_count);
        CHECK(p.counter_count >= pairs);
      }
    }
    if (entry.kernel == cuda::Kernel::kPrepare) {
      const PrepareParams& p = entry.prepare;
      check_common(p.sequences, p.heads, plan, launch, areas);
      check_view(p.q, plan, launch.q, launch.q_strides, plan.q_dtype, plan.head_dim);
      check_view(p.k, plan, launch.k, launch.k_strides, plan.kv_dtype, plan.head_dim);
      check_view(p.v, plan, launch.v, launch.v_strides, plan.kv_dtype, plan.head_dim_v);
      CHECK(p.counters == areas.counters);
      CHECK(p.smooth_q == (plan.smooth_q == SAGEATTN_SMOOTH_ON ? 1 : 0));
      CHECK(p.granularity == plan.qk_granularity);
      CHECK(p.product_bf16 == product_bf16);
      CHECK(p.sm_scale == plan.sm_scale);
      CHECK(p.q_codes == areas.q_codes);
      CHECK(p.k_codes == areas.k_codes);
      CHECK(p.v_codes == areas.v_codes);
      CHECK(p.q_scale == areas.q_scale);
      CHECK(p.k_scale == areas.k_scale);
      CHECK(p.k_mean == areas.k_mean);
      CHECK(p.q_mean == areas.q_mean);
      CHECK(p.v_scale == areas.v_scale);
      CHECK(p.v_mean == areas.v_mean);
      CHECK(p.v_group == v_group);
      const bool rotated = plan.rotation == SAGEATTN_ROTATION_HADAMARD;
      CHECK((p.hadamard_dim != 0) == rotated);
      if (rotated) {
        CHECK(p.hadamard_dim >= plan.head_dim);
        CHECK(p.hadamard_dim < 2 * plan.head_dim);
        CHECK((p.hadamard_dim & (p.hadamard_dim - 1)) == 0);
        const auto dim = static_cast<float>(p.hadamard_dim);
        CHECK(std::fabs(p.hadamard_norm * p.hadamard_norm * dim - 1) < 1e-6f);
      }
      if (!exact) {
        CHECK(p.qk_max_code == (plan.qk_format == SAGEATTN_QK_I4 ? 7.0f : 127.0f));
        CHECK(p.v_smooth == (plan.smooth_v == SAGEATTN_SMOOTH_V_OFF ? 0 : 1));
      }
      if (e4m3) CHECK(p.v_max_code == (plan.pv_accum == SAGEATTN_PV_ACCUM_F16 ? 2.25f : 448.0f));

      // As many tasks as chunks of 64 keys, at most 32; twice that, if there are 128 chunks of both.
      const int64_t chunks = e.max_k_tiles * plan.tile.b_k / 64;
      const bool split = k_stats && v_stats && chunks >= 128;
      const int64_t tasks =
          k_stats || v_stats ? std::min<int64_t>(chunks, 32) * (split ? 2 : 1) : 0;
      CHECK(p.stats_tasks == tasks);
      CHECK(p.stats_split == (split ? 1 : 0));
      CHECK(p.lag <= pairs);
      CHECK((p.lag > 0) == (tasks > 0));
      const int64_t ratio = plan.num_qo_heads / plan.num_kv_heads;
      const int64_t tiles = wgmma ? 2 * e.max_k_tiles + ratio * ((e.max_q_tiles + 1) / 2)
                                  : e.max_k_tiles + ratio * e.max_q_tiles;
      CHECK(entry.blocks == pairs * (tasks + tiles));
    }
    if (entry.kernel == cuda::Kernel::kCorrection) {
      const CorrectionParams& p = entry.correction;
      check_common(p.sequences, p.heads, plan, launch, areas);
      check_view(p.k, plan, launch.k, launch.k_strides, plan.kv_dtype, plan.head_dim);
      CHECK(p.k_mean == areas.k_mean);
      CHECK(p.q_mean == areas.q_mean);
      CHECK(p.ds == areas.ds);
      CHECK(p.ds_pitch == cuda::ds_pitch(plan, e));
      CHECK(std::fabs(p.score_scale - plan.sm_scale * 1.4426950f) < 1e-6f);
      CHECK(p.product_bf16 == product_bf16);
      CHECK(p.b_q == plan.tile.b_q);
      CHECK(p.b_k == plan.tile.b_k);
      CHECK(p.next_item == areas.next_item);
    }
    if (entry.kernel == cuda::Kernel::kAttention) {
      const AttnParams& p = entry.attention;
      check_common(p.sequences, p.heads, plan, launch, areas);
      check_view(p.out, plan, launch.out, launch.out_strides, plan.out_dtype, plan.head_dim_v);
      CHECK(p.q_codes == areas.q_codes);
      CHECK(p.k_codes == areas.k_codes);
      CHECK(p.v_codes == areas.v_codes);
      CHECK(p.q_scale == areas.q_scale);
      CHECK(p.k_scale == areas.k_scale);
      CHECK(p.v_scale == areas.v_scale);
      CHECK(p.v_mean == areas.v_mean);
      CHECK(p.ds == areas.ds);
      CHECK(p.ds_pitch == cuda::ds_pitch(plan, e));
      CHECK(p.mask == plan.mask);
      CHECK(p.window_left == plan.window_left);
      CHECK(p.window_right == plan.window_right);
      CHECK(std::fabs(p.score_scale - plan.sm_scale * 1.4426950f) < 1e-6f);
      CHECK(p.v_grouped == (grouped ? 1 : 0));
      if (wgmma) CHECK(p.v_group_tiles * plan.tile.b_k == plan.promotion_interval);
      CHECK(p.next_item == areas.next_item);
      const bool pieces = launch.out_strides.dim == 1 && plan.head_dim_v % 8 == 0;
      CHECK(p.out_in_pieces == (pieces ? 1 : 0));
      if (!exact) CHECK(p.v_smooth == (plan.smooth_v == SAGEATTN_SMOOTH_V_OFF ? 0 : 1));
    }
  }
  CHECK(seen[static_cast<int>(cuda::Kernel::kSequences)] == 1);
  CHECK(seen[static_cast<int>(cuda::Kernel::kPrepare)] == 1);
  CHECK((seen[static_cast<int>(cuda::Kernel::kCorrection)] > 0) ==
        (plan.smooth_q == SAGEATTN_SMOOTH_ON));
}

// The value of a macro, or -1.
static int64_t macro_of(const cuda::KernelUse& use, const char* name) {
  for (const jit::Macro& macro : use.macros) {
    if (macro.name == name) return macro.value;
  }
  return -1;
}

static void check_macros(const PlanConfig& plan) {
  const cuda::Shape s(plan);
  const bool exact = plan.qk_format == SAGEATTN_QK_NONE;
  const bool e4m3 = plan.pv_format == SAGEATTN_PV_E4M3;
  const bool wgmma = plan.kernel == SAGEATTN_KERNEL_WGMMA;
  const bool i4 = plan.qk_format == SAGEATTN_QK_I4;
  const int64_t head_dims = s.d_tile * 1000 + s.dv_tile;
  CHECK(s.d_tile >= plan.head_dim);
  CHECK(s.dv_tile >= plan.head_dim_v);
  for (const cuda::KernelUse& use : cuda::kernels_of(plan)) {
    INFO(use.name);
    if (use.kernel == cuda::Kernel::kPrepare) {
      CHECK(macro_of(use, "HEAD_DIMS") == head_dims);
      CHECK(macro_of(use, "QK_BITS") == (exact ? 16 : i4 && !wgmma ? 4 : 8));
      CHECK(macro_of(use, "V_BITS") == (e4m3 ? 8 : 16));
      CHECK(macro_of(use, "WGMMA") == (wgmma ? 1 : 0));
    }
    if (use.kernel == cuda::Kernel::kCorrection) CHECK(macro_of(use, "D_QK") == s.d_tile);
    if (use.kernel != cuda::Kernel::kAttention) continue;
    CHECK(macro_of(use, "HEAD_DIMS") == head_dims);
    const auto flag = [](bool there, bool value) { return there ? int64_t{value} : -1; };
    CHECK(macro_of(use, "BF16") == flag(exact, plan.kv_dtype == SAGEATTN_BF16));
    CHECK(macro_of(use, "SMOOTH_Q") == flag(!exact, plan.smooth_q == SAGEATTN_SMOOTH_ON));
    // With wgmma codes have a byte, and V has groups.
    const bool mma_sync = !exact && !wgmma;
    CHECK(macro_of(use, "QK_INT4") == flag(mma_sync, i4));
    CHECK(macro_of(use, "PV_ACCUM_F16") == flag(mma_sync, plan.pv_accum == SAGEATTN_PV_ACCUM_F16));
    CHECK(macro_of(use, "V_GROUPED") ==
          flag(mma_sync && e4m3,
               plan.v_scale == SAGEATTN_V_SCALE_GROUP || plan.smooth_v == SAGEATTN_SMOOTH_V_GROUP));
  }
}

TEST_CASE("CUDA launches: kernels are told what the plan and the arguments say") {
  using Change = void (*)(sageattn_attn_desc&);
  const Change changes[] = {[](auto&) {}, [](auto& d) { d.q_dtype = SAGEATTN_F16; },
                            [](auto& d) {
                              d.mask = SAGEATTN_MASK_WINDOW;
                              d.window_left = 5;
                              d.window_right = 7;
                              d.out_dtype = SAGEATTN_F32;
                            },
                            [](auto& d) {  // what EXACT has not
                              if (d.qk_format == SAGEATTN_QK_NONE) return;
                              d.q_dtype = SAGEATTN_F16;
                              d.kv_dtype = SAGEATTN_BF16;
                              d.rotation = SAGEATTN_ROTATION_HADAMARD;
                              d.smooth_k = SAGEATTN_SMOOTH_OFF;
                              d.smooth_v = SAGEATTN_SMOOTH_V_OFF;
                              d.qk_granularity = SAGEATTN_GRANULARITY_PER_WARP;
                            },
                            [](auto& d) {
                              if (d.qk_format == SAGEATTN_QK_NONE) return;
                              d.kv_dtype = SAGEATTN_F16;
                              d.smooth_q = SAGEATTN_SMOOTH_ON;
                              d.smooth_v = SAGEATTN_SMOOTH_V_SEQUENCE;
                              d.sm_scale_set = 1;
                              d.sm_scale = 0.3f;
                            }};
  for (const Case& c : kCases) {
    if (c.kv_len >= 1 << 22) continue;  // no others, only more launches
    for (const Change& change : changes) {
      CAPTURE(c.name, &change - changes);
      sageattn_attn_desc desc = desc_of(c);
      change(desc);
      const PlanConfig plan = check_attn_desc(desc, SAGEATTN_BACKEND_CUDA, c.arch);
      check_macros(plan);
      Launch launch = distinct_launch_of(plan);
      check_launches(plan, launch);
      launch.seqused_kv = nullptr;
      launch.out_strides.dim = 1;
      check_launches(plan, launch);
    }
  }
}

TEST_CASE("CUDA launches: what keeps a tensor from being read in 16-byte pieces") {
  const auto irregular = [](const Case& c, auto change) {
    const PlanConfig plan = plan_of(c);
    Launch launch = distinct_launch_of(plan);
    change(launch);
    Recorder recorder;
    cuda::enumerate_launches(plan, launch, recorder);
    i32 of_prepare = -1;
    for (const Recorder::Entry& entry : recorder.entries) {
      if (entry.kernel == cuda::Kernel::kPrepare) of_prepare = entry.prepare.irregular;
      if (entry.kernel != cuda::Kernel::kCorrection) continue;
      CHECK(entry.correction.irregular_k == ((of_prepare & kIrregularK) != 0 ? 1 : 0));
    }
    return of_prepare;
  };
  const auto nothing = [](Launch&) {};
  const Case dense = kCases[4], packed = kCases[13];
  REQUIRE(packed.varlen);
  CHECK(irregular(dense, nothing) == 0);
  CHECK(irregular(packed, nothing) == 0);
  const auto shifted = [](const void* data) {
    return static_cast<const void*>(static_cast<const char*>(data) + 8);
  };
  CHECK(irregular(dense, [&](Launch& l) { l.q = shifted(l.q); }) == kIrregularQ);
  CHECK(irregular(dense, [&](Launch& l) { l.k = shifted(l.k); }) == kIrregularK);
  CHECK(irregular(dense, [&](Launch& l) { l.v = shifted(l.v); }) == kIrregularV);
  for (int64_t Strides::*const stride :
       {&Strides::batch, &Strides::token, &Strides::head, &Strides::dim}) {
    const int64_t step = stride == &Strides::dim ? 1 : 4;
    CHECK(irregular(dense, [&](Launch& l) { l.q_strides.*stride += step; }) == kIrregularQ);
    CHECK(irregular(dense, [&](Launch& l) { l.k_strides.*stride += step; }) == kIrregularK);
    CHECK(irregular(dense, [&](Launch& l) { l.v_strides.*stride += step; }) == kIrregularV);
  }
  // Packed sequences have no such stride.
  CHECK(irregular(packed, [](Launch& l) { l.k_strides.batch += 4; }) == 0);
  Case narrow = dense;
  narrow.head_dim = 124;
  CHECK(irregular(narrow, nothing) == (kIrregularQ | kIrregularK));
  narrow = dense;
  narrow.head_dim_v = 124;
  CHECK(irregular(narrow, nothing) == kIrregularV);
}

TEST_CASE("CUDA launches: empty batches, no queries, no keys") {
  const PlanConfig plan = plan_of(kCases[1]);
  const auto kernels = [&](int32_t batch, int32_t qo_len, int32_t kv_len, bool status) {
    Launch launch = launch_of(plan, cuda::need_of(plan).min_bytes);
    launch.batch = batch;
    launch.qo_len = qo_len;
    launch.kv_len = kv_len;
    static int32_t word;
    launch.status = status ? &word : nullptr;
    Recorder recorder;
    cuda::enumerate_launches(plan, launch, recorder);
    std::vector<cuda::Kernel> list;
    for (const Recorder::Entry& entry : recorder.entries) list.push_back(entry.kernel);
    return list;
  };
  using cuda::Kernel;
  CHECK(kernels(0, 10, 10, true).empty());
  CHECK(kernels(1, 0, 10, false).empty());
  CHECK(kernels(1, 0, 10, true) == std::vector{Kernel::kSequences});
  CHECK(kernels(1, 10, 0, false) == std::vector{Kernel::kAttention});
  CHECK(kernels(1, 10, 10, true).front() == Kernel::kSequences);
}

TEST_CASE("CUDA backend: what it takes, and what it says of the rest") {
  const Case c = kCases[1];
  for (const int32_t preset :
       {SAGEATTN_PRESET_AUTO, SAGEATTN_PRESET_SAGE1, SAGEATTN_PRESET_EXACT}) {
    for (const int32_t arch : {80, 86, 89, 90, 120}) {
      for (const int32_t dim : {1, 64, 80, 128, 129, 256}) {
        Case here = c;
        here.preset = preset;
        here.head_dim = here.head_dim_v = dim;
        CAPTURE(preset, arch, dim);
        CHECK(status_of(desc_of(here), arch) == SAGEATTN_OK);
      }
    }
  }
  for (const int32_t preset :
       {SAGEATTN_PRESET_SAGE2_8B, SAGEATTN_PRESET_SAGE2_4B, SAGEATTN_PRESET_SAGE2PP}) {
    for (const int32_t arch : {89, 90, 120}) {
      Case here = c;
      here.preset = preset;
      CAPTURE(preset, arch);
      CHECK(status_of(desc_of(here), arch) == SAGEATTN_OK);
    }
  }

  using Change = void (*)(sageattn_attn_desc&);
  const std::pair<const char*, Change> refused[] = {
      {"qk_format = 4", [](auto& d) { d.qk_format = SAGEATTN_QK_E4M3; }},
      {"qk_granularity = 4", [](auto& d) { d.qk_granularity = SAGEATTN_GRANULARITY_PER_TOKEN; }},
      {"qk_granularity = 5", [](auto& d) { d.qk_granularity = SAGEATTN_GRANULARITY_PER_TENSOR; }},
      {"rotation = 2", [](auto& d) { d.rotation = SAGEATTN_ROTATION_SMOOTHATTN; }},
      {"pv_format = 4", [](auto& d) { d.pv_format = SAGEATTN_PV_E5M2; }},
      {"pv_format = 5", [](auto& d) { d.pv_format = SAGEATTN_PV_I8; }},
      {"pv_accum = 3", [](auto& d) { d.pv_accum = SAGEATTN_PV_ACCUM_F32; }},
      {"pv_accum = 4",
       [](auto& d) {
         d.pv_accum = SAGEATTN_PV_ACCUM_SINGLE_LEVEL;
         d.smooth_v = SAGEATTN_SMOOTH_V_OFF;
       }},
      {"v_scale = 1", [](auto& d) { d.v_scale = SAGEATTN_V_SCALE_CHANNEL; }},
      {"promotion_interval = 64", [](auto& d) { d.promotion_interval = 64; }},
      {"promotion_interval = 512",
       [](auto& d) {
         d.kernel = SAGEATTN_KERNEL_MMA_SYNC;
         d.promotion_interval = 512;
       }},
      {"head_dim = 192", [](auto& d) { d.head_dim = 192; }},
      {"pv_model = 2", [](auto& d) { d.pv_model = SAGEATTN_PV_MODEL_HMMA; }},
      {"q_dtype = 3", [](auto& d) {
         d = desc_of(kCases[9]);
         d.q_dtype = SAGEATTN_F32;
       }}};
  for (const auto& [field, change] : refused) {
    INFO(field);
    sageattn_attn_desc desc = desc_of(c);
    change(desc);
    std::string message;
    CHECK(status_of(desc, 90, &message) == SAGEATTN_E_UNSUPPORTED);
    INFO(message);
    CHECK(message.rfind(field, 0) == 0);
    const auto says = [&](const char* word) { return message.find(word) != std::string::npos; };
    CHECK((says("use ") || says("leave ")));
  }
}

TEST_CASE("CUDA kernels: every request of a supported plan is in kernels.def") {
  for (const Case& c : kCases) {
    const PlanConfig plan = plan_of(c);
    for (const cuda::KernelUse& use : cuda::kernels_of(plan)) {
      INFO(c.name << ": " << use.name);
      CHECK_NOTHROW(
          jit::resolve_macros(jit::find_kernel(jit::kernel_list(), use.name), use.macros));
      // What sm_86, sm_89 and sm_120 have, and sm_90.
      CHECK(use.shared_bytes <= (use.name == "attn_sm90a" ? 232448 : 101376));
      CHECK(use.threads % 32 == 0);
    }
  }
}

TEST_CASE("CUDA archs: the features of a capability, and the cubins that it runs") {
  const auto arch = [](int32_t capability) {
    const cuda::ArchChoice choice = cuda::choose_arch(capability);
    if (choice.arch != 0) CHECK(cuda::runs_on(choice.binary, capability));
    return std::pair(choice.arch, choice.known);
  };
  CHECK(arch(75) == std::pair(0, false));
  CHECK(arch(80) == std::pair(80, true));
  CHECK(arch(86) == std::pair(86, true));
  CHECK(arch(87) == std::pair(86, true));
  CHECK(arch(89) == std::pair(89, true));
  CHECK(arch(90) == std::pair(90, true));
  CHECK(arch(100) == std::pair(90, false));
  CHECK(arch(103) == std::pair(90, false));
  CHECK(arch(120) == std::pair(120, true));
  CHECK(arch(121) == std::pair(120, true));
  CHECK(arch(130) == std::pair(120, false));
  CHECK_FALSE(cuda::runs_on(80, 90));
  CHECK(cuda::runs_on(86, 89));
  CHECK_FALSE(cuda::runs_on(89, 86));
}
