// Which elements share a scale, what their codes are and where they lie: the lane maps of
// ptx/tile/groups.h, the quantization of Q and K, and the bands of ptx/common/mask.h.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "include/sageattn.h"
#include "ptx/common/mask.h"
#include "ptx/tile/groups.h"
#include "src/core/config.h"
#include "src/cpu/layout.h"
#include "src/cpu/quantize.h"
#include "tests/catch.h"

namespace {

using namespace sageattn;
using namespace sageattn::cpu;

const float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// ---- The lane maps, from the accumulator fragment ----------------------------------------------

const std::vector<Tile>& tiles() {
  static const std::vector<Tile> all = {{128, 32, 64}, {64, 16, 64}, {64, 16, 128}};
  return all;
}

struct Place {
  int row, key;
};

// The products that one lane of one warp holds. An m16n8 accumulator gives lane t the registers
//   c0, c1: row t / 4,     columns 2 * (t % 4), + 1
//   c2, c3: row t / 4 + 8, the same columns
// and a warp has one such accumulator for every 16 of its rows and every 8 keys of the tile.
std::vector<Place> lane_products(const Tile& tile, int warp, int lane) {
  std::vector<Place> places;
  for (int row0 = 0; row0 < tile.rows_per_warp; row0 += 16) {
    for (int key0 = 0; key0 < tile.b_k; key0 += 8) {
      for (int reg = 0; reg < 4; ++reg) {
        places.push_back({warp * tile.rows_per_warp + row0 + (lane >> 2) + (reg >= 2 ? 8 : 0),
                          key0 + (lane & 3) * 2 + (reg & 1)});
      }
    }
  }
  return places;
}

using Sets = std::set<std::set<int>>;

struct LaneSets {
  Sets rows, keys;  // the distinct sets of rows, and of keys, that lanes touch
};

LaneSets lane_sets(const Tile& tile) {
  LaneSets sets;
  for (int warp = 0; warp < tile.b_q / tile.rows_per_warp; ++warp) {
    for (int lane = 0; lane < 32; ++lane) {
      std::set<int> rows, keys;
      for (const Place& place : lane_products(tile, warp, lane)) {
        rows.insert(place.row);
        keys.insert(place.key);
      }
      sets.rows.insert(rows);
      sets.keys.insert(keys);
    }
  }
  return sets;
}

// Number of the set that holds `element`.
int set_of(const Sets& sets, int element) {
  int index = 0;
  for (const std::set<int>& set : sets) {
    if (set.count(element) != 0) return index;
    ++index;
  }
  return -1;
}

// The sets of elements 0 .. n - 1 with equal group number.
template <typename F>
Sets classes(int n, const F& group) {
  std::map<int, std::set<int>> by_group;
  for (int i = 0; i < n; ++i) by_group[group(i)].insert(i);
  Sets sets;
  for (const auto& [number, set] : by_group) sets.insert(set);
  return sets;
}

// ---- Quantization by hand ----------------------------------------------------------------------

struct Numerics {
  Tile tile;
  int32_t format, granularity;
  int head_dim;
  int qo_len, kv_len;
};

// A launch of fp32 tensors [batch][token][head][channel] without smoothing, and its task.
struct Problem {
  static constexpr int kBatch = 2, kQoHeads = 4, kKvHeads = 2;

