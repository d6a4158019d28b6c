/* The keys in two parts, attended each on its own and merged by their log-sum-exp, as ring
 * attention and split decoding do; compared with attention to all of them. Needs no GPU. */
#include <math.h>
#include <sageattn.h>
#include <stdio.h>
#include <stdlib.h>

#define CHECK(call) \
  if ((call) != SAGEATTN_OK) return fprintf(stderr, "%s\n", error.message), EXIT_FAILURE

enum { QUERIES = 64, KEYS = 300, FIRST = 170, HEADS = 2, DIM = 64, ROW = HEADS * DIM };
static float q[QUERIES * ROW], k[KEYS * ROW], v[KEYS * ROW];
static float whole[QUERIES * ROW], part[2][QUERIES * ROW];        /* [token][head][channel] */
static float whole_lse[HEADS * QUERIES], lse[2][HEADS * QUERIES]; /* [head][token] */

/* part[0] and lse[0] become those of both parts together. */
static void merge(void) {
  for (int head = 0; head < HEADS; ++head) {
    for (int token = 0; token < QUERIES; ++token) {
      const int row = head * QUERIES + token;
      const float a = lse[0][row], b = lse[1][row], most = fmaxf(a, b);
      if (most == -INFINITY) continue; /* no key in either part: out is 0 already */
      const float weight_a = expf(a - most), weight_b = expf(b - most);
      for (int i = (token * HEADS + head) * DIM; i < (token * HEADS + head + 1) * DIM; ++i)
        part[0][i] = (weight_a * part[0][i] + weight_b * part[1][i]) / (weight_a + weight_b);
      lse[0][row] = most + logf(weight_a + weight_b);
    }
  }
}

int main(void) {
  for (int i = 0; i < QUERIES * ROW; ++i) q[i] = (float)(i * 37 % 101) / 50 - 1;
  for (int i = 0; i < KEYS * ROW; ++i) k[i] = sinf((float)i), v[i] = cosf((float)i) + 0.5f;

  sageattn_error error = {.struct_size = sizeof error};
  sageattn_context_desc cpu = {.struct_size = sizeof cpu, .backend = SAGEATTN_BACKEND_CPU};
  sageattn_context *context;
  CHECK(sageattn_context_create(&cpu, &context, &error));

  /* What merging costs is rounding. What quantizing costs is more: each part has its own scales. */
  const int32_t presets[] = {SAGEATTN_PRESET_EXACT, SAGEATTN_PRESET_SAGE2_8B};
  const double limits[] = {1e-6, 0.01};
  for (int i = 0; i < 2; ++i) {
    sageattn_attn_desc desc;
    CHECK(sageattn_attn_desc_init(&desc, sizeof desc, presets[i], &error));
    desc.q_dtype = SAGEATTN_F32;
    desc.head_dim = DIM;
    desc.num_qo_heads = HEADS;
    desc.max_qo_len = QUERIES, desc.max_kv_len = KEYS;
    sageattn_plan *plan;
    CHECK(sageattn_plan_create(context, &desc, &plan, &error));
    sageattn_plan_info info = {.struct_size = sizeof info};
    CHECK(sageattn_plan_get_info(plan, &info, &error));
    const size_t unit = (size_t)info.workspace_alignment;
    const size_t size = ((size_t)info.min_workspace + unit - 1) / unit * unit;
    void *workspace = aligned_alloc(unit, size);

    sageattn_execute_args args = {.struct_size = sizeof args, .batch = 1, .qo_len = QUERIES};
    args.q.data = q;
    args.kv_len = KEYS, args.k.data = k, args.v.data = v;
    args.out.data = whole, args.lse.data = whole_lse;
    CHECK(sageattn_execute(plan, &args, workspace, size, NULL, &error));
    args.kv_len = FIRST;
    args.out.data = part[0], args.lse.data = lse[0];
    CHECK(sageattn_execute(plan, &args, workspace, size, NULL, &error));
    args.kv_len = KEYS - FIRST, args.k.data = k + FIRST * ROW, args.v.data = v + FIRST * ROW;
    args.out.data = part[1], args.lse.data = lse[1];
    CHECK(sageattn_execute(plan, &args, workspace, size, NULL, &error));
    merge();

    double worst = 0, difference = 0, norm = 0;
    for (int j = 0; j < HEADS * QUERIES; ++j) worst = fmax(worst, fabsf(lse[0][j] - whole_lse[j]));
    for (int j = 0; j < QUERIES * ROW; ++j) {
      difference += pow(part[0][j] - whole[j], 2);
      norm += pow(whole[j], 2);
    }
    const double relative = sqrt(difference / norm);
    printf("%s: merged output differs by %.2g of its norm, lse by at most %.2g\n", info.kernel_name,
           relative, worst);
    if (!(relative < limits[i] && worst < 10 * limits[i])) return EXIT_FAILURE;

    free(workspace);
    sageattn_plan_destroy(plan);
  }
  sageattn_context_destroy(context);
  return EXIT_SUCCESS;
}
