// The EXACT preset against tests/goldens/exact.safetensors, which make_goldens.py computed in fp64
// without any code of the library.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "sageattn.h"
#include "tests/catch.h"
#include "tests/safetensors.h"

namespace {

using sageattn_test::Safetensors;

const std::string kPath = std::string(SAGEATTN_TEST_DIR) + "/goldens/exact.safetensors";
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Case {
  std::string key;
  nlohmann::json metadata;
  const Safetensors& file;

  const Safetensors::Tensor& tensor(const char* name) const { return file.at(key + "." + name); }
  const int32_t* ints(const char* name) const {
    const Safetensors::Tensor* t = file.find(key + "." + name);
    return t == nullptr ? nullptr : reinterpret_cast<const int32_t*>(t->data);
  }
  bool varlen() const { return metadata.at("varlen").get<bool>(); }
};

// Element of a stored tensor in fp64, by the definition of its type.
double element(const Safetensors::Tensor& t, int64_t index) {
  if (t.dtype == "F64") {
    double x;
    std::memcpy(&x, t.data + 8 * index, sizeof x);
    return x;
  }
  if (t.dtype == "F32") {
    float x;
    std::memcpy(&x, t.data + 4 * index, sizeof x);
    return static_cast<double>(x);
  }
  uint16_t h;
  std::memcpy(&h, t.data + 2 * index, sizeof h);
  if (t.dtype == "BF16") return static_cast<double>(std::bit_cast<float>(uint32_t{h} << 16));
  const int field = h >> 10 & 31, fraction = h & 1023;
  if (field == 31) return std::numeric_limits<double>::quiet_NaN();
  const double magnitude =
      std::ldexp(field == 0 ? fraction : 1024 + fraction, std::max(field, 1) - 25);
  return (h & 0x8000) != 0 ? -magnitude : magnitude;
}

int32_t dtype_of(const std::string& name) {
  if (name == "F16") return SAGEATTN_F16;
  if (name == "BF16") return SAGEATTN_BF16;
  return name == "F32" ? SAGEATTN_F32 : -1;
}

int32_t mask_of(const std::string& name) {
  if (name == "none") return SAGEATTN_MASK_NONE;
  if (name == "causal_bottom_right") return SAGEATTN_MASK_CAUSAL_BOTTOM_RIGHT;
  if (name == "causal_top_left") return SAGEATTN_MASK_CAUSAL_TOP_LEFT;
  return name == "window" ? SAGEATTN_MASK_WINDOW : -1;
}

// Sizes of a case; sequences are runs of tokens in the packed tensors, also where it is dense.
struct Sizes {
  int batch, heads, kv_heads, dim, dim_v;
  int64_t total_q, total_kv;
  std::vector<int64_t> q_cuts, kv_cuts, used;