  explicit Problem(const Numerics& n, uint64_t seed) : numerics(n) {
    plan.backend = SAGEATTN_BACKEND_CPU;
    plan.arch = 90;
    plan.q_dtype = plan.kv_dtype = plan.out_dtype = SAGEATTN_F32;
    plan.head_dim = plan.head_dim_v = n.head_dim;
    plan.num_qo_heads = kQoHeads;
    plan.num_kv_heads = kKvHeads;
    plan.sm_scale = 1.0f;
    plan.max_batch = kBatch;
    plan.max_qo_len = n.qo_len;
    plan.max_kv_len = n.kv_len;
    plan.max_total_qo = int64_t{kBatch} * n.qo_len;
    plan.max_total_kv = int64_t{kBatch} * n.kv_len;
    plan.qk_format = n.format;
    plan.qk_granularity = n.granularity;
    plan.smooth_q = plan.smooth_k = SAGEATTN_SMOOTH_OFF;
    plan.smooth_v = SAGEATTN_SMOOTH_V_OFF;
    plan.v_scale = SAGEATTN_V_SCALE_CHANNEL;
    plan.rotation = SAGEATTN_ROTATION_NONE;
    plan.pv_format = SAGEATTN_PV_E4M3;
    plan.pv_accum = SAGEATTN_PV_ACCUM_TWO_LEVEL;
    plan.row_sum = SAGEATTN_ROW_SUM_ROUNDED_P;
    plan.promotion_interval = n.tile.b_k;
    plan.kernel = SAGEATTN_KERNEL_MMA_SYNC;
    plan.pv_model = SAGEATTN_PV_MODEL_QMMA13;
    plan.tile = n.tile;

    fill(q, n.qo_len, kQoHeads, seed);
    fill(k, n.kv_len, kKvHeads, seed + 1);
    launch.batch = kBatch;
    launch.qo_len = n.qo_len;
    launch.kv_len = n.kv_len;
    launch.q = q.data();
    launch.k = launch.v = k.data();
    launch.q_strides = strides(n.qo_len, kQoHeads);
    launch.k_strides = launch.v_strides = strides(n.kv_len, kKvHeads);

    Carver count(nullptr);
    carve(plan, 1, count);
    // Poisoned: what is not written reads as NaN or as codes of -1.
    workspace.assign(static_cast<size_t>(count.size()) + 64, 0xff);
    void* base = workspace.data();
    size_t space = workspace.size();
    Carver carver(std::align(64, static_cast<size_t>(count.size()), base, space));
    areas = carve(plan, 1, carver);
    const int64_t q_tiles = (n.qo_len + n.tile.b_q - 1) / n.tile.b_q;
    const int64_t k_tiles = (n.kv_len + n.tile.b_k - 1) / n.tile.b_k;
    for (int b = 0; b < kBatch; ++b) {
      areas.sequences[b] = {0, 0, n.qo_len, n.kv_len, false, b * q_tiles, b * k_tiles, b};
    }
  }

  Task task() const { return {plan, launch, Shape(plan), areas, 0}; }

  Strides strides(int tokens, int heads) const {
    const int64_t d = numerics.head_dim;
    return {tokens * heads * d, heads * d, d, 1};
  }
  float& q_at(int b, int token, int head, int c) {
    return q[((size_t(b) * numerics.qo_len + token) * kQoHeads + head) * numerics.head_dim + c];
  }
  float& k_at(int b, int token, int head, int c) {
    return k[((size_t(b) * numerics.kv_len + token) * kKvHeads + head) * numerics.head_dim + c];
  }

  void fill(std::vector<float>& x, int tokens, int heads, uint64_t seed) const {
    std::mt19937_64 random(seed);
    x.resize(size_t(kBatch) * tokens * heads * numerics.head_dim);
    for (float& e : x) {
      const uint64_t r = random();
      const auto mantissa = static_cast<double>(static_cast<int64_t>(r >> 40) - (1 << 23));
      e = static_cast<float>(std::ldexp(mantissa, -23 - static_cast<int>(r % 7)));
    }
  }

