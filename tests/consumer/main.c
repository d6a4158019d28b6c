/* Attends one query to one key, exactly: the output is the value. */
#include <sageattn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HEAD_DIM = 64 };

static sageattn_error err;

static void require(int32_t status) {
  if (status != SAGEATTN_OK) {
    fprintf(stderr, "%s: %s\n", sageattn_status_name(status), err.message);
    exit(1);
  }
}

int main(void) {
  sageattn_context_desc context_desc;
  sageattn_context *context;
  sageattn_attn_desc desc;
  sageattn_plan *plan;
  sageattn_plan_info info;
  sageattn_execute_args args;
  float q[HEAD_DIM], k[HEAD_DIM], v[HEAD_DIM], out[HEAD_DIM];
  char *memory, *workspace;
  int i;

  if (sageattn_version() != SAGEATTN_VERSION_NUMBER) {
    fprintf(stderr, "library %s is not of this header\n", sageattn_version_string());
    return 1;
  }
  err.struct_size = sizeof err;

  memset(&context_desc, 0, sizeof context_desc);
  context_desc.struct_size = sizeof context_desc;
  context_desc.backend = SAGEATTN_BACKEND_CPU;
  require(sageattn_context_create(&context_desc, &context, &err));

  require(sageattn_attn_desc_init(&desc, sizeof desc, SAGEATTN_PRESET_EXACT, &err));
  desc.q_dtype = SAGEATTN_F32;
  desc.head_dim = HEAD_DIM;
  desc.num_qo_heads = 1;
  desc.max_qo_len = 1;
  desc.max_kv_len = 1;
  require(sageattn_plan_create(context, &desc, &plan, &err));
  sageattn_context_destroy(context);

  memset(&info, 0, sizeof info);
  info.struct_size = sizeof info;
  require(sageattn_plan_get_info(plan, &info, &err));
  memory = malloc((size_t)(info.min_workspace + info.workspace_alignment));
  if (!memory) return 1;
  workspace = memory;
  while ((uintptr_t)workspace % (uintptr_t)info.workspace_alignment) workspace++;

  for (i = 0; i < HEAD_DIM; i++) {
    q[i] = (float)i;
    k[i] = (float)(i % 7);
    v[i] = (float)(i - 20);
    out[i] = -1000;
  }
  memset(&args, 0, sizeof args);
  args.struct_size = sizeof args;
  args.batch = 1;
  args.qo_len = 1;
  args.kv_len = 1;
  args.q.data = q;
  args.k.data = k;
  args.v.data = v;
  args.out.data = out;
  require(sageattn_execute(plan, &args, workspace, (size_t)info.min_workspace, NULL, &err));
  sageattn_plan_destroy(plan);
  free(memory);

  for (i = 0; i < HEAD_DIM; i++) {
    if (out[i] != v[i]) {
      fprintf(stderr, "out[%d] is %g, not %g\n", i, (double)out[i], (double)v[i]);
      return 1;
    }
  }
  printf("sageattn %s: ok\n", sageattn_version_string());
  return 0;
}
