/* Causal attention of 4 heads over 256 tokens. Needs no GPU. */
#include <sageattn.h>
#include <stdio.h>
#include <stdlib.h>

#define CHECK(call) \
  if ((call) != SAGEATTN_OK) return fprintf(stderr, "%s\n", error.message), EXIT_FAILURE

enum { TOKENS = 256, HEADS = 4, DIM = 64 };
static float q[TOKENS * HEADS * DIM], k[TOKENS * HEADS * DIM], v[TOKENS * HEADS * DIM];
static float out[TOKENS * HEADS * DIM]; /* all [token][head][channel] */

int main(void) {
  for (int i = 0; i < TOKENS * HEADS * DIM; ++i)
    q[i] = k[i] = v[i] = (float)(i * 37 % 101) / 50 - 1;

  sageattn_error error = {.struct_size = sizeof error};
  sageattn_context_desc context_desc = {.struct_size = sizeof context_desc,
                                        .backend = SAGEATTN_BACKEND_CPU}; /* data in host memory */
  sageattn_context *context;
  CHECK(sageattn_context_create(&context_desc, &context, &error));

  sageattn_attn_desc desc; /* what to compute, and the limits of every execute */
  CHECK(sageattn_attn_desc_init(&desc, sizeof desc, SAGEATTN_PRESET_SAGE2_8B, &error));
  desc.q_dtype = SAGEATTN_F32;
  desc.mask = SAGEATTN_MASK_CAUSAL_BOTTOM_RIGHT;
  desc.head_dim = DIM;
  desc.num_qo_heads = HEADS;
  desc.max_qo_len = desc.max_kv_len = TOKENS;
  sageattn_plan *plan;
  CHECK(sageattn_plan_create(context, &desc, &plan, &error));

  sageattn_plan_info info = {.struct_size = sizeof info};
  CHECK(sageattn_plan_get_info(plan, &info, &error));
  size_t unit = (size_t)info.workspace_alignment;
  size_t size = ((size_t)info.min_workspace + unit - 1) / unit * unit;
  void *workspace = aligned_alloc(unit, size);

  sageattn_execute_args args = {.struct_size = sizeof args, .batch = 1};
  args.qo_len = args.kv_len = TOKENS;
  args.q.data = q, args.k.data = k, args.v.data = v, args.out.data = out;
  CHECK(sageattn_execute(plan, &args, workspace, size, NULL, &error));
  printf("token 0: %.3f %.3f (its own v: %.3f %.3f), last token: %.3f %.3f\n", out[0], out[1], v[0],
         v[1], out[(TOKENS - 1) * HEADS * DIM], out[(TOKENS - 1) * HEADS * DIM + 1]);

  free(workspace);
  sageattn_plan_destroy(plan);
  sageattn_context_destroy(context);
  return EXIT_SUCCESS;
}