  Numerics numerics;
  PlanConfig plan{};
  Launch launch{};
  std::vector<float> q, k;
  std::vector<unsigned char> workspace;
  Areas areas{};
};

// docs/numerics.md, section 4, for one group: what to multiply with, and the scale.
struct Scale {
  float scale, factor;
};

Scale scale_of(const std::vector<float>& elements, int32_t format) {
  const float largest_code = format == SAGEATTN_QK_I8 ? 127.0f : 7.0f;
  float absmax = 0.0f;
  bool bad = false;
  for (const float x : elements) {
    if (!std::isfinite(x)) bad = true;
    absmax = std::max(absmax, std::fabs(x));
  }
  if (bad) return {kNan, 0.0f};
  if (absmax < std::ldexp(1.0f, -100)) return {0.0f, 0.0f};
  return {absmax / largest_code, largest_code / absmax};
}

int code_of(float x, Scale s, int32_t format) {
  if (s.factor == 0.0f) return 0;
  const int largest_code = format == SAGEATTN_QK_I8 ? 127 : 7;
  const float scaled = x * s.factor;
  const auto nearest = static_cast<int>(std::lrint(static_cast<double>(scaled)));
  return std::clamp(nearest, -largest_code, largest_code);
}

// Section 1: a name for the group of each query or key of a sequence.
using GroupName = std::array<int, 2>;  // tile (-1: of all tiles), group in it

GroupName group_name(const Numerics& n, bool is_query, int token) {
  const int size = is_query ? n.tile.b_q : n.tile.b_k;
  const int tile = token / size, within = token % size;
  switch (n.granularity) {
    case SAGEATTN_GRANULARITY_PER_THREAD: {
      static std::map<std::array<int, 3>, LaneSets> known;
      const std::array<int, 3> key = {n.tile.b_q, n.tile.rows_per_warp, n.tile.b_k};
      if (known.count(key) == 0) known[key] = lane_sets(n.tile);
      return {tile, set_of(is_query ? known[key].rows : known[key].keys, within)};
    }
    case SAGEATTN_GRANULARITY_PER_WARP:
      return {tile, is_query ? within / n.tile.rows_per_warp : 0};
    case SAGEATTN_GRANULARITY_PER_BLOCK:
      return {tile, 0};
    case SAGEATTN_GRANULARITY_PER_TOKEN:
      return {tile, within};
    default:
      return {-1, 0};
  }
}

struct Expected {
  std::vector<float> scale;            // [token]
  std::vector<std::vector<int>> code;  // [token][channel]
  int groups = 0, zero_groups = 0, nan_groups = 0;
};

// `at(token, channel)` is one head of one sequence.
template <typename At>
Expected quantize_by_hand(const Numerics& n, bool is_query, const At& at) {
  const int tokens = is_query ? n.qo_len : n.kv_len;
  std::map<GroupName, std::vector<float>> groups;
  for (int t = 0; t < tokens; ++t) {
    for (int c = 0; c < n.head_dim; ++c) groups[group_name(n, is_query, t)].push_back(at(t, c));
  }
  Expected e;
  e.groups = static_cast<int>(groups.size());
  std::map<GroupName, Scale> scales;
  for (const auto& [name, elements] : groups) {
    const Scale s = scale_of(elements, n.format);
    scales[name] = s;
    if (std::isnan(s.scale)) ++e.nan_groups;
    if (s.scale == 0.0f) ++e.zero_groups;
  }
  for (int t = 0; t < tokens; ++t) {
    const Scale s = scales[group_name(n, is_query, t)];
    e.scale.push_back(s.scale);
    e.code.emplace_back();
    for (int c = 0; c < n.head_dim; ++c) e.code.back().push_back(code_of(at(t, c), s, n.format));
  }
  return e;
}

bool same(float a, float b) {
  return (std::isnan(a) && std::isnan(b)) || std::memcmp(&a, &b, sizeof a) == 0;
}

// The two int16 of a pair, low half first.
std::array<int, 2> halves(int32_t pair) {
  const auto u = static_cast<uint32_t>(pair);
  return {static_cast<int16_t>(u & 0xffff), static_cast<int16_t>(u >> 16)};
}

// Quantizes K of every sequence and head; returns what differs from `Expected`.
std::string check_k(Problem& p, Expected (&expected)[Problem::kBatch][Problem::kKvHeads]) {
  const Task task = p.task();
  Scratch& scratch = task.areas.scratch[0];
  const Numerics& n = p.numerics;
  for (int b = 0; b < Problem::kBatch; ++b) {
    for (int h = 0; h < Problem::kKvHeads; ++h) quantize_k(task, b, h, scratch);
  }
  const int b_k = n.tile.b_k, pairs = (n.head_dim + 1) / 2;
  const int64_t tiles = ceil_div(n.kv_len, b_k);
  for (int b = 0; b < Problem::kBatch; ++b) {
    for (int h = 0; h < Problem::kKvHeads; ++h) {
      expected[b][h] = quantize_by_hand(n, false, [&](int t, int c) { return p.k_at(b, t, h, c); });
      const Expected& want = expected[b][h];
      for (int64_t token = 0; token < tiles * b_k; ++token) {
        const int64_t tile = k_tile_index(task, task.areas.sequences[b], h, token / b_k);
        const int64_t within = token % b_k;
        const bool exists = token < n.kv_len;
        const std::string where = "sequence " + std::to_string(b) + ", head " + std::to_string(h) +
                                  ", key " + std::to_string(token);
        const float want_scale = exists ? want.scale[token] : 0.0f;
        if (!same(task.areas.k_scale[tile * b_k + within], want_scale)) return where + ": scale";
        for (int c = 0; c < 2 * pairs; ++c) {
          int32_t pair;  // [pair of channels][key]
          std::memcpy(&pair, task.areas.k_codes + ((tile * pairs + c / 2) * b_k + within) * 4, 4);
          const int want_code = exists && c < n.head_dim ? want.code[token][c] : 0;
          if (halves(pair)[c % 2] != want_code) return where + ": channel " + std::to_string(c);
        }
      }
    }
  }
  return {};
}

std::string check_q(Problem& p, Expected (&expected)[Problem::kBatch][Problem::kQoHeads]) {
  const Task task = p.task();
  Scratch& scratch = task.areas.scratch[0];
  const Numerics& n = p.numerics;
  if (n.granularity == SAGEATTN_GRANULARITY_PER_TENSOR) {
    for (int b = 0; b < Problem::kBatch; ++b) {
      for (int h = 0; h < Problem::kQoHeads; ++h) scale_q(task, b, h, scratch);
    }
  }
  const int pairs = (n.head_dim + 1) / 2;
  for (int b = 0; b < Problem::kBatch; ++b) {
    for (int h = 0; h < Problem::kQoHeads; ++h) {
      expected[b][h] = quantize_by_hand(n, true, [&](int t, int c) { return p.q_at(b, t, h, c); });
      const Expected& want = expected[b][h];
      for (int token = 0; token < n.qo_len; ++token) {
        const int row = token % n.tile.b_q;
        if (row == 0) quantize_q_tile(task, b, h, token / n.tile.b_q, scratch);
        const std::string where = "sequence " + std::to_string(b) + ", head " + std::to_string(h) +
                                  ", query " + std::to_string(token);
        if (!same(scratch.q_scale[row], want.scale[token])) return where + ": scale";
        for (int c = 0; c < 2 * pairs; ++c) {
          const int want_code = c < n.head_dim ? want.code[token][c] : 0;
          if (halves(scratch.q_pairs[row * pairs + c / 2])[c % 2] != want_code) {
            return where + ": channel " + std::to_string(c);
          }
        }
      }
    }
  }
  return {};
}

std::vector<Numerics> all_numerics() {
  std::vector<Numerics> all;
  for (const Tile& tile : tiles()) {
    for (const int32_t format : {SAGEATTN_QK_I8, SAGEATTN_QK_I4}) {
      for (const int32_t granularity :
           {SAGEATTN_GRANULARITY_PER_THREAD, SAGEATTN_GRANULARITY_PER_WARP,
            SAGEATTN_GRANULARITY_PER_BLOCK, SAGEATTN_GRANULARITY_PER_TOKEN,
            SAGEATTN_GRANULARITY_PER_TENSOR}) {
        // Short last tiles of many kinds; an odd number of channels.
        all.push_back({tile, format, granularity, 20, 2 * tile.b_q + 37, 2 * tile.b_k + 21});
        all.push_back({tile, format, granularity, 7, tile.b_q + 1, tile.b_k + 1});
        all.push_back({tile, format, granularity, 16, 3, 2});
        all.push_back({tile, format, granularity, 33, tile.b_q, tile.b_k});
      }
    }
  }
  return all;
}

std::string describe(const Numerics& n) {
  return "tile " + std::to_string(n.tile.b_q) + "/" + std::to_string(n.tile.rows_per_warp) + "x" +
         std::to_string(n.tile.b_k) + " format " + std::to_string(n.format) + " granularity " +
         std::to_string(n.granularity) + " dim " + std::to_string(n.head_dim) + " lengths " +
         std::to_string(n.qo_len) + ", " + std::to_string(n.kv_len);
}

}  // namespace

