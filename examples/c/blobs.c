/* Kernels compiled where there is NVRTC but no GPU, and run where there is a GPU but no NVRTC:
 *
 *   blobs write FILE ARCH    compiles for ARCH (80, 86, 89, 90 or 120) and writes FILE
 *   blobs run FILE           imports FILE and attends; the GPU must be of ARCH
 *
 * Exits with 77 where NVRTC, or the GPU, is missing. */
#include <math.h>
#include <sageattn.h>

#include "cuda_driver.h"

#define CHECK(call) \
  if ((call) != SAGEATTN_OK) return fprintf(stderr, "%s\n", error.message), EXIT_FAILURE

enum { TOKENS = 256, HEADS = 4, DIM = 64, COUNT = TOKENS * HEADS * DIM };
static float data[COUNT], out[COUNT];
static sageattn_error error = {.struct_size = sizeof error};

/* The plan that both modes make: a blob holds the kernels of plans, and NO_JIT finds no others. */
static int32_t make_plan(sageattn_context *context, sageattn_plan **plan) {
  sageattn_attn_desc desc;
  const int32_t result = sageattn_attn_desc_init(&desc, sizeof desc, SAGEATTN_PRESET_SAGE1, &error);
  if (result != SAGEATTN_OK) return result;
  desc.q_dtype = SAGEATTN_F32;
  desc.mask = SAGEATTN_MASK_CAUSAL_BOTTOM_RIGHT;
  desc.head_dim = DIM;
  desc.num_qo_heads = HEADS;
  desc.max_qo_len = desc.max_kv_len = TOKENS;
  return sageattn_plan_create(context, &desc, plan, &error);
}

static int write_blob(const char *path, int arch) {
  sageattn_context_desc desc = {
      .struct_size = sizeof desc, .backend = SAGEATTN_BACKEND_CUDA, .target_arch = arch};
  sageattn_context *context;
  CHECK(sageattn_context_create(&desc, &context, &error));
  sageattn_plan *plan;
  const int32_t result = make_plan(context, &plan);
  if (result == SAGEATTN_E_NVRTC_NOT_FOUND)
    return fprintf(stderr, "skipped: %s\n", error.message), 77;
  CHECK(result);

  size_t size; /* first how much, then the bytes */
  if (sageattn_context_export_blob(context, NULL, 0, &size, &error) != SAGEATTN_E_BUFFER_TOO_SMALL)
    return fprintf(stderr, "%s\n", error.message), EXIT_FAILURE;
  void *blob = malloc(size);
  CHECK(sageattn_context_export_blob(context, blob, size, &size, &error));
  FILE *file = fopen(path, "wb");
  if (!file || fwrite(blob, 1, size, file) != size || fclose(file)) return perror(path), 1;
  printf("%s: %zu bytes for sm_%d\n", path, size, arch);
  free(blob);
  sageattn_plan_destroy(plan);
  sageattn_context_destroy(context);
  return EXIT_SUCCESS;
}

static int run_blob(const char *path) {
  sageattn_context_desc desc = {.struct_size = sizeof desc,
                                .backend = SAGEATTN_BACKEND_CUDA,
                                .flags = SAGEATTN_CONTEXT_NO_JIT | SAGEATTN_CONTEXT_NO_DISK_CACHE};
  sageattn_context *context;
  const int32_t result = sageattn_context_create(&desc, &context, &error);
  if (result == SAGEATTN_E_NO_DEVICE) return fprintf(stderr, "skipped: %s\n", error.message), 77;
  CHECK(result);

  static char blob[16 << 20];
  FILE *file = fopen(path, "rb");
  if (!file) return perror(path), EXIT_FAILURE;
  const size_t bytes = fread(blob, 1, sizeof blob, file);
  fclose(file);
  CHECK(sageattn_context_import_blob(context, blob, bytes, &error));
  sageattn_plan *plan;
  CHECK(make_plan(context, &plan));
  sageattn_plan_info info = {.struct_size = sizeof info};
  CHECK(sageattn_plan_get_info(plan, &info, &error));

  for (int i = 0; i < COUNT; ++i) data[i] = (float)(i * 37 % 101) / 50 - 1;
  cuda_open();
  const size_t size = (size_t)info.min_workspace;
  void *workspace = cuda_allocate(size);
  float *device_data = cuda_allocate(sizeof data), *device_out = cuda_allocate(sizeof out);
  cuda_upload(device_data, data, sizeof data, NULL);
  sageattn_execute_args args = {.struct_size = sizeof args, .batch = 1};
  args.qo_len = args.kv_len = TOKENS;
  args.q.data = args.k.data = args.v.data = device_data, args.out.data = device_out;
  CHECK(sageattn_execute(plan, &args, workspace, size, NULL, &error));
  cuda_download(out, device_out, sizeof out, NULL);
  cuda_free(workspace), cuda_free(device_data), cuda_free(device_out);
  sageattn_plan_destroy(plan);
  sageattn_context_destroy(context);

  /* The first token sees itself only: its output is its own v, in fp16. */
  printf("%s: token 0: %.3f %.3f (its own v: %.3f %.3f)\n", info.kernel_name, out[0], out[1],
         data[0], data[1]);
  for (int i = 0; i < HEADS * DIM; ++i)
    if (!(fabsf(out[i] - data[i]) < 0.002f)) return EXIT_FAILURE;
  return info.origin == SAGEATTN_ORIGIN_BLOB ? EXIT_SUCCESS : EXIT_FAILURE;
}

int main(int argc, char **argv) {
  const int arch = argc == 4 ? atoi(argv[3]) : 0;
  if (arch != 0 && strcmp(argv[1], "write") == 0) return write_blob(argv[2], arch);
  if (argc == 3 && strcmp(argv[1], "run") == 0) return run_blob(argv[2]);
  return fprintf(stderr, "usage: %s write FILE ARCH | run FILE\n", argv[0]), EXIT_FAILURE;
}
