// How fast the CPU backend is: SAGE2_8B on 8 heads of 128 channels without a mask, against the
// literal implementation of the same numerics. Prints a table; not a test.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "sageattn.h"
#include "tests/literal.h"

using namespace sageattn_test;

namespace {

constexpr int kHeads = 8, kDim = 128;

void must(int32_t status, const sageattn_error& err) {
  if (status == SAGEATTN_OK) return;
  std::fprintf(stderr, "%s\n", err.message);
  std::exit(1);
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// [token][head][channel], roughly normal, exact in bf16 but stored as fp32.
std::vector<float> random_tensor(int tokens, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<float> x(static_cast<size_t>(tokens) * kHeads * kDim);
  for (float& e : x) {
    const uint64_t r = random();
    int sum = 0;
    for (int i = 0; i < 8; ++i) sum += static_cast<int>(r >> (8 * i) & 31);
    e = static_cast<float>(sum - 124) / 32;
  }
  return x;
}

struct Run {
  double seconds;
  std::vector<float> out;
  sageattn_plan_info info;
};

// The fastest of three.
Run run_library(int len, int threads, const LiteralInput& input) {
  sageattn_error err{};
  err.struct_size = sizeof err;
  sageattn_context_desc context_desc{};
  context_desc.struct_size = sizeof context_desc;
  context_desc.backend = SAGEATTN_BACKEND_CPU;
  context_desc.num_threads = threads;
  sageattn_context* context = nullptr;
  must(sageattn_context_create(&context_desc, &context, &err), err);
  sageattn_attn_desc desc;
  must(sageattn_attn_desc_init(&desc, sizeof desc, SAGEATTN_PRESET_SAGE2_8B, &err), err);
  desc.q_dtype = SAGEATTN_F32;
  desc.head_dim = kDim;
  desc.num_qo_heads = kHeads;
  desc.max_qo_len = desc.max_kv_len = len;
  sageattn_plan* plan = nullptr;
  must(sageattn_plan_create(context, &desc, &plan, &err), err);
  Run run{1e30, std::vector<float>(input.q.size()), {}};
  run.info.struct_size = sizeof run.info;
  must(sageattn_plan_get_info(plan, &run.info, &err), err);

  const auto alignment = static_cast<size_t>(run.info.workspace_alignment);
  const auto bytes = static_cast<size_t>(run.info.preferred_workspace);
  const size_t rounded = (bytes + alignment - 1) / alignment * alignment;
  void* workspace = std::aligned_alloc(alignment, rounded);
  if (workspace == nullptr) {
    std::fprintf(stderr, "no memory for the workspace\n");
    std::exit(1);
  }
  sageattn_execute_args args{};
  args.struct_size = sizeof args;
  args.batch = 1;
  args.qo_len = args.kv_len = len;
  args.q.data = input.q.data();
  args.k.data = input.k.data();
  args.v.data = input.v.data();
  args.out.data = run.out.data();
  for (int i = 0; i < 3; ++i) {
    const auto start = std::chrono::steady_clock::now();
    must(sageattn_execute(plan, &args, workspace, bytes, nullptr, &err), err);
    run.seconds = std::min(run.seconds, seconds_since(start));
  }
  std::free(workspace);
  sageattn_plan_destroy(plan);
  sageattn_context_destroy(context);
  return run;
}

LiteralInput head_of(const LiteralInput& input, int head) {
  LiteralInput one;
  one.qo_len = input.qo_len;
  one.kv_len = input.kv_len;
  const auto take = [head](const std::vector<float>& from, std::vector<float>& to) {
    for (size_t row = static_cast<size_t>(head) * kDim; row < from.size(); row += kHeads * kDim) {
      to.insert(to.end(), from.begin() + static_cast<int64_t>(row),
                from.begin() + static_cast<int64_t>(row) + kDim);
    }
  };
  take(input.q, one.q);
  take(input.k, one.k);
  take(input.v, one.v);
  return one;
}

// The literal implementation, its heads shared out over threads.
Run run_literal(sageattn_plan_info info, int threads, const LiteralInput& input) {
  info.num_kv_heads = 1;
  Run run{0, std::vector<float>(input.q.size()), info};
  std::vector<LiteralInput> heads;
  for (int h = 0; h < kHeads; ++h) heads.push_back(head_of(input, h));
  std::atomic<int> next{0};
  const auto work = [&] {
    for (int h; (h = next.fetch_add(1)) < kHeads;) {
      const LiteralOutput one =
          literal_attention(info, kDim, 1, MaskSpec{}, heads[static_cast<size_t>(h)]);
      for (int t = 0; t < input.qo_len; ++t) {
        std::memcpy(&run.out[(static_cast<size_t>(t) * kHeads + h) * kDim],
                    &one.out[static_cast<size_t>(t) * kDim], kDim * sizeof(float));
      }
    }
  };
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::thread> helpers;
  for (int i = 1; i < threads; ++i) helpers.emplace_back(work);
  work();
  for (std::thread& helper : helpers) helper.join();
  run.seconds = seconds_since(start);
  return run;
}

LiteralInput make_input(int len) {
  LiteralInput input;
  input.qo_len = input.kv_len = len;
  input.q = random_tensor(len, 1);
  input.k = random_tensor(len, 2);
  input.v = random_tensor(len, 3);
  return input;
}

// Multiplications and additions of both products, in units of 10^9 a second.
double giga_operations(int len, double seconds) {
  return 4.0 * kHeads * len * static_cast<double>(len) * kDim / seconds / 1e9;
}

}  // namespace

int main() {
  const int all = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  std::vector<int> thread_counts = {1};
  if (all > 1) thread_counts.push_back(all);
  std::printf("SAGE2_8B, %d heads x S x %d, no mask; seconds, best of 3 (literal: of 1)\n\n",
              kHeads, kDim);
  std::printf("%6s %8s %10s %10s %10s %8s\n", "S", "threads", "library", "GOP/s", "literal",
              "ratio");
  const LiteralInput input = make_input(1024);
  for (const int threads : thread_counts) {
    const Run library = run_library(1024, threads, input);
    const Run literal = run_literal(library.info, threads, input);
    if (std::memcmp(library.out.data(), literal.out.data(), library.out.size() * sizeof(float)) !=
        0) {
      std::fprintf(stderr, "the two disagree: the times mean nothing\n");
      return 1;
    }
    std::printf("%6d %8d %10.4f %10.1f %10.3f %7.0fx\n", 1024, threads, library.seconds,
                giga_operations(1024, library.seconds), literal.seconds,
                literal.seconds / library.seconds);
    std::fflush(stdout);
  }
  const LiteralInput longer = make_input(4096);
  for (const int threads : thread_counts) {
    const Run library = run_library(4096, threads, longer);
    std::printf("%6d %8d %10.4f %10.1f\n", 4096, threads, library.seconds,
                giga_operations(4096, library.seconds));
    std::fflush(stdout);
  }
  return 0;
}