TEST_CASE("Groups are what a thread's accumulators touch", "[groups]") {
  const struct {
    size_t q_groups, rows, k_groups, keys;
  } sizes[] = {{32, 4, 4, 16}, {32, 2, 4, 16}, {32, 2, 4, 32}};
  REQUIRE(tiles().size() == std::size(sizes));
  for (size_t i = 0; i < tiles().size(); ++i) {
    const Tile& tile = tiles()[i];
    CAPTURE(tile.b_q, tile.rows_per_warp, tile.b_k);
    const LaneSets lanes = lane_sets(tile);
    const Sets rows = classes(
        tile.b_q, [&](int row) { return sageattn::q_group_of_row(row, tile.rows_per_warp); });
    const Sets keys = classes(tile.b_k, [](int key) { return sageattn::k_group_of_key(key); });
    CHECK(rows == lanes.rows);
    CHECK(keys == lanes.keys);

    CHECK(rows.size() == sizes[i].q_groups);
    for (const std::set<int>& group : rows) CHECK(group.size() == sizes[i].rows);
    CHECK(keys.size() == sizes[i].k_groups);
    for (const std::set<int>& group : keys) CHECK(group.size() == sizes[i].keys);

    // Numbers are dense: arrays of scales have no gaps.
    std::set<int> q_numbers, k_numbers;
    for (int row = 0; row < tile.b_q; ++row) {
      q_numbers.insert(sageattn::q_group_of_row(row, tile.rows_per_warp));
    }
    for (int key = 0; key < tile.b_k; ++key) k_numbers.insert(sageattn::k_group_of_key(key));
    CHECK(*q_numbers.begin() == 0);
    CHECK(*q_numbers.rbegin() == static_cast<int>(sizes[i].q_groups) - 1);
    CHECK(*k_numbers.begin() == 0);
    CHECK(*k_numbers.rbegin() == static_cast<int>(sizes[i].k_groups) - 1);
  }
}

