/* SPDX-License-Identifier: Apache-2.0
 *
 * What cgo's rule on pointers needs: C may be handed Go memory as an argument, but not Go memory
 * that itself holds pointers to Go memory. So structs come here without their data pointers, which
 * are arguments of their own and are put in on C's stack. Any slice can then be passed as it is. */
#ifndef SAGEATTN_GO_SHIM_H
#define SAGEATTN_GO_SHIM_H

#include <sageattn.h>

int32_t sageattn_go_context_create(const sageattn_context_desc *desc, uintptr_t log,
                                   sageattn_context **ctx, sageattn_error *err);

int32_t sageattn_go_execute(const sageattn_plan *plan, const sageattn_execute_args *shape,
                            const void *q, const void *k, const void *v, void *out, float *lse,
                            const int32_t *cu_seqlens_q, const int32_t *cu_seqlens_kv,
                            const int32_t *seqused_kv, int32_t *status, void *workspace,
                            size_t workspace_size, sageattn_error *err);

/* Addresses on a device are numbers to Go, whose collector must never take one for a pointer. */
int32_t sageattn_go_execute_device(const sageattn_plan *plan, const sageattn_execute_args *shape,
                                   uintptr_t q, uintptr_t k, uintptr_t v, uintptr_t out,
                                   uintptr_t lse, uintptr_t cu_seqlens_q, uintptr_t cu_seqlens_kv,
                                   uintptr_t seqused_kv, uintptr_t status, uintptr_t workspace,
                                   size_t workspace_size, uintptr_t stream, sageattn_error *err);

int32_t sageattn_go_compare(const sageattn_compare_args *shape, const void *out, const void *ref,
                            sageattn_compare_result *result, sageattn_error *err);

#endif /* SAGEATTN_GO_SHIM_H */