  explicit Sizes(const Case& c) {
    const std::vector<int64_t>&q = c.tensor("q").shape, &k = c.tensor("k").shape;
    const size_t token = c.varlen() ? 0 : 1;
    heads = static_cast<int>(q[token + 1]);
    dim = static_cast<int>(q[token + 2]);
    kv_heads = static_cast<int>(k[token + 1]);
    dim_v = static_cast<int>(c.tensor("v").shape[token + 2]);
    batch = c.varlen() ? static_cast<int>(c.tensor("cu_seqlens_q").shape[0]) - 1
                       : static_cast<int>(q[0]);
    for (int b = 0; b <= batch; ++b) {
      q_cuts.push_back(c.varlen() ? c.ints("cu_seqlens_q")[b] : b * q[1]);
      kv_cuts.push_back(c.varlen() ? c.ints("cu_seqlens_kv")[b] : b * k[1]);
    }
    total_q = q_cuts.back();
    total_kv = kv_cuts.back();
    const int32_t* seqused = c.ints("seqused_kv");
    for (int b = 0; b < batch; ++b) {
      used.push_back(seqused != nullptr ? seqused[b] : kv_cuts[b + 1] - kv_cuts[b]);
    }
  }
  int64_t longest(const std::vector<int64_t>& cuts) const {
    int64_t n = 1;
    for (int b = 0; b < batch; ++b) n = std::max(n, cuts[b + 1] - cuts[b]);
    return n;
  }
};

struct Output {
  std::vector<float> out, lse;  // packed: [token][head][dim_v]; as the golden's lse
  float sm_scale = 0;
};

template <typename T, void (*destroy)(T*)>
struct Destroy {
  void operator()(T* handle) const { destroy(handle); }
};

Output run(const Case& c, const Sizes& n, int threads) {
  sageattn_error err{};
  err.struct_size = sizeof err;
  const auto must = [&err](int32_t status) {
    INFO(err.message);
    REQUIRE(status == SAGEATTN_OK);
  };
  sageattn_context_desc context_desc{};
  context_desc.struct_size = sizeof context_desc;
  context_desc.backend = SAGEATTN_BACKEND_CPU;
  context_desc.num_threads = threads;
  sageattn_context* context_handle = nullptr;
  must(sageattn_context_create(&context_desc, &context_handle, &err));
  const std::unique_ptr<sageattn_context, Destroy<sageattn_context, sageattn_context_destroy>>
      context(context_handle);

  sageattn_attn_desc desc;
  must(sageattn_attn_desc_init(&desc, sizeof desc, SAGEATTN_PRESET_EXACT, &err));
  desc.q_dtype = dtype_of(c.tensor("q").dtype);
  desc.kv_dtype = dtype_of(c.tensor("k").dtype);
  desc.out_dtype = SAGEATTN_F32;
  REQUIRE(c.metadata.at("layout").get<std::string>() == "NHD");
  desc.layout = SAGEATTN_LAYOUT_NHD;
  desc.batch_mode = c.varlen() ? SAGEATTN_BATCH_VARLEN : SAGEATTN_BATCH_DENSE;
  desc.mask = mask_of(c.metadata.at("mask").get<std::string>());
  if (desc.mask == SAGEATTN_MASK_WINDOW) {
    desc.window_left = c.metadata.at("window_left").get<int32_t>();
    desc.window_right = c.metadata.at("window_right").get<int32_t>();
  }
  desc.head_dim = n.dim;
  desc.head_dim_v = n.dim_v;
  desc.num_qo_heads = n.heads;
  desc.num_kv_heads = n.kv_heads;
  if (!c.metadata.at("sm_scale").is_null()) {
    desc.sm_scale_set = 1;
    desc.sm_scale = c.metadata.at("sm_scale").get<float>();
  }
  desc.max_batch = n.batch;
  desc.max_qo_len = static_cast<int32_t>(n.longest(n.q_cuts));
  desc.max_kv_len = static_cast<int32_t>(n.longest(n.kv_cuts));
  sageattn_plan* plan_handle = nullptr;
  must(sageattn_plan_create(context.get(), &desc, &plan_handle, &err));
  const std::unique_ptr<sageattn_plan, Destroy<sageattn_plan, sageattn_plan_destroy>> plan(
      plan_handle);
  sageattn_plan_info info{};
  info.struct_size = sizeof info;
  must(sageattn_plan_get_info(plan.get(), &info, &err));

  Output o;
  o.sm_scale = info.sm_scale;
  o.out.assign(static_cast<size_t>(n.total_q * n.heads * n.dim_v), -77.0f);
  o.lse.assign(static_cast<size_t>(n.total_q * n.heads), -77.0f);
  sageattn_execute_args args{};
  args.struct_size = sizeof args;
  args.batch = n.batch;
  if (c.varlen()) {
    args.total_qo = n.total_q;
    args.total_kv = n.total_kv;
    args.cu_seqlens_q = c.ints("cu_seqlens_q");
    args.cu_seqlens_kv = c.ints("cu_seqlens_kv");
  } else {
    args.qo_len = static_cast<int32_t>(n.q_cuts[1]);
    args.kv_len = static_cast<int32_t>(n.kv_cuts[1]);
  }
  args.q.data = c.tensor("q").data;
  args.k.data = c.tensor("k").data;
  args.v.data = c.tensor("v").data;
  args.out.data = o.out.data();
  args.lse.data = o.lse.data();
  args.seqused_kv = c.ints("seqused_kv");
  const auto bytes = static_cast<size_t>(info.min_workspace);
  const auto alignment = static_cast<size_t>(info.workspace_alignment);
  std::vector<unsigned char> workspace(bytes + alignment);
  void* aligned = workspace.data();
  size_t space = workspace.size();
  REQUIRE(std::align(alignment, bytes, aligned, space) != nullptr);
  must(sageattn_execute(plan.get(), &args, aligned, bytes, nullptr, &err));
  return o;
}

// Half the distance of neighbouring fp32 numbers at x.
double half_ulp(double x) {
  const int exponent = x == 0 ? -126 : std::max(std::ilogb(x), -126);
  return std::ldexp(0.5, exponent - 23);
}

// Index of the lse of a packed query.
size_t lse_at(const Case& c, const Sizes& n, int b, int64_t query, int head) {
  const int64_t len = c.varlen() ? n.total_q : n.q_cuts[1];
  const int64_t first = c.varlen() ? 0 : int64_t{b} * n.heads;
  const int64_t token = c.varlen() ? query : query - n.q_cuts[b];
  return static_cast<size_t>((first + head) * len + token);
}

struct Counts {
  int rows = 0, blind_rows = 0, wrong = 0;
  double largest_slack = 0;  // beyond rounding, relative to the rounding
};

// One query and head. The library's softmax scale is an fp32 number and the golden's 1 / sqrt(dim)
// is an fp64 one; with P the probabilities, t the products q.k and delta the difference of scales,
//   out moves by delta sum P (t - mean t) v, and lse by delta mean t, mean t = sum P t,
// to first order. The second order and the sums' rounding are far below fp32.
void check_row(const Case& c, const Sizes& n, const Output& got, int b, int64_t i, int head,
               Counts& counts) {
  const Safetensors::Tensor &q = c.tensor("q"), &k = c.tensor("k"), &v = c.tensor("v");
  const int64_t qo_len = n.q_cuts[b + 1] - n.q_cuts[b], kv_len = n.used[b];
  const int64_t query = n.q_cuts[b] + i;
  const int kv_head = head / (n.heads / n.kv_heads);
  const std::string mask = c.metadata.at("mask").get<std::string>();
  const auto left = c.metadata.at("window_left").get<int64_t>();
  const auto right = c.metadata.at("window_right").get<int64_t>();
  const double scale = c.metadata.at("sm_scale").is_null()
                           ? 1 / std::sqrt(static_cast<double>(n.dim))
                           : c.metadata.at("sm_scale").get<double>();
  const double delta = static_cast<double>(got.sm_scale) - scale;

  const size_t lse_index = lse_at(c, n, b, query, head);
  const double want_lse = element(c.tensor("lse"), static_cast<int64_t>(lse_index));
  const float got_lse = got.lse[lse_index];
  const auto out_index = [&](int channel) {
    return static_cast<size_t>((query * n.heads + head) * n.dim_v + channel);
  };
  ++counts.rows;
  if (want_lse == -std::numeric_limits<double>::infinity()) {
    ++counts.blind_rows;
    bool good = got_lse == -kInfinity;
    for (int channel = 0; channel < n.dim_v; ++channel) {
      good = good && got.out[out_index(channel)] == 0.0f;
    }
    counts.wrong += good ? 0 : 1;
    return;
  }

  double mean_t = 0, sum_p = 0;
  std::vector<double> t(static_cast<size_t>(kv_len)), p(static_cast<size_t>(kv_len));
  for (int64_t j = 0; j < kv_len; ++j) {
    const int64_t diagonal = i + kv_len - qo_len;
    if (mask == "causal_bottom_right" && j > diagonal) continue;
    if (mask == "causal_top_left" && j > i) continue;
    if (mask == "window" && left >= 0 && j < diagonal - left) continue;
    if (mask == "window" && right >= 0 && j > diagonal + right) continue;
    const int64_t key = (n.kv_cuts[b] + j) * n.kv_heads + kv_head;
    for (int channel = 0; channel < n.dim; ++channel) {
      t[j] += element(q, (query * n.heads + head) * n.dim + channel) *
              element(k, key * n.dim + channel);
    }
    p[j] = std::exp(scale * t[j] - want_lse);
    sum_p += p[j];
    mean_t += p[j] * t[j];
  }
  bool good = std::fabs(sum_p - 1) < 1e-9;  // else the golden's lse is another softmax's

  const auto near = [&](float x, double want, double slack) {
    const double bound = half_ulp(want) + slack;
    counts.largest_slack = std::max(counts.largest_slack, slack / half_ulp(want));
    return std::fabs(static_cast<double>(x) - want) <= bound;  // false for NaN
  };
  good = good && near(got_lse, want_lse + delta * mean_t, 1e-12 * (1 + std::fabs(want_lse)));
  for (int channel = 0; channel < n.dim_v; ++channel) {
    const auto index = out_index(channel);
    double moved = element(c.tensor("out"), static_cast<int64_t>(index)), magnitude = 0;
    for (int64_t j = 0; j < kv_len; ++j) {
      if (p[j] == 0) continue;
      const int64_t key = (n.kv_cuts[b] + j) * n.kv_heads + kv_head;
      const double value = element(v, key * n.dim_v + channel);
      moved += delta * p[j] * (t[j] - mean_t) * value;
      const double shift = delta * (t[j] - mean_t);
      magnitude += p[j] * (shift * shift + 1e-13) * std::fabs(value);
    }
    good = good && near(got.out[index], moved, magnitude + 1e-300);
  }
  counts.wrong += good ? 0 : 1;
}

}  // namespace

