#include "tests/gpu/codes.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "ptx/tile/groups.h"
#include "ptx/tile/swizzle.h"
#include "src/core/validate.h"
#include "src/cpu/backend.h"
#include "src/cpu/quantize.h"
#include "src/cpu/sequences.h"
#include "src/cuda/layout.h"

namespace sageattn_test {

namespace {

namespace cpu = sageattn::cpu;
using sageattn::SequenceEntry;

// ---- Layouts of ptx/common/params.h, for reading -------------------------------------------------

constexpr int kKGroups = sageattn::kKGroupsPerTile;

// A piece of the workspace in which an element's byte has been found.
uint16_t load16(const unsigned char* at) {
  uint16_t bits;
  std::memcpy(&bits, at, 2);
  return bits;
}

// Channel c of a row of a tile of Q or K: a code, or the 16 bits of a value.
int qk_element(const unsigned char* tile, int row, int c, int row_bytes, int bits) {
  const int bit = c * bits;
  const unsigned char* at = tile + sageattn::swizzled(row, bit / 128, row_bytes) + bit % 128 / 8;
  if (bits == 16) return load16(at);
  if (bits == 8) return static_cast<int8_t>(*at);
  const int nibble = *at >> bit % 8 & 15;
  return nibble >= 8 ? nibble - 16 : nibble;
}

// Channel c of a key of a tile of V: the bits of its code.
int v_element(const unsigned char* tile, int key, int c, int b_k, int v_row_bytes, bool e4m3) {
  if (!e4m3) return load16(tile + sageattn::swizzled(key, c / 8, v_row_bytes) + c % 8 * 2);
  const int slot = sageattn::v_token_slot(key);
  return tile[sageattn::swizzled(c, slot / 16, b_k) + slot % 16];
}

// ---- Comparing -----------------------------------------------------------------------------------

class Comparer {
 public:
  explicit Comparer(CodesReport& report) : report_(report) {}

  bool failed() const { return !report_.message.empty(); }

  // `where` and what follows say which value it is, as for printf.
  [[gnu::format(printf, 4, 5)]] void same(int64_t got, int64_t want, const char* where, ...) {
    ++report_.compared;
    if (got == want || failed()) return;
    std::va_list arguments;
    va_start(arguments, where);
    fail(std::to_string(got), std::to_string(want), where, arguments);
    va_end(arguments);
  }
  [[gnu::format(printf, 4, 5)]] void same_bits(float got, float want, const char* where, ...) {
    ++report_.compared;
    const bool equal = std::bit_cast<uint32_t>(got) == std::bit_cast<uint32_t>(want) ||
                       (std::isnan(got) && std::isnan(want));
    if (equal || failed()) return;
    std::va_list arguments;
    va_start(arguments, where);
    fail(text(got), text(want), where, arguments);
    va_end(arguments);
  }

 private:
  static std::string text(float x) {
    char buffer[64];
    std::snprintf(buffer, sizeof buffer, "%.9g (%08x)", static_cast<double>(x),
                  std::bit_cast<uint32_t>(x));
    return buffer;
  }
  void fail(const std::string& got, const std::string& want, const char* where,
            std::va_list arguments) {
    char place[160];
    std::vsnprintf(place, sizeof place, where, arguments);
    report_.message = std::string(place) + ": got " + got + ", want " + want;
  }

  CodesReport& report_;
};

// ---- One execute ---------------------------------------------------------------------------------

class CodesCheck {
 public:
  CodesCheck(const Problem& p, const Buffers& buffers, const PlanResult& plan, Outcome& gpu,
             const PlanResult& cpu_plan, CodesReport& report)
      : problem_(p),
        host_(buffers),
        gpu_plan_(plan.config),
        cpu_plan_(cpu_plan.config),
        shape_(gpu_plan_),
        exact_(shape_.exact),
        cpu_memory_(static_cast<size_t>(cpu::workspace_bytes(cpu_plan_, 1)) +
                    cpu::kWorkspaceAlignment),
        launch_(make_launch()),
        extent_(sageattn::cuda::extent_of(gpu_plan_, launch_)),
        areas_(sageattn::cuda::carve(gpu_plan_, extent_, gpu.workspace.data())),
        carver_(launch_.workspace),
        task_{cpu_plan_, launch_, cpu::Shape(cpu_plan_), cpu::carve(cpu_plan_, 1, carver_), 0},
        scratch_(task_.areas.scratch[0]),
        compare_(report) {
    task_.q_tiles = cpu::resolve_sequences(cpu_plan_, launch_, task_.areas.sequences);
  }