TEST_CASE("A lane's number says which groups it holds", "[groups]") {
  for (const Tile& tile : tiles()) {
    CAPTURE(tile.b_q, tile.rows_per_warp, tile.b_k);
    int wrong = 0, products = 0;
    for (int warp = 0; warp < tile.b_q / tile.rows_per_warp; ++warp) {
      for (int lane = 0; lane < 32; ++lane) {
        for (const Place& place : lane_products(tile, warp, lane)) {
          ++products;
          if (sageattn::q_group_of_row(place.row, tile.rows_per_warp) != warp * 8 + lane / 4 ||
              sageattn::k_group_of_key(place.key) != lane % 4) {
            ++wrong;
          }
        }
      }
    }
    CHECK(wrong == 0);
    CHECK(products == tile.b_q * tile.b_k);
  }
}

TEST_CASE("Codes, scales and their places", "[groups]") {
  int problems = 0;
  for (const Numerics& n : all_numerics()) {
    INFO(describe(n));
    Problem p(n, 100 + static_cast<uint64_t>(problems));
    ++problems;
    Expected k[Problem::kBatch][Problem::kKvHeads], q[Problem::kBatch][Problem::kQoHeads];
    CHECK(check_k(p, k) == "");
    CHECK(check_q(p, q) == "");
    REQUIRE(k[1][1].nan_groups + q[1][3].nan_groups + k[1][1].zero_groups == 0);

    // The reference itself: a group's largest element has the largest code.
    const int largest = n.format == SAGEATTN_QK_I8 ? 127 : 7;
    int seen = 0;
    for (const std::vector<int>& row : q[1][3].code) {
      for (const int code : row) seen = std::max(seen, std::abs(code));
    }
    CHECK(seen == largest);
    if (n.granularity == SAGEATTN_GRANULARITY_PER_THREAD && n.qo_len >= n.tile.b_q) {
      CHECK(q[0][0].groups >= 32);
      CHECK(k[0][0].groups >= 4);
    }
  }
  CHECK(problems == 3 * 2 * 5 * 4);
}

