/* SPDX-License-Identifier: Apache-2.0 */
#include "shim.h"

#include "_cgo_export.h"

static void forward_log(void *user, int32_t level, const char *message) {
  sageattnGoLog((uintptr_t)user, level, (char *)message);
}

int32_t sageattn_go_context_create(const sageattn_context_desc *desc, uintptr_t log,
                                   sageattn_context **ctx, sageattn_error *err) {
  sageattn_context_desc full = *desc;
  if (log) {
    full.log = forward_log;
    full.log_user = (void *)log;
  }
  return sageattn_context_create(&full, ctx, err);
}

static int32_t execute(const sageattn_plan *plan, const sageattn_execute_args *shape, const void *q,
                       const void *k, const void *v, void *out, float *lse,
                       const int32_t *cu_seqlens_q, const int32_t *cu_seqlens_kv,
                       const int32_t *seqused_kv, int32_t *status, void *workspace,
                       size_t workspace_size, struct CUstream_st *stream, sageattn_error *err) {
  sageattn_execute_args args = *shape;
  args.q.data = q;
  args.k.data = k;
  args.v.data = v;
  args.out.data = out;
  args.lse.data = lse;
  args.cu_seqlens_q = cu_seqlens_q;
  args.cu_seqlens_kv = cu_seqlens_kv;
  args.seqused_kv = seqused_kv;
  args.status = status;
  return sageattn_execute(plan, &args, workspace, workspace_size, stream, err);
}

int32_t sageattn_go_execute(const sageattn_plan *plan, const sageattn_execute_args *shape,
                            const void *q, const void *k, const void *v, void *out, float *lse,
                            const int32_t *cu_seqlens_q, const int32_t *cu_seqlens_kv,
                            const int32_t *seqused_kv, int32_t *status, void *workspace,
                            size_t workspace_size, sageattn_error *err) {
  return execute(plan, shape, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_kv, seqused_kv, status,
                 workspace, workspace_size, NULL, err);
}

int32_t sageattn_go_execute_device(const sageattn_plan *plan, const sageattn_execute_args *shape,
                                   uintptr_t q, uintptr_t k, uintptr_t v, uintptr_t out,
                                   uintptr_t lse, uintptr_t cu_seqlens_q, uintptr_t cu_seqlens_kv,
                                   uintptr_t seqused_kv, uintptr_t status, uintptr_t workspace,
                                   size_t workspace_size, uintptr_t stream, sageattn_error *err) {
  return execute(plan, shape, (const void *)q, (const void *)k, (const void *)v, (void *)out,
                 (float *)lse, (const int32_t *)cu_seqlens_q, (const int32_t *)cu_seqlens_kv,
                 (const int32_t *)seqused_kv, (int32_t *)status, (void *)workspace, workspace_size,
                 (struct CUstream_st *)stream, err);
}

int32_t sageattn_go_compare(const sageattn_compare_args *shape, const void *out, const void *ref,
                            sageattn_compare_result *result, sageattn_error *err) {
  sageattn_compare_args args = *shape;
  args.out.data = out;
  args.ref.data = ref;
  return sageattn_compare(&args, result, err);
}