  void run() {
    if (extent_.max_q_tiles == 0) return;
    if (gpu_plan_.batch_mode == SAGEATTN_BATCH_VARLEN || launch_.seqused_kv != nullptr) {
      check_sequences();
    }
    for (int b = 0; b < problem_.batch() && !compare_.failed(); ++b) {
      const cpu::Sequence& s = task_.areas.sequences[b];
      if (s.bad || s.kv_len == 0) continue;
      for (int head = 0; head < gpu_plan_.num_kv_heads; ++head) {
        if (!exact_) {
          cpu::quantize_k(task_, b, head, scratch_);
          cpu::quantize_v(task_, b, head, scratch_);
        }
        check_k(b, head);
        check_v(b, head);
      }
      for (int head = 0; head < gpu_plan_.num_qo_heads; ++head) check_q(b, head);
    }
  }

 private:
  sageattn::Launch make_launch() {
    const sageattn_execute_args args = make_args(problem_, host_, addresses_of(host_));
    void* workspace = cpu_memory_.data();
    size_t space = cpu_memory_.size();
    const size_t size = space - cpu::kWorkspaceAlignment;
    std::align(cpu::kWorkspaceAlignment, size, workspace, space);
    return sageattn::check_execute_args(
        cpu_plan_, {static_cast<int64_t>(size), cpu::kWorkspaceAlignment}, args, workspace, size);
  }

  void check_sequences() {
    for (int b = 0; b < problem_.batch(); ++b) {
      const SequenceEntry& got = areas_.sequences[b];
      const cpu::Sequence& want = task_.areas.sequences[b];
      compare_.same(got.bad, want.bad ? 1 : 0, "sequence %d: bad", b);
      compare_.same(got.q_start, want.q_start, "sequence %d: q_start", b);
      compare_.same(got.kv_start, want.kv_start, "sequence %d: kv_start", b);
      compare_.same(got.qo_len, want.qo_len, "sequence %d: qo_len", b);
      compare_.same(got.kv_len, want.kv_len, "sequence %d: kv_len", b);
      compare_.same(got.first_q_tile, want.first_q_tile, "sequence %d: first_q_tile", b);
      compare_.same(got.first_k_tile, want.first_k_tile, "sequence %d: first_k_tile", b);
      if (shape_.grouped) {
        compare_.same(got.first_v_group, want.first_v_group, "sequence %d: first_v_group", b);
      }
    }
  }

  int qk_bits() const { return shape_.qk_row_bytes * 8 / shape_.d_tile; }

  // 16 bits of an input; all NaN are one.
  int input(const Tensor& tensor, int b, int64_t token, int head, int c) const {
    return canonical(load16(&tensor.image[tensor.at(batch_index(b), token, head, c)]));
  }
  int canonical(int bits) const {
    if (!exact_) return bits;
    const int infinity = gpu_plan_.kv_dtype == SAGEATTN_F16 ? 0x7c00 : 0x7f80;
    return (bits & 0x7fff) > infinity ? 0x7fff : bits;
  }
  int batch_index(int b) const { return gpu_plan_.batch_mode == SAGEATTN_BATCH_VARLEN ? 0 : b; }