TEST_CASE("Groups of zeros, tiny values, NaN and infinities", "[groups]") {
  int zero_groups = 0, nan_groups = 0;
  for (const Numerics& n : all_numerics()) {
    if (n.head_dim != 20) continue;
    INFO(describe(n));
    Problem p(n, 900);
    const auto set_row = [&](bool query, int b, int token, int head, float x) {
      for (int c = 0; c < n.head_dim; ++c) {
        (query ? p.q_at(b, token, head, c) : p.k_at(b, token, head, c)) = x;
      }
    };
    const float least = std::ldexp(1.0f, -100);
    for (int t = 0; t < n.qo_len; ++t) {
      set_row(true, 0, t, 0, 0.0f);
      set_row(true, 0, t, 1, std::nextafter(least, 0.0f));  // below 2^-100: as zeros
      set_row(true, 0, t, 2, t % 2 == 0 ? least : -least);  // not below: full codes
    }
    for (int t = 0; t < n.kv_len; ++t) {
      set_row(false, 0, t, 0, -0.0f);
      set_row(false, 0, t, 1, t % 2 == 0 ? least : -least);
    }
    // One bad element each; the last in the short last tile.
    p.q_at(1, 5, 0, 3) = kNan;
    p.q_at(1, n.qo_len - 1, 1, n.head_dim - 1) = -kInfinity;
    p.q_at(1, 0, 2, 0) = kInfinity;
    p.k_at(1, 9, 0, 1) = kInfinity;
    p.k_at(1, n.kv_len - 1, 1, 0) = kNan;

    Expected k[Problem::kBatch][Problem::kKvHeads], q[Problem::kBatch][Problem::kQoHeads];
    CHECK(check_k(p, k) == "");
    CHECK(check_q(p, q) == "");
    CHECK(q[0][0].zero_groups == q[0][0].groups);
    CHECK(q[0][1].zero_groups == q[0][1].groups);
    CHECK(q[0][2].zero_groups == 0);
    CHECK(std::abs(q[0][2].code[0][0]) == (n.format == SAGEATTN_QK_I8 ? 127 : 7));
    CHECK(k[0][0].zero_groups == k[0][0].groups);
    CHECK(k[0][1].zero_groups == 0);
    for (int h = 0; h < 3; ++h) CHECK(q[1][h].nan_groups == 1);
    CHECK(q[1][3].nan_groups == 0);
    for (int h = 0; h < 2; ++h) CHECK(k[1][h].nan_groups == 1);
    zero_groups += q[0][0].zero_groups;
    nan_groups += q[1][0].nan_groups;
  }
  CHECK(zero_groups > 100);
  CHECK(nan_groups == 30);
}

// ---- Masks -------------------------------------------------------------------------------------

namespace {

constexpr MaskKind kMasks[] = {MaskKind::kNone, MaskKind::kCausalBottomRight,
                               MaskKind::kCausalTopLeft, MaskKind::kWindow};

// The definitions of sageattn.h.
bool visible(MaskKind kind, int64_t left, int64_t right, int64_t qo_len, int64_t kv_len, int64_t i,
             int64_t j) {
  switch (kind) {
    case MaskKind::kNone:
      return true;
    case MaskKind::kCausalBottomRight:
      return j <= i + kv_len - qo_len;
    case MaskKind::kCausalTopLeft:
      return j <= i;
    case MaskKind::kWindow:
      break;
  }
  const int64_t distance = j - (i + kv_len - qo_len);
  return (left == -1 || -left <= distance) && (right == -1 || distance <= right);
}

}  // namespace

