/* Three packed sequences, the second empty, and what becomes of lengths that are nonsense. Needs no
 * GPU. */
#include <math.h>
#include <sageattn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(call) \
  if ((call) != SAGEATTN_OK) return fprintf(stderr, "%s\n", error.message), EXIT_FAILURE
#define REQUIRE(condition) \
  if (!(condition)) return fprintf(stderr, "not true: %s\n", #condition), EXIT_FAILURE

enum { SEQUENCES = 3, HEADS = 2, DIM = 64, ROW = HEADS * DIM, QUERIES = 12, KEYS = 100 };
static float q[QUERIES * ROW], k[KEYS * ROW], v[KEYS * ROW];
static float out[QUERIES * ROW], alone[QUERIES * ROW]; /* [token][head][channel], packed */

int main(void) {
  for (int i = 0; i < QUERIES * ROW; ++i) q[i] = (float)(i * 37 % 101) / 50 - 1;
  for (int i = 0; i < KEYS * ROW; ++i) k[i] = sinf((float)i), v[i] = cosf((float)i * 0.7f);

  /* Sequence b has the queries cu_seqlens_q[b] .. cu_seqlens_q[b + 1] - 1, keys likewise. */
  int32_t cu_seqlens_q[SEQUENCES + 1] = {0, 5, 5, QUERIES};
  int32_t cu_seqlens_kv[SEQUENCES + 1] = {0, 40, 40, KEYS};
  int32_t status[SEQUENCES];

  sageattn_error error = {.struct_size = sizeof error};
  sageattn_context_desc cpu = {.struct_size = sizeof cpu, .backend = SAGEATTN_BACKEND_CPU};
  sageattn_context *context;
  CHECK(sageattn_context_create(&cpu, &context, &error));

  sageattn_attn_desc desc;
  CHECK(sageattn_attn_desc_init(&desc, sizeof desc, SAGEATTN_PRESET_SAGE2_8B, &error));
  desc.q_dtype = SAGEATTN_F32;
  desc.batch_mode = SAGEATTN_BATCH_VARLEN;
  desc.mask = SAGEATTN_MASK_CAUSAL_BOTTOM_RIGHT;
  desc.head_dim = DIM;
  desc.num_qo_heads = HEADS;
  desc.max_batch = SEQUENCES;
  desc.max_qo_len = QUERIES, desc.max_kv_len = KEYS; /* of one sequence */
  sageattn_plan *plan;
  CHECK(sageattn_plan_create(context, &desc, &plan, &error));
  sageattn_plan_info info = {.struct_size = sizeof info};
  CHECK(sageattn_plan_get_info(plan, &info, &error));
  const size_t unit = (size_t)info.workspace_alignment;
  const size_t size = ((size_t)info.min_workspace + unit - 1) / unit * unit;
  void *workspace = aligned_alloc(unit, size);

  sageattn_execute_args args = {.struct_size = sizeof args, .batch = SEQUENCES};
  args.total_qo = QUERIES, args.total_kv = KEYS;
  args.q.data = q, args.k.data = k, args.v.data = v, args.out.data = out;
  args.cu_seqlens_q = cu_seqlens_q, args.cu_seqlens_kv = cu_seqlens_kv;
  args.status = status;
  CHECK(sageattn_execute(plan, &args, workspace, size, NULL, &error));
  for (int b = 0; b < SEQUENCES; ++b) REQUIRE(status[b] == SAGEATTN_SEQUENCE_OK);

  /* A sequence gives the same bits alone as among others. */
  sageattn_execute_args last = args;
  last.batch = 1;
  last.cu_seqlens_q = cu_seqlens_q + 2, last.cu_seqlens_kv = cu_seqlens_kv + 2;
  last.out.data = alone;
  CHECK(sageattn_execute(plan, &last, workspace, size, NULL, &error));
  REQUIRE(memcmp(alone + 5 * ROW, out + 5 * ROW, 7 * ROW * sizeof *out) == 0);
  printf("sequence 2, packed and alone: %.3f %.3f\n", out[5 * ROW], alone[5 * ROW]);

  /* Lengths may lie in a GPU's memory, so nonsense there is no error of the call: the sequence's own
   * rows become NaN, its status word says so, and the others are as before. */
  const int32_t seqused_kv[SEQUENCES] = {41, 0, KEYS - 40}; /* the first has 40 */
  args.seqused_kv = seqused_kv;
  CHECK(sageattn_execute(plan, &args, workspace, size, NULL, &error));
  REQUIRE(status[0] == SAGEATTN_SEQUENCE_BAD_LENGTHS);
  REQUIRE(status[1] == SAGEATTN_SEQUENCE_OK && status[2] == SAGEATTN_SEQUENCE_OK);
  for (int i = 0; i < 5 * ROW; ++i) REQUIRE(isnan(out[i]));
  REQUIRE(memcmp(alone + 5 * ROW, out + 5 * ROW, 7 * ROW * sizeof *out) == 0);
  printf("status with 41 of 40 keys in use: %d %d %d\n", status[0], status[1], status[2]);

  free(workspace);
  sageattn_plan_destroy(plan);
  sageattn_context_destroy(context);
  return EXIT_SUCCESS;
}