TEST_CASE("EXACT gives the goldens", "[golden]") {
  const Safetensors file(kPath);
  int cases = 0, varlen = 0, seqused = 0, empty_tensors = 0;
  Counts total;
  for (const auto& [key, text] : file.metadata()) {
    const Case c{key, nlohmann::json::parse(text), file};
    CAPTURE(key, text);
    const Sizes n(c);
    const Output got = run(c, n, 1);
    Counts counts;
    for (int b = 0; b < n.batch; ++b) {
      for (int64_t i = 0; i < n.q_cuts[b + 1] - n.q_cuts[b]; ++i) {
        for (int head = 0; head < n.heads; ++head) check_row(c, n, got, b, i, head, counts);
      }
    }
    CHECK(counts.wrong == 0);
    CHECK(counts.rows == n.total_q * n.heads);
    if (c.metadata.at("sm_scale").is_null()) {
      CHECK(got.sm_scale == static_cast<float>(1 / std::sqrt(static_cast<double>(n.dim))));
    } else {
      CHECK(got.sm_scale == c.metadata.at("sm_scale").get<float>());
    }

    // Same bits with more threads.
    const Output again = run(c, n, 3);
    CHECK(again.out == got.out);
    CHECK(again.lse == got.lse);

    ++cases;
    varlen += c.varlen() ? 1 : 0;
    seqused += c.ints("seqused_kv") != nullptr ? 1 : 0;
    empty_tensors += c.tensor("k").elements() == 0 ? 1 : 0;
    total.rows += counts.rows;
    total.blind_rows += counts.blind_rows;
    total.largest_slack = std::max(total.largest_slack, counts.largest_slack);
  }
  CHECK(cases == 38);
  CHECK(varlen == 7);
  CHECK(seqused == 6);
  CHECK(empty_tensors == 1);
  CHECK(total.rows == 2506);
  CHECK(total.blind_rows == 395);
  CHECK(total.largest_slack < 0.25);  // so no bound is above 5/8 of an fp32 ulp
}
