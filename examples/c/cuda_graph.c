/* An execute captured in a CUDA graph, which is replayed with other inputs and with other lengths
 * in device memory, and compared with the CPU backend. Exits with 77 without a GPU or NVRTC. */
#include <sageattn.h>

#include "cuda_driver.h"

#define CHECK(call) \
  if ((call) != SAGEATTN_OK) return fprintf(stderr, "%s\n", error.message), EXIT_FAILURE

enum { BATCH = 2, TOKENS = 512, HEADS = 4, DIM = 128, COUNT = BATCH * TOKENS * HEADS * DIM };
static float q[COUNT], k[COUNT], v[COUNT], out[COUNT], expected[COUNT];
static sageattn_error error = {.struct_size = sizeof error};

static void fill(float *data, unsigned seed) {
  for (int i = 0; i < COUNT; ++i) {
    seed = seed * 1664525u + 1013904223u;
    data[i] = (float)(seed >> 8) / (1 << 23) - 1;
  }
}

int main(void) {
  sageattn_context_desc context_desc = {.struct_size = sizeof context_desc,
                                        .backend = SAGEATTN_BACKEND_CUDA};
  sageattn_context *gpu, *cpu;
  int32_t result = sageattn_context_create(&context_desc, &gpu, &error);
  if (result == SAGEATTN_E_NO_DEVICE) return fprintf(stderr, "skipped: %s\n", error.message), 77;
  CHECK(result);

  sageattn_attn_desc desc;
  CHECK(sageattn_attn_desc_init(&desc, sizeof desc, SAGEATTN_PRESET_AUTO, &error));
  desc.q_dtype = SAGEATTN_F32;
  desc.mask = SAGEATTN_MASK_CAUSAL_BOTTOM_RIGHT;
  desc.head_dim = DIM;
  desc.num_qo_heads = HEADS;
  desc.max_batch = BATCH;
  desc.max_qo_len = desc.max_kv_len = TOKENS;
  sageattn_plan *plan, *reference;
  result = sageattn_plan_create(gpu, &desc, &plan, &error); /* compiles the first time */
  if (result == SAGEATTN_E_NVRTC_NOT_FOUND)
    return fprintf(stderr, "skipped: %s\n", error.message), 77;
  CHECK(result);
  sageattn_plan_info info = {.struct_size = sizeof info}, cpu_info = info;
  CHECK(sageattn_plan_get_info(plan, &info, &error));

  context_desc.backend = SAGEATTN_BACKEND_CPU;
  context_desc.target_arch = info.arch; /* the same numerics */
  CHECK(sageattn_context_create(&context_desc, &cpu, &error));
  CHECK(sageattn_plan_create(cpu, &desc, &reference, &error));
  CHECK(sageattn_plan_get_info(reference, &cpu_info, &error));
  const size_t unit = (size_t)cpu_info.workspace_alignment;
  const size_t size = ((size_t)cpu_info.min_workspace + unit - 1) / unit * unit;
  void *cpu_workspace = aligned_alloc(unit, size);

  cuda_open();
  CUstream stream;
  void *graph, *executable;
  cuda(cuStreamCreate(&stream, 1 /* CU_STREAM_NON_BLOCKING */));
  float *device_q = cuda_allocate(sizeof q), *device_k = cuda_allocate(sizeof k);
  float *device_v = cuda_allocate(sizeof v), *device_out = cuda_allocate(sizeof out);
  int32_t *device_used = cuda_allocate(BATCH * sizeof(int32_t));
  void *workspace = cuda_allocate((size_t)info.preferred_workspace);

  sageattn_execute_args args = {.struct_size = sizeof args, .batch = BATCH};
  args.qo_len = 100; /* of each sequence, at the end of its keys in use */
  args.kv_len = TOKENS;
  sageattn_execute_args cpu_args = args;
  args.q.data = device_q, args.k.data = device_k, args.v.data = device_v;
  args.out.data = device_out, args.seqused_kv = device_used;
  cuda(cuStreamBeginCapture_v2(stream, 1 /* CU_STREAM_CAPTURE_MODE_THREAD_LOCAL */));
  CHECK(sageattn_execute(plan, &args, workspace, (size_t)info.preferred_workspace, stream, &error));
  cuda(cuStreamEndCapture(stream, &graph));
  cuda(cuGraphInstantiateWithFlags(&executable, graph, 0));

  const int32_t used[][BATCH] = {{TOKENS, 301}, {128, 510}, {100, 0}};
  for (unsigned step = 0; step < 3; ++step) {
    fill(q, step), fill(k, step + 10), fill(v, step + 20);
    cuda_upload(device_q, q, sizeof q, stream);
    cuda_upload(device_k, k, sizeof k, stream);
    cuda_upload(device_v, v, sizeof v, stream);
    cuda_upload(device_used, used[step], sizeof used[step], stream);
    cuda(cuGraphLaunch(executable, stream));
    cuda_download(out, device_out, sizeof out, stream);

    cpu_args.q.data = q, cpu_args.k.data = k, cpu_args.v.data = v;
    cpu_args.out.data = expected, cpu_args.seqused_kv = used[step];
    CHECK(sageattn_execute(reference, &cpu_args, cpu_workspace, size, NULL, &error));
    sageattn_compare_result difference = {.struct_size = sizeof difference};
    sageattn_compare_args compare = {.struct_size = sizeof compare,
                                     .out_dtype = SAGEATTN_F32,
                                     .ref_dtype = SAGEATTN_F32,
                                     .batch = BATCH,
                                     .len = args.qo_len,
                                     .num_heads = HEADS,
                                     .head_dim = DIM};
    compare.out.data = out, compare.ref.data = expected;
    CHECK(sageattn_compare(&compare, &difference, &error));
    printf("%s with %d and %d keys: differs from the CPU backend by %.2g of its norm\n",
           info.kernel_name, used[step][0], used[step][1], difference.rel_error);
    /* Where an exponential differs in its last bit P may round to the next E4M3 value, 1/8 away; V of
     * mean 0 cancels in the output, such differences do not. A wrong key makes an error near 1. */
    if (difference.nonfinite_out || !(difference.worst_rel_error < 0.05)) return EXIT_FAILURE;
  }

  cuda(cuGraphExecDestroy(executable));
  cuda(cuGraphDestroy(graph));
  cuda(cuStreamDestroy_v2(stream));
  void *const memory[] = {device_q, device_k, device_v, device_out, device_used, workspace};
  for (int i = 0; i < 6; ++i) cuda_free(memory[i]);
  free(cpu_workspace);
  sageattn_plan_destroy(plan);
  sageattn_plan_destroy(reference);
  sageattn_context_destroy(gpu);
  sageattn_context_destroy(cpu);
  return EXIT_SUCCESS;
}