  // The rows of one tile of Q or K; want(row, channel) for those that exist.
  template <class Want>
  void check_rows(const char* area, int b, int head, int64_t tile, const unsigned char* codes,
                  int tile_rows, int rows, int channels, const Want& want) {
    for (int r = 0; r < tile_rows; ++r) {
      for (int c = 0; c < shape_.d_tile; ++c) {
        const int got = canonical(qk_element(codes, r, c, shape_.qk_row_bytes, qk_bits()));
        const int expected = r < rows && c < channels ? want(r, c) : 0;
        compare_.same(got, expected, "%s of sequence %d head %d tile %lld row %d channel %d", area,
                      b, head, static_cast<long long>(tile), r, c);
      }
    }
  }

  void check_k(int b, int head) {
    const cpu::Sequence& s = task_.areas.sequences[b];
    const int b_k = gpu_plan_.tile.b_k;
    if (areas_.k_mean != nullptr) {
      const float* got = areas_.k_mean + (head * extent_.batch + b) * shape_.d_tile;
      const float* want =
          task_.areas.k_mean + (int64_t{head} * cpu_plan_.max_batch + b) * cpu_plan_.head_dim;
      for (int c = 0; c < gpu_plan_.head_dim; ++c) {
        compare_.same_bits(got[c], want[c], "k_mean of sequence %d head %d channel %d", b, head, c);
      }
    }
    for (int64_t tile = 0; tile * b_k < s.kv_len; ++tile) {
      const auto n = static_cast<int>(std::min<int64_t>(b_k, s.kv_len - tile * b_k));
      const int64_t at = head * extent_.k_tiles + s.first_k_tile + tile;
      const unsigned char* codes = areas_.k_codes + at * b_k * shape_.qk_row_bytes;
      if (exact_) {
        check_rows("k_codes", b, head, tile, codes, b_k, n, gpu_plan_.head_dim, [&](int j, int c) {
          return input(host_.k, b, s.kv_start + tile * b_k + j, head, c);
        });
        continue;
      }
      const int64_t cpu_tile = cpu::k_tile_index(task_, s, head, tile);
      const uint8_t* cpu_codes = task_.areas.k_codes + cpu_tile * task_.shape.k_tile_bytes;
      check_rows("k_codes", b, head, tile, codes, b_k, n, task_.shape.rotated_dim,
                 [&](int j, int c) {
                   const int64_t element = (int64_t{c / 2} * b_k + j) * 2 + c % 2;
                   return static_cast<int16_t>(load16(cpu_codes + element * 2));
                 });
      for (int j = 0; j < n; ++j) {
        compare_.same_bits(areas_.k_scale[at * kKGroups + sageattn::k_group_of_key(j)],
                           task_.areas.k_scale[cpu_tile * b_k + j],
                           "k_scale of sequence %d head %d tile %lld key %d", b, head,
                           static_cast<long long>(tile), j);
      }
    }
  }

  void check_v(int b, int head) {
    const cpu::Sequence& s = task_.areas.sequences[b];
    const int b_k = gpu_plan_.tile.b_k;
    const bool e4m3 = gpu_plan_.pv_format == SAGEATTN_PV_E4M3;
    const int channels = task_.shape.channels;
    if (!exact_) {
      const int64_t interval = shape_.grouped ? gpu_plan_.promotion_interval : s.kv_len;
      for (int64_t g = 0; g * interval < s.kv_len; ++g) {
        const int64_t first = shape_.grouped ? s.first_v_group : b;
        const int64_t got = (head * extent_.v_groups + first + g) * shape_.dv_tile;
        const int64_t want = cpu::v_group_index(task_, b, head, g) * channels;
        for (int c = 0; c < gpu_plan_.head_dim_v; ++c) {
          compare_.same_bits(areas_.v_scale[got + c], task_.areas.v_scale[want + c],
                             "v_scale of sequence %d head %d group %lld channel %d", b, head,
                             static_cast<long long>(g), c);
          if (gpu_plan_.smooth_v == SAGEATTN_SMOOTH_V_OFF) continue;
          compare_.same_bits(areas_.v_mean[got + c], task_.areas.v_mean[want + c],
                             "v_mean of sequence %d head %d group %lld channel %d", b, head,
                             static_cast<long long>(g), c);
        }
      }
    }
    for (int64_t tile = 0; tile * b_k < s.kv_len; ++tile) {
      const int64_t at = head * extent_.k_tiles + s.first_k_tile + tile;
      const unsigned char* codes = areas_.v_codes + at * b_k * shape_.v_row_bytes;
      const int64_t cpu_key = exact_ ? 0 : cpu::k_tile_index(task_, s, head, tile) * b_k;
      for (int j = 0; j < b_k; ++j) {
        for (int c = 0; c < shape_.dv_tile; ++c) {
          const int got = canonical(v_element(codes, j, c, b_k, shape_.v_row_bytes, e4m3));
          int want = 0;
          if (tile * b_k + j < s.kv_len && c < gpu_plan_.head_dim_v) {
            const int64_t element = (cpu_key + j) * channels + c;
            want = exact_ ? input(host_.v, b, s.kv_start + tile * b_k + j, head, c)
                   : e4m3 ? task_.areas.v_codes[element]
                          : load16(task_.areas.v_codes + element * 2);
          }
          compare_.same(got, want, "v_codes of sequence %d head %d tile %lld key %d channel %d", b,
                        head, static_cast<long long>(tile), j, c);
        }
      }
    }
  }