TEST_CASE("Bands are the masks of the header", "[groups]") {
  const int windows[] = {-1, 0, 1, 2, 5, 11, INT32_MAX};
  int64_t pairs = 0, seen = 0, wrong = 0, blind_queries = 0;
  std::string first_wrong;
  for (const MaskKind kind : kMasks) {
    for (const int left : windows) {
      for (const int right : windows) {
        if (kind != MaskKind::kWindow && (left != 0 || right != 0)) continue;
        for (int qo_len = 1; qo_len <= 12; ++qo_len) {
          for (int kv_len = 0; kv_len <= 12; ++kv_len) {
            const Band band = make_band(kind, left, right, qo_len, kv_len);
            for (int i = 0; i < qo_len; ++i) {
              bool any = false;
              for (int j = 0; j < kv_len; ++j) {
                const bool want = visible(kind, left, right, qo_len, kv_len, i, j);
                const bool got = band.first_key(i) <= j && j < band.end_key(i);
                ++pairs;
                seen += want ? 1 : 0;
                any = any || want;
                if (want != got && wrong++ == 0) {
                  first_wrong = "mask " + std::to_string(static_cast<int>(kind)) + " window " +
                                std::to_string(left) + ", " + std::to_string(right) + " lengths " +
                                std::to_string(qo_len) + ", " + std::to_string(kv_len) + " query " +
                                std::to_string(i) + " key " + std::to_string(j);
                }
              }
              blind_queries += any ? 0 : 1;
              // The ends are keys of the sequence, or one past.
              if (any && (band.first_key(i) < 0 || band.end_key(i) > kv_len)) ++wrong;
              if (!any && band.first_key(i) < band.end_key(i)) ++wrong;
            }
          }
        }
      }
    }
  }
  CAPTURE(first_wrong);
  CHECK(wrong == 0);
  CHECK(pairs == (3 + 49) * int64_t{78} * 78);
  CHECK(seen > pairs / 4);
  CHECK(seen < pairs * 3 / 4);
  CHECK(blind_queries > 1000);
}

TEST_CASE("Bands at the largest lengths", "[groups]") {
  constexpr int kLongest = 1 << 30;
  const int lengths[] = {0, 1, 2, 1000, kLongest - 1, kLongest};
  const int windows[] = {-1, 0, 1, kLongest - 2, kLongest - 1, kLongest, INT32_MAX};
  int checked = 0, wrong = 0;
  std::string first_wrong;
  for (const MaskKind kind : kMasks) {
    for (const int left : windows) {
      for (const int right : windows) {
        if (kind != MaskKind::kWindow && (left != 0 || right != 0)) continue;
        for (const int qo_len : lengths) {
          for (const int kv_len : lengths) {
            const Band band = make_band(kind, left, right, qo_len, kv_len);
            for (const int64_t at : {int64_t{0}, int64_t{1}, int64_t{qo_len} / 2,
                                     int64_t{qo_len} - 2, int64_t{qo_len} - 1}) {
              if (at < 0 || at >= qo_len) continue;
              const auto i = static_cast<int>(at);
              const int first = band.first_key(i), end = band.end_key(i);  // must not overflow
              // The band's ends and the keys around them, and those of the sequence.
              for (const int64_t j :
                   {int64_t{0}, int64_t{1}, int64_t{kv_len} / 2, int64_t{kv_len} - 1,
                    int64_t{first} - 1, int64_t{first}, int64_t{end} - 1, int64_t{end}}) {
                if (j < 0 || j >= kv_len) continue;
                ++checked;
                const bool want = visible(kind, left, right, qo_len, kv_len, i, j);
                if (want != (first <= j && j < end) && wrong++ == 0) {
                  first_wrong = "mask " + std::to_string(static_cast<int>(kind)) + " window " +
                                std::to_string(left) + ", " + std::to_string(right) + " lengths " +
                                std::to_string(qo_len) + ", " + std::to_string(kv_len) + " query " +
                                std::to_string(i) + " key " + std::to_string(j);
                }
              }
            }
          }
        }
      }
    }
  }
  CAPTURE(first_wrong);
  CHECK(wrong == 0);
  CHECK(checked > 10'000);
}
