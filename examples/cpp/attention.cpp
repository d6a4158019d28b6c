// Causal attention of 4 heads over 256 tokens. Needs no GPU.
#include <cstdio>
#include <vector>

#include "sageattn.hpp"

int main() try {
  constexpr int kTokens = 256, kHeads = 4, kDim = 64;
  std::vector<float> qkv(kTokens * kHeads * kDim), out(qkv.size());  // [token][head][channel]
  for (int i = 0; i < kTokens * kHeads * kDim; ++i) qkv[i] = float(i * 37 % 101) / 50 - 1;

  auto context_desc = sageattn::sized<sageattn_context_desc>();
  context_desc.backend = SAGEATTN_BACKEND_CPU;  // data in host memory
  auto desc = sageattn::preset(SAGEATTN_PRESET_SAGE2_8B);
  desc.q_dtype = SAGEATTN_F32;
  desc.mask = SAGEATTN_MASK_CAUSAL_BOTTOM_RIGHT;
  desc.head_dim = kDim;
  desc.num_qo_heads = kHeads;
  desc.max_qo_len = desc.max_kv_len = kTokens;
  const sageattn::Plan plan(sageattn::Context(context_desc), desc);
  const sageattn::Workspace workspace(plan);

  auto args = sageattn::sized<sageattn_execute_args>();
  args.batch = 1;
  args.qo_len = args.kv_len = kTokens;
  args.q.data = args.k.data = args.v.data = qkv.data();
  args.out.data = out.data();
  plan.execute(args, workspace.data(), workspace.size());
  std::printf("token 0: %.3f %.3f (its own v: %.3f %.3f), last token: %.3f %.3f\n", out[0], out[1],
              qkv[0], qkv[1], out[(kTokens - 1) * kHeads * kDim],
              out[(kTokens - 1) * kHeads * kDim + 1]);
} catch (const sageattn::Error& error) {
  std::fprintf(stderr, "%s: %s\n", sageattn_status_name(error.status()), error.what());
  return 1;
}