  void check_q(int b, int head) {
    const cpu::Sequence& s = task_.areas.sequences[b];
    const int b_q = gpu_plan_.tile.b_q;
    for (int64_t tile = 0; tile * b_q < s.qo_len; ++tile) {
      const auto n = static_cast<int>(std::min<int64_t>(b_q, s.qo_len - tile * b_q));
      const int64_t at = head * extent_.q_tiles + s.first_q_tile + tile;
      const unsigned char* codes = areas_.q_codes + at * b_q * shape_.qk_row_bytes;
      if (exact_) {
        check_rows("q_codes", b, head, tile, codes, b_q, n, gpu_plan_.head_dim, [&](int i, int c) {
          return input(host_.q, b, s.q_start + tile * b_q + i, head, c);
        });
        continue;
      }
      cpu::quantize_q_tile(task_, b, head, tile, scratch_);
      check_rows(
          "q_codes", b, head, tile, codes, b_q, n, task_.shape.rotated_dim, [&](int i, int c) {
            const auto pair =
                static_cast<uint32_t>(scratch_.q_pairs[int64_t{i} * task_.shape.pairs + c / 2]);
            return static_cast<int16_t>(c % 2 == 0 ? pair & 0xffffu : pair >> 16);
          });
      for (int i = 0; i < n; ++i) {
        const int group = sageattn::q_group_of_row(i, gpu_plan_.tile.rows_per_warp);
        compare_.same_bits(areas_.q_scale[at * shape_.q_groups + group], scratch_.q_scale[i],
                           "q_scale of sequence %d head %d tile %lld row %d", b, head,
                           static_cast<long long>(tile), i);
      }
      if (areas_.q_mean == nullptr) continue;
      for (int c = 0; c < gpu_plan_.head_dim; ++c) {
        compare_.same_bits(areas_.q_mean[at * shape_.d_tile + c], scratch_.q_mean[c],
                           "q_mean of sequence %d head %d tile %lld channel %d", b, head,
                           static_cast<long long>(tile), c);
      }
    }
  }

  const Problem& problem_;
  Buffers host_;  // a copy: resolving lengths sets its status words
  const sageattn::PlanConfig &gpu_plan_, &cpu_plan_;
  const sageattn::cuda::Shape shape_;
  const bool exact_;
  std::vector<unsigned char> cpu_memory_;
  const sageattn::Launch launch_;
  const sageattn::cuda::Extent extent_;
  const sageattn::cuda::Areas areas_;
  cpu::Carver carver_;
  cpu::Task task_;
  cpu::Scratch& scratch_;
  Comparer compare_;
};

}  // namespace

CodesReport compare_codes(const Problem& problem, const Buffers& buffers, const PlanResult& plan,
                          Outcome& gpu, const PlanResult& cpu_plan) {
  CodesReport report;
  CodesCheck(problem, buffers, plan, gpu, cpu_plan, report).run();
  return report;
}

}  // namespace sageattn_test
