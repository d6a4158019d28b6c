// What examples/cpp/attention.cpp does not use of sageattn.hpp.
#include <cstdio>
#include <cstdlib>
#include <string>
#include <type_traits>
#include <utility>

#include "sageattn.hpp"

#define REQUIRE(condition) \
  if (!(condition)) std::fprintf(stderr, "not true: %s\n", #condition), std::exit(1)

template <typename Function>
sageattn::Error error_of(Function function) {
  try {
    function();
  } catch (const sageattn::Error& error) {
    return error;
  }
  return {SAGEATTN_OK, ""};
}

int main() {
  static_assert(!std::is_copy_constructible_v<sageattn::Plan>);
  static_assert(std::is_nothrow_move_assignable_v<sageattn::Context>);

  auto desc = sageattn::sized<sageattn_context_desc>();
  desc.backend = SAGEATTN_BACKEND_CPU;
  desc.num_threads = -1;
  const auto refused = error_of([&] { sageattn::Context{desc}; });
  REQUIRE(refused.status() == SAGEATTN_E_INVALID_ARGUMENT);
  REQUIRE(std::string(refused.what()).find("num_threads = -1") != std::string::npos);

  desc.num_threads = 1;
  sageattn::Context first(desc);
  sageattn::Context context = std::move(first);
  REQUIRE(!first.get() && context.get());
  const std::string report = context.report();
  REQUIRE(report.find("backend: ") != std::string::npos && report.back() != '\0');
  REQUIRE(error_of([&] { context.export_blob(); }).status() == SAGEATTN_E_UNSUPPORTED);
  REQUIRE(error_of([&] { context.import_blob("", 0); }).status() == SAGEATTN_E_UNSUPPORTED);

  auto attention = sageattn::preset(SAGEATTN_PRESET_EXACT);
  const auto incomplete = error_of([&] { sageattn::Plan(context, attention); });
  REQUIRE(incomplete.status() == SAGEATTN_E_INVALID_ARGUMENT);
  attention.q_dtype = SAGEATTN_F32;
  attention.head_dim = attention.num_qo_heads = attention.max_qo_len = attention.max_kv_len = 8;
  const sageattn::Plan plan(context, attention);
  REQUIRE(plan.info().backend == SAGEATTN_BACKEND_CPU);
  REQUIRE(error_of([&] { plan.export_blob(); }).status() == SAGEATTN_E_UNSUPPORTED);

  const sageattn::Workspace workspace(plan);
  REQUIRE(workspace.size() >= std::size_t(plan.info().min_workspace));
  REQUIRE(std::size_t(workspace.data()) % std::size_t(plan.info().workspace_alignment) == 0);
  const auto args = sageattn::sized<sageattn_execute_args>();  // batch 0: nothing to do
  plan.execute(args, workspace.data(), workspace.size());
  REQUIRE(error_of([&] { plan.execute(args, nullptr, 0); }).status() == SAGEATTN_E_WORKSPACE);
}
