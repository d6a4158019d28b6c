/* SPDX-License-Identifier: Apache-2.0
 *
 * sageattn.h - the whole public interface of libsageattn, and its manual.
 *
 * libsageattn computes softmax attention O = softmax(sm_scale Q K^T) V with Q and K quantized to
 * INT8 or INT4 after smoothing, and P and V to FP8 or FP16 (SageAttention). Nothing is
 * approximated but the precision of the operands: every query attends to every key that its mask
 * admits.
 *
 * THE FOUR STEPS
 *   1. sageattn_context_create     once a process and device
 *   2. sageattn_plan_create        once a kind of attention (types, heads, limits, numerics)
 *   3. sageattn_plan_get_info      how much workspace an execute needs
 *   4. sageattn_execute            as often as you like, with lengths and pointers
 *
 * RULES THAT HOLD FOR EVERY CALL
 *   Structs    Every struct but the small frozen ones starts with struct_size, which the caller
 *              sets to sizeof(the struct) (zero the rest first). Zero is the default of every
 *              field. An input struct shorter than the library's means zero for what is missing;
 *              a longer one must hold zeros beyond what the library knows, else
 *              SAGEATTN_E_UNKNOWN_FIELD. Output structs are written as far as both
 *              sides know them. Fields are only ever appended.
 *   Values     An unknown non-zero value is an error. Nothing is silently ignored.
 *   Errors     Every function that can fail returns a status (int32_t, SAGEATTN_OK = 0) and takes
 *              a caller-owned sageattn_error last, which may be NULL. Its message names the
 *              function, the field, its value and the limit. On failure output handles are NULL
 *              and outputs are untouched (but for *needed, where a function has it).
 *   Threads    Every function may be called from any thread at any time, also on the same handle,
 *              except that a handle must not be used during or after its own destroy, which
 *              nothing detects. Plans are immutable. Each execute in flight needs a workspace of
 *              its own.
 *   Pointers   A pointer must not be NULL unless its comment says so, else
 *              SAGEATTN_E_INVALID_ARGUMENT. Data and int32 pointers are aligned to their element,
 *              else SAGEATTN_E_MISALIGNED.
 *   Ownership  Handles belong to the caller and are freed by their destroy function, in any
 *              order: a plan keeps what it needs of its context alive. All other pointers are
 *              borrowed for the duration of the call (for CUDA executes: until the work that was
 *              enqueued has run).
 *   Inputs     q, k, v, lengths are never written.
 *   Bits       Same inputs, same plan, same machine kind: same bits, whatever the thread count.
 *
 * WORDS
 *   qo_len, kv_len    tokens of queries (and outputs) and of keys (and values) of one sequence
 *   head_dim          channels of q and k; head_dim_v, channels of v and out
 *   GQA               num_qo_heads is a multiple of num_kv_heads; query head h reads kv head
 *                     h / (num_qo_heads / num_kv_heads)
 *   NHD, HND          order of tokens (N), heads (H) and channels (D) in memory, batch outermost
 */
#ifndef SAGEATTN_H
#define SAGEATTN_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__) || defined(__clang__)
#define SAGEATTN_API __attribute__((visibility("default")))
#else
#define SAGEATTN_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Version of this header. Compare with sageattn_version() to find a mismatch. */
#define SAGEATTN_VERSION_MAJOR 0
#define SAGEATTN_VERSION_MINOR 1
#define SAGEATTN_VERSION_PATCH 0
#define SAGEATTN_VERSION_NUMBER \
  (SAGEATTN_VERSION_MAJOR * 10000 + SAGEATTN_VERSION_MINOR * 100 + SAGEATTN_VERSION_PATCH)

/* A CUDA stream: CUstream and cudaStream_t both convert. No CUDA header is needed. */
struct CUstream_st;

/* Opaque handles. */
typedef struct sageattn_context sageattn_context;
typedef struct sageattn_plan sageattn_plan;

/* ------------------------------------------------------------------------------------------- *
 * Constants. All are int32_t values; 0 is the default where a field allows one.
 * ------------------------------------------------------------------------------------------- */

/* Status of a call. Values are pinned for ever; groups leave room. */
enum {
  SAGEATTN_OK = 0,

  /* 100..199: the call is wrong; correct it. */
  SAGEATTN_E_INVALID_ARGUMENT = 100, /* a field's value is outside its documented range */
  SAGEATTN_E_UNKNOWN_FIELD = 101,    /* non-zero bytes beyond the struct this library knows */
  SAGEATTN_E_MISALIGNED = 102,       /* a pointer or stride lacks the alignment it needs */
  /* An output (out, lse, status, the workspace) overlaps an input, another output or itself. Two
   * tensors may share a buffer if their address ranges are apart, or if there is a stride S of one
   * of them modulo which they are apart: so q, k, v and out may be columns of one [tokens, columns]
   * array, S its row. An output itself must be laid out so that each stride steps over all that the
   * smaller ones span; any permutation of dimensions, padding and negative strides are fine. */
  SAGEATTN_E_ALIASED = 103,
  SAGEATTN_E_LIMIT = 104,            /* lengths of an execute exceed the limits of its plan */
  SAGEATTN_E_WORKSPACE = 105,        /* workspace is NULL, too small or misaligned */
  SAGEATTN_E_BUFFER_TOO_SMALL = 106, /* *needed says what the buffer must hold */

  /* 200..299: this library, backend or machine cannot do it. */
  SAGEATTN_E_UNSUPPORTED = 200,     /* the message says what can be done instead */
  SAGEATTN_E_NO_DEVICE = 201,       /* no driver, no device, or no such ordinal */
  SAGEATTN_E_DRIVER_TOO_OLD = 202,  /* the message names the version needed */
  SAGEATTN_E_NVRTC_NOT_FOUND = 203, /* the message lists what was tried */
  SAGEATTN_E_NVRTC_TOO_OLD = 204,   /* the message names the version needed */
  SAGEATTN_E_KERNEL_MISSING = 205,  /* NO_JIT, and no blob or cache entry holds the kernel */
  SAGEATTN_E_BAD_BLOB = 206,        /* not a blob, damaged, or of another build */

  /* 300..399: resources. */
  SAGEATTN_E_OUT_OF_MEMORY = 300,

  /* 400..499: something failed while running. */
  SAGEATTN_E_CUDA = 400,     /* the driver returned an error; the message quotes it */
  SAGEATTN_E_COMPILE = 401,  /* NVRTC refused a kernel; its log is in the message */
  SAGEATTN_E_SELFTEST = 402, /* the self-test found a wrong result; do not use it */

  /* 500..599: a defect of this library. Please report it. */
  SAGEATTN_E_INTERNAL = 500
};

/* Flags of a context. */
enum {
  SAGEATTN_CONTEXT_NO_JIT = 1,         /* never compile: kernels come from blobs or cache only */
  SAGEATTN_CONTEXT_NO_DISK_CACHE = 2,  /* neither read nor write the kernel cache on disk */
  SAGEATTN_CONTEXT_CACHE_READ_ONLY = 4 /* read the kernel cache on disk, never write it */
};

/* Who computes. */
enum {
  SAGEATTN_BACKEND_AUTO = 0, /* CUDA if a driver, a device and a supported arch exist, else CPU */
  SAGEATTN_BACKEND_CUDA = 1,
  SAGEATTN_BACKEND_CPU = 2 /* the specification: the same numerics, on host memory */
};

/* Level of a log message. */
enum { SAGEATTN_LOG_INFO = 1, SAGEATTN_LOG_WARNING = 2 };

/* Named sets of numerics, for sageattn_attn_desc_init. */
enum {
  SAGEATTN_PRESET_AUTO = 0,     /* every field AUTO: what suits the arch and head_dim */
  SAGEATTN_PRESET_SAGE1 = 1,    /* INT8 QK per block, K smoothed, FP16 PV */
  SAGEATTN_PRESET_SAGE2_8B = 2, /* INT8 QK per thread, K smoothed, E4M3 PV accumulated two-level */
  SAGEATTN_PRESET_SAGE2_4B = 3, /* INT4 QK per thread, Q and K smoothed, E4M3 PV two-level */
  SAGEATTN_PRESET_SAGE2PP = 4,  /* as SAGE2_8B with fp16 accumulators inside 64-key groups */
  SAGEATTN_PRESET_EXACT = 5     /* no quantization */
};

/* Element type of a tensor. */
enum { SAGEATTN_F16 = 1, SAGEATTN_BF16 = 2, SAGEATTN_F32 = 3 };

/* What a tensor whose strides are all zero means. Token-major is the default. */
enum {
  SAGEATTN_LAYOUT_NHD = 0, /* [batch, token, head, channel]; varlen [token, head, channel] */
  SAGEATTN_LAYOUT_HND = 1  /* [batch, head, token, channel]; varlen [head, token, channel] */
};

enum {
  SAGEATTN_BATCH_DENSE = 0, /* every sequence has qo_len queries and kv_len keys */
  SAGEATTN_BATCH_VARLEN = 1 /* sequences are packed along the token axis, cut by cu_seqlens */
};

/* Which keys j the query i of a sequence sees. A query that sees none gives out = 0, lse = -inf. */
enum {
  SAGEATTN_MASK_NONE = 0,
  SAGEATTN_MASK_CAUSAL_BOTTOM_RIGHT = 1, /* j <= i + kv_len - qo_len */
  SAGEATTN_MASK_CAUSAL_TOP_LEFT = 2,     /* j <= i */
  SAGEATTN_MASK_WINDOW = 3               /* -left <= j - (i + kv_len - qo_len) <= right */
};

/* Format of Q and K in the product Q K^T. */
enum {
  SAGEATTN_QK_AUTO = 0, /* I8; NONE if pv_format is NONE */
  SAGEATTN_QK_I8 = 1,
  SAGEATTN_QK_I4 = 2,
  SAGEATTN_QK_NONE = 3, /* inputs as they are; goes with SAGEATTN_PV_NONE */
  SAGEATTN_QK_E4M3 = 4  /* for comparison only (CPU backend) */
};

/* Which elements of Q, and of K, share one quantization scale. */
enum {
  SAGEATTN_GRANULARITY_AUTO = 0,       /* PER_THREAD */
  SAGEATTN_GRANULARITY_PER_THREAD = 1, /* the rows whose products one GPU thread holds */
  SAGEATTN_GRANULARITY_PER_WARP = 2,   /* Q: rows of a warp; K: a tile of b_k keys */
  SAGEATTN_GRANULARITY_PER_BLOCK = 3,  /* Q: a tile of b_q queries; K: a tile of b_k keys */
  SAGEATTN_GRANULARITY_PER_TOKEN = 4,  /* one row (CPU backend) */
  SAGEATTN_GRANULARITY_PER_TENSOR = 5  /* one head of one sequence (CPU backend) */
};

/* Values of smooth_q and smooth_k: subtract the mean of a tile of queries, of all keys. */
enum {
  SAGEATTN_SMOOTH_AUTO = 0, /* K: on. Q: on with I4, off otherwise. Both off with NONE */
  SAGEATTN_SMOOTH_ON = 1,
  SAGEATTN_SMOOTH_OFF = 2
};

/* Values of smooth_v: subtract from V its mean over keys, and add it back to the output. */
enum {
  SAGEATTN_SMOOTH_V_AUTO = 0, /* FP8: GROUP with TWO_LEVEL, SEQUENCE with F16; else OFF */
  SAGEATTN_SMOOTH_V_OFF = 1,
  SAGEATTN_SMOOTH_V_SEQUENCE = 2, /* mean over the sequence */
  SAGEATTN_SMOOTH_V_GROUP = 3     /* mean over each promotion group of keys */
};

/* Values of v_scale: which elements of V share a scale (always one channel). */
enum {
  SAGEATTN_V_SCALE_AUTO = 0,    /* GROUP if smooth_v is GROUP, else CHANNEL */
  SAGEATTN_V_SCALE_CHANNEL = 1, /* one channel of the sequence */
  SAGEATTN_V_SCALE_GROUP = 2    /* one channel of each promotion group */
};

/* Change of basis of Q and K before quantization, leaving Q K^T as it is. */
enum {
  SAGEATTN_ROTATION_NONE = 0,
  SAGEATTN_ROTATION_HADAMARD = 1,  /* random-sign Hadamard rotation of the channels */
  SAGEATTN_ROTATION_SMOOTHATTN = 2 /* per-channel factors sqrt(max|Q| / max|K|) (CPU backend) */
};

/* Format of P and V in the product P V. */
enum {
  SAGEATTN_PV_AUTO = 0, /* E4M3 on sm_89 and sm_90 up to head_dim 128, else F16 */
  SAGEATTN_PV_E4M3 = 1,
  SAGEATTN_PV_F16 = 2,
  SAGEATTN_PV_NONE = 3, /* inputs as they are; goes with SAGEATTN_QK_NONE */
  SAGEATTN_PV_E5M2 = 4, /* for comparison only (CPU backend) */
  SAGEATTN_PV_I8 = 5    /* for comparison only (CPU backend) */
};

/* What the row sum that normalises the output adds up. */
enum {
  SAGEATTN_ROW_SUM_AUTO = 0,     /* ROUNDED_P */
  SAGEATTN_ROW_SUM_P = 1,        /* probabilities before they are rounded to pv_format; CPU */
  SAGEATTN_ROW_SUM_ROUNDED_P = 2 /* the rounded probabilities that multiply V */
};

/* How the products P V are accumulated. */
enum {
  SAGEATTN_PV_ACCUM_AUTO = 0,        /* TWO_LEVEL with 8-bit formats, F32 with F16 */
  SAGEATTN_PV_ACCUM_TWO_LEVEL = 1,   /* tensor core, promoted to fp32 every promotion interval */
  SAGEATTN_PV_ACCUM_F16 = 2,         /* fp16 accumulators, promoted every promotion interval */
  SAGEATTN_PV_ACCUM_F32 = 3,         /* plain fp32 sums (with FP8 formats: CPU backend) */
  SAGEATTN_PV_ACCUM_SINGLE_LEVEL = 4 /* tensor core, never promoted: what others do (CPU) */
};

/* Which kernel family computes, or is emulated by the CPU backend. */
enum {
  SAGEATTN_KERNEL_AUTO = 0,     /* WGMMA where the arch and the numerics have it, else MMA_SYNC */
  SAGEATTN_KERNEL_MMA_SYNC = 1, /* every arch from sm_80 */
  SAGEATTN_KERNEL_WGMMA = 2     /* sm_90: INT8 or INT4 codes, E4M3 PV, head_dim up to 128 */
};

/* Model of FP8 accumulation in the CPU backend (docs/numerics.md). */
enum {
  SAGEATTN_PV_MODEL_AUTO = 0,   /* QMMA13; HMMA for MMA_SYNC on sm_90 */
  SAGEATTN_PV_MODEL_QMMA13 = 1, /* FP8 tensor core: 13 fraction bits, truncating */
  SAGEATTN_PV_MODEL_HMMA = 2    /* unpacked to fp16 and summed in fp32 */
};

/* Where a plan's kernels came from. */
enum {
  SAGEATTN_ORIGIN_BUILTIN = 0, /* part of the library: the CPU backend */
  SAGEATTN_ORIGIN_MEMORY = 1,
  SAGEATTN_ORIGIN_BLOB = 2,
  SAGEATTN_ORIGIN_DISK = 3,
  SAGEATTN_ORIGIN_COMPILED = 4
};

/* Words of execute_args.status, one a sequence. */
enum {
  SAGEATTN_SEQUENCE_OK = 0,
  SAGEATTN_SEQUENCE_BAD_LENGTHS = 1 /* its lengths were nonsense; its rows hold NaN */
};

/* ------------------------------------------------------------------------------------------- *
 * Structs.
 * ------------------------------------------------------------------------------------------- */

/* Filled by a call that fails; status = SAGEATTN_OK and an empty message by one that succeeds.
 * Owned by the caller, one a thread or one a call. With struct_size 0 it is ignored. */
typedef struct sageattn_error {
  uint32_t struct_size;
  int32_t status;
  char message[1016]; /* UTF-8, NUL-terminated, cut at the end if it must be */
} sageattn_error;

/* How a context is made. All zero is a good default. Strings and hooks: see each field. */
typedef struct sageattn_context_desc {
  uint32_t struct_size;
  uint32_t flags;        /* SAGEATTN_CONTEXT_* or-ed */
  int32_t backend;       /* SAGEATTN_BACKEND_* */
  int32_t device;        /* CUDA device ordinal, from 0; must be 0 with BACKEND_CPU, unused if AUTO
                          takes the CPU */
  int32_t target_arch;   /* 0: the device's. Else 80, 86, 89, 90 or 120: the arch to compile for or,
                          with the CPU backend, whose tiles and accumulation to emulate (0: 90) */
  int32_t num_threads;   /* of the CPU backend, the calling thread included, 1..1024; 0: one for
                          each processor this process may use; must be 0 with BACKEND_CUDA, unused
                          if AUTO takes a GPU */
  const char *cache_dir; /* kernel cache folder, UTF-8; NULL: $SAGEATTN_CACHE_DIR, else
                             $XDG_CACHE_HOME/sageattn, else $HOME/.cache/sageattn. Copied */
  const char *nvrtc_path; /* NVRTC to load, file or folder; NULL: search. Copied */
  /* Host allocator for the context's and plans' own objects. Both hooks or neither. alloc returns
   * `size` bytes aligned to `alignment` (a power of two) or NULL. Called from any thread, also
   * when a plan made from this context is destroyed later. */
  void *(*alloc)(void *user, size_t size, size_t alignment);
  void (*free)(void *user, void *memory);
  void *allocator_user; /* passed to both hooks */
  /* Called with one line of UTF-8 text, from any thread, also from several at once, during a call
   * on this context or on its plans: even one call compiles kernels side by side. NULL: nothing is
   * logged; the library never prints. Must not call back. */
  void (*log)(void *user, int32_t level, const char *message);
  void *log_user; /* passed to log */
} sageattn_context_desc;

/* What a plan computes. Fill with sageattn_attn_desc_init or with zeros. "Required" fields have
 * no default: zero there is an error. */
typedef struct sageattn_attn_desc {
  uint32_t struct_size;

  /* Types and layout. */
  int32_t q_dtype;    /* required: SAGEATTN_F16, BF16 or F32 */
  int32_t kv_dtype;   /* of k and v; 0: q_dtype */
  int32_t out_dtype;  /* 0: q_dtype */
  int32_t layout;     /* SAGEATTN_LAYOUT_*, for tensors whose strides are all zero */
  int32_t batch_mode; /* SAGEATTN_BATCH_* */

  /* Mask. */
  int32_t mask;         /* SAGEATTN_MASK_* */
  int32_t window_left;  /* MASK_WINDOW: keys before the diagonal, >= 0, or -1 for all; else 0 */
  int32_t window_right; /* MASK_WINDOW: keys after the diagonal, >= 0, or -1 for all; else 0 */

  /* Heads. */
  int32_t head_dim;     /* required: channels of q and k, 1..256 */
  int32_t head_dim_v;   /* channels of v and out, 1..256; 0: head_dim */
  int32_t num_qo_heads; /* required: 1..65536 */
  int32_t num_kv_heads; /* divides num_qo_heads; 0: num_qo_heads */

  /* Softmax scale. */
  int32_t sm_scale_set; /* 0: 1 / sqrt(head_dim), and sm_scale must be 0. 1: sm_scale as given */
  float sm_scale;       /* up to 2e38, any sign, 0 included (then out is the mean of V) */

  /* Limits: every execute stays within them; the workspace is sized for them. */
  int32_t max_batch;    /* sequences an execute, 1..2^24; 0: 1 */
  int32_t max_qo_len;   /* required: queries a sequence, 1..2^30 */
  int32_t max_kv_len;   /* required: keys a sequence, 1..2^30 */
  int64_t max_total_qo; /* BATCH_VARLEN: packed queries, gaps included, 1..2^54; 0: max_batch *
                            max_qo_len. DENSE: 0 */
  int64_t max_total_kv; /* BATCH_VARLEN: packed keys, likewise; 0: max_batch * max_kv_len.
                            DENSE: 0 */

  /* Numerics. Each AUTO is resolved when the plan is made; sageattn_plan_info shows how. */
  int32_t qk_format;          /* SAGEATTN_QK_* */
  int32_t qk_granularity;     /* SAGEATTN_GRANULARITY_* */
  int32_t smooth_q;           /* SAGEATTN_SMOOTH_* */
  int32_t smooth_k;           /* SAGEATTN_SMOOTH_* */
  int32_t smooth_v;           /* SAGEATTN_SMOOTH_V_* */
  int32_t v_scale;            /* SAGEATTN_V_SCALE_* */
  int32_t rotation;           /* SAGEATTN_ROTATION_* */
  int32_t pv_format;          /* SAGEATTN_PV_* */
  int32_t row_sum;            /* SAGEATTN_ROW_SUM_* */
  int32_t pv_accum;           /* SAGEATTN_PV_ACCUM_* */
  int32_t promotion_interval; /* keys between promotions of the PV accumulator, and keys a V
                                 group; a multiple of 32 that divides b_k or is a multiple of it.
                                 0: AUTO: 64 with pv_accum F16; with smooth_v or v_scale GROUP 1024
                                 (WGMMA) or b_k (MMA_SYNC); else b_k with TWO_LEVEL, else never.
                                 At most 64 with F16. Must be 0 with SINGLE_LEVEL (which has no
                                 GROUP), and with F32 unless there is a GROUP */
  int32_t kernel;             /* SAGEATTN_KERNEL_* */
  int32_t pv_model; /* SAGEATTN_PV_MODEL_*; other than AUTO: CPU backend only, and with FP8
                             summed TWO_LEVEL or SINGLE_LEVEL */

  /* Reserved: not yet possible, so anything but 0 is SAGEATTN_E_UNSUPPORTED. */
  int32_t bias;       /* additive bias or mask tensor */
  int32_t num_sinks;  /* attention sinks */
  int32_t kv_storage; /* quantized or paged KV storage */
  float softcap;      /* tanh capping of scores */
  int32_t reserved;
} sageattn_attn_desc;

/* What a plan is. Written by sageattn_plan_get_info and sageattn_plan_query. Fields that repeat
 * a desc field hold the resolved value, never AUTO; 0 where a field does not apply: granularity,
 * v_scale, row_sum, pv_accum and kernel of a plan that does not quantize (QK_NONE), pv_model where
 * the desc may not set it. */
typedef struct sageattn_plan_info {
  uint32_t struct_size;
  int32_t backend; /* SAGEATTN_BACKEND_CUDA or _CPU */
  int32_t arch;    /* 80, 86, 89, 90, 120: what runs or is emulated */
  int32_t origin;  /* SAGEATTN_ORIGIN_* */

  /* Workspace an execute needs, in bytes: with less than min_workspace it is refused; from
   * preferred_workspace on it is fastest. workspace_alignment: of the pointer, in bytes. */
  int64_t min_workspace;
  int64_t preferred_workspace;
  int32_t workspace_alignment;

  /* Resources of the attention kernel; 0 with the CPU backend. */
  int32_t registers;   /* a thread */
  int32_t spill_bytes; /* a thread */
  int32_t smem_bytes;  /* a block */
  int32_t threads;     /* a block */
  int32_t launches;    /* kernel launches an execute; INT32_MAX: so many or more */
  float compile_ms;    /* time in NVRTC, added up over the plan's kernels, which compile side by
                          side; 0 if nothing was compiled */

  /* Tiles. */
  int32_t b_q;                /* queries a tile: quantization and Q smoothing */
  int32_t b_k;                /* keys a tile */
  int32_t promotion_interval; /* keys; 0 if the accumulator is never promoted */

  /* Resolved numerics. */
  int32_t q_dtype, kv_dtype, out_dtype;
  int32_t head_dim_v, num_kv_heads;
  float sm_scale;
  int32_t qk_format, qk_granularity;
  int32_t smooth_q, smooth_k, smooth_v, v_scale;
  int32_t rotation;
  int32_t pv_format, row_sum, pv_accum;
  int32_t kernel, pv_model;
  char kernel_name[64]; /* NUL-terminated, e.g. "cpu_wgmma_i8_e4m3", "cpu_exact" */

  int32_t num_kernels; /* that sageattn_plan_get_kernel tells of; 0 with the CPU backend */
  int32_t reserved;
} sageattn_plan_info;

/* One kernel of a plan, compiled. Written by sageattn_plan_get_kernel. */
typedef struct sageattn_kernel_info {
  uint32_t struct_size;
  int32_t arch;        /* what it is compiled for: 80, 86, 89, 90, 120 */
  int32_t origin;      /* SAGEATTN_ORIGIN_* */
  int32_t registers;   /* a thread */
  int32_t spill_bytes; /* a thread, stores and loads */
  int32_t smem_bytes;  /* a block, static and dynamic, as it is launched */
  int32_t threads;     /* a block */
  float compile_ms;    /* time in NVRTC; 0 if it was not compiled for this plan */
  char name[64];       /* NUL-terminated, e.g. "prepare" */
  char macros[128];    /* NUL-terminated: how it is specialised, e.g. "D_QK=64", or "" */
} sageattn_kernel_info;

/* A tensor to read. Frozen: never grows.
 * Strides are in elements, of any sign. All four zero: contiguous, in the plan's layout and with
 * the lengths of the call. Otherwise each counts as given, except that the stride of a dimension
 * of size 1 is ignored. A stride of 0 for batch, token or head is legal (an expanded tensor);
 * stride_dim 0 with more than one channel is an error: give 1 for adjacent channels. In
 * BATCH_VARLEN stride_batch must be 0. */
typedef struct sageattn_const_tensor {
  const void *data; /* aligned to its element; may be NULL if the tensor has no elements */
  int64_t stride_batch;
  int64_t stride_token;
  int64_t stride_head;
  int64_t stride_dim;
} sageattn_const_tensor;

/* A tensor to write. Frozen. Strides as above, but no two elements may share an address: a zero
 * stride of a dimension larger than 1 is SAGEATTN_E_ALIASED, see there. */
typedef struct sageattn_tensor {
  void *data;
  int64_t stride_batch;
  int64_t stride_token;
  int64_t stride_head;
  int64_t stride_dim;
} sageattn_tensor;

/* Where to write the log-sum-exp. Frozen. float32; data NULL: not wanted (then the strides must
 * be 0). All strides zero: [batch, num_qo_heads, qo_len], varlen [num_qo_heads, total_qo]. */
typedef struct sageattn_lse_tensor {
  float *data;
  int64_t stride_batch;
  int64_t stride_head;
  int64_t stride_token;
} sageattn_lse_tensor;

/* Lengths and pointers of one execute. Memory: host for the CPU backend, device for CUDA (data
 * and the int32 arrays alike, so that a captured graph can change lengths). Each pointer that is to
 * be followed must lead where the backend can go, else SAGEATTN_E_INVALID_ARGUMENT, as far as the
 * driver can tell from the pointer, whatever lies behind it. CUDA takes the memory of the context's
 * device, memory of another that peer access opens to it, managed and pinned memory, and any host
 * memory on devices that access all of it. The CPU backend takes what the host can read; it asks a
 * driver that is in the process, and loads none. */
typedef struct sageattn_execute_args {
  uint32_t struct_size;
  int32_t batch;           /* sequences, 0..max_batch */
  int32_t qo_len;          /* DENSE: 0..max_qo_len. VARLEN: 0 */
  int32_t kv_len;          /* DENSE: 0..max_kv_len. VARLEN: 0 */
  int64_t total_qo;        /* VARLEN: tokens in q and out, 0..max_total_qo. DENSE: 0 */
  int64_t total_kv;        /* VARLEN: tokens in k and v, 0..max_total_kv. DENSE: 0 */
  sageattn_const_tensor q; /* [batch, qo_len, num_qo_heads, head_dim] in the plan's layout */
  sageattn_const_tensor k; /* [batch, kv_len, num_kv_heads, head_dim] */
  sageattn_const_tensor v; /* [batch, kv_len, num_kv_heads, head_dim_v] */
  sageattn_tensor out;     /* [batch, qo_len, num_qo_heads, head_dim_v] */
  sageattn_lse_tensor lse; /* optional: natural log of the sum over visible keys of
                              exp(sm_scale q.k), with the k given (smoothing is added back) */
  /* VARLEN: required, batch + 1 entries each: sequence b has tokens cu[b] .. cu[b + 1] - 1. A
   * sequence is nonsense if its start is negative or below an earlier entry, its end is below
   * its start or above the total, its length is above the plan's limit, or its seqused_kv is
   * outside 0..its kv_len. The rows of out and lse that are its own (from its
   * start, or from the highest earlier entry if that is above, to its end, cut to the buffer and to
   * max_qo_len) become NaN and its status word is set; nothing else is touched.
   * DENSE: NULL. */
  const int32_t *cu_seqlens_q;
  const int32_t *cu_seqlens_kv;
  const int32_t *seqused_kv; /* optional, batch entries: keys of each sequence that exist; the rest
                                is never read. It stands for kv_len in the mask's alignment */
  int32_t *status;           /* optional, batch entries: SAGEATTN_SEQUENCE_* of each */
} sageattn_execute_args;

/* Two tensors to compare, in host memory, shape [batch, len, num_heads, head_dim]. */
typedef struct sageattn_compare_args {
  uint32_t struct_size;
  int32_t out_dtype;                       /* required: SAGEATTN_F16, BF16 or F32 */
  int32_t ref_dtype;                       /* required */
  int32_t layout;                          /* SAGEATTN_LAYOUT_*, for all-zero strides */
  int32_t batch, len, num_heads, head_dim; /* >= 0 each; batch * num_heads below 2^31 */
  sageattn_const_tensor out;               /* what is judged */
  sageattn_const_tensor ref;               /* what it should be */
} sageattn_compare_args;

/* Metrics over all elements, and the worst over the heads (batch items times heads). Non-finite
 * elements on either side are counted and left out of the sums; so look at the counts first. */
typedef struct sageattn_compare_result {
  uint32_t struct_size;
  int32_t worst_head;    /* batch index * num_heads + head of worst_cos_sim; -1 if there is none */
  int64_t count;         /* elements compared */
  int64_t nonfinite_out; /* NaN or Inf in out */
  int64_t nonfinite_ref; /* NaN or Inf in ref */
  double cos_sim;        /* sum(o r) / sqrt(sum o^2 sum r^2); 1 if both are all zero */
  double rel_l1;         /* sum|o - r| / sum|r| */
  double rmse;           /* sqrt(mean (o - r)^2) */
  double rel_error;      /* |o - r|_F / |r|_F */
  double max_abs_error;
  double worst_cos_sim, worst_rel_l1, worst_rmse, worst_rel_error; /* over the heads */
} sageattn_compare_result;

/* ------------------------------------------------------------------------------------------- *
 * Functions.
 * ------------------------------------------------------------------------------------------- */

/* The library's version as SAGEATTN_VERSION_NUMBER computes it, and as "0.1.0". Never fail. */
SAGEATTN_API uint32_t sageattn_version(void);
SAGEATTN_API const char *sageattn_version_string(void);

/* Hex digest of the sources this binary was built from: what ties a kernel cache entry or a bug
 * report to a build. Static storage. Never fails. */
SAGEATTN_API const char *sageattn_source_id(void);

/* The constant's name, e.g. "SAGEATTN_E_LIMIT", or "unknown status". Static storage. */
SAGEATTN_API const char *sageattn_status_name(int32_t status);

/* Makes a context.
 *   desc  may be NULL: all defaults.
 *   ctx   receives the handle; NULL on failure. Free with sageattn_context_destroy.
 * Errors: INVALID_ARGUMENT, UNKNOWN_FIELD, UNSUPPORTED (this build lacks the backend), NO_DEVICE,
 * DRIVER_TOO_OLD (both BACKEND_CUDA only: AUTO falls to the CPU here, and the report says why),
 * OUT_OF_MEMORY. */
SAGEATTN_API int32_t sageattn_context_create(const sageattn_context_desc *desc,
                                             sageattn_context **ctx, sageattn_error *err);

/* Frees a context; plans made from it stay usable. NULL is a no-op. Never fails and never waits
 * for a GPU. */
SAGEATTN_API void sageattn_context_destroy(sageattn_context *ctx);

/* Writes what was found and chosen, and why, as UTF-8 lines "key: value".
 *   text      receives up to capacity bytes, NUL included; may be NULL if capacity is 0.
 *   needed    receives the size of the whole text, NUL included. May be NULL.
 * Errors: BUFFER_TOO_SMALL (nothing is written to text but *needed is), INVALID_ARGUMENT. */
SAGEATTN_API int32_t sageattn_context_report(sageattn_context *ctx, char *text, size_t capacity,
                                             size_t *needed, sageattn_error *err);

/* Adds the kernels of a blob that sageattn_plan_export_blob wrote. The bytes are copied. A blob is
 * code: import only what you trust.
 * Errors: BAD_BLOB, UNSUPPORTED (CPU backend: it has no kernels to import), INVALID_ARGUMENT. */
SAGEATTN_API int32_t sageattn_context_import_blob(sageattn_context *ctx, const void *data,
                                                  size_t size, sageattn_error *err);

/* Writes every kernel that this context has compiled or loaded for a plan, each once, to be imported
 * elsewhere (NO_JIT): make all plans of a program, then export them together. Buffer rules as in
 * sageattn_context_report; another thread that makes plans may change the size between two calls.
 * Errors: BUFFER_TOO_SMALL, UNSUPPORTED (CPU backend: no kernels to export), INVALID_ARGUMENT. */
SAGEATTN_API int32_t sageattn_context_export_blob(sageattn_context *ctx, void *data,
                                                  size_t capacity, size_t *needed,
                                                  sageattn_error *err);

/* Fills at most `size` bytes of desc: zeros, struct_size = size, then the preset's numerics. Types,
 * heads and limits remain for the caller.
 *   size    sizeof(sageattn_attn_desc) of the caller; at least 4.
 *   preset  SAGEATTN_PRESET_*
 * Errors: INVALID_ARGUMENT (NULL, size, unknown preset; a preset that does not fit in size). */
SAGEATTN_API int32_t sageattn_attn_desc_init(sageattn_attn_desc *desc, uint32_t size,
                                             int32_t preset, sageattn_error *err);

/* Makes a plan: checks the desc, chooses the kernel, compiles or loads it, sizes the workspace.
 *   plan  receives the handle; NULL on failure. Free with sageattn_plan_destroy.
 * Errors: INVALID_ARGUMENT, UNKNOWN_FIELD, UNSUPPORTED (the message says what the backend can
 * run), the NVRTC, driver, COMPILE and KERNEL_MISSING errors, OUT_OF_MEMORY. */
SAGEATTN_API int32_t sageattn_plan_create(sageattn_context *ctx, const sageattn_attn_desc *desc,
                                          sageattn_plan **plan, sageattn_error *err);

/* Frees a plan. NULL is a no-op. Never fails and never waits for a GPU; work already enqueued
 * runs on undisturbed. */
SAGEATTN_API void sageattn_plan_destroy(sageattn_plan *plan);

/* Writes what the plan is into info (struct_size set by the caller). Errors: INVALID_ARGUMENT. */
SAGEATTN_API int32_t sageattn_plan_get_info(const sageattn_plan *plan, sageattn_plan_info *info,
                                            sageattn_error *err);

/* Writes what a kernel of the plan is into info (struct_size set by the caller).
 *   index  0..num_kernels - 1, in the order in which an execute launches them; attention is last.
 * Errors: INVALID_ARGUMENT. */
SAGEATTN_API int32_t sageattn_plan_get_kernel(const sageattn_plan *plan, int32_t index,
                                              sageattn_kernel_info *info, sageattn_error *err);

/* Says whether sageattn_plan_create would accept the desc, and what the plan would be, without
 * compiling or creating anything. info may be NULL. Errors: as sageattn_plan_create. */
SAGEATTN_API int32_t sageattn_plan_query(sageattn_context *ctx, const sageattn_attn_desc *desc,
                                         sageattn_plan_info *info, sageattn_error *err);

/* As sageattn_context_export_blob, but the kernels of this plan only.
 * Errors: BUFFER_TOO_SMALL, UNSUPPORTED (CPU backend: no kernels to export), INVALID_ARGUMENT. */
SAGEATTN_API int32_t sageattn_plan_export_blob(const sageattn_plan *plan, void *data,
                                               size_t capacity, size_t *needed,
                                               sageattn_error *err);

/* Computes attention. Never allocates, compiles or, with CUDA, synchronises: it can be captured
 * in a CUDA graph (whose edges may be programmatic). With the CPU backend it returns when the result is there.
 *   workspace       min_workspace bytes or more, aligned to workspace_alignment; its contents
 *                   before and after mean nothing. One for each execute in flight.
 *   stream          CUDA: where to enqueue: a stream of the device's primary context, which the
 *                   CUDA runtime's are, NULL for the default stream. CPU: must be NULL.
 * Every element of out (and lse, if given) of every sequence is written, and nothing else.
 * Errors: INVALID_ARGUMENT, UNKNOWN_FIELD, MISALIGNED, ALIASED, LIMIT, WORKSPACE, CUDA. */
SAGEATTN_API int32_t sageattn_execute(const sageattn_plan *plan, const sageattn_execute_args *args,
                                      void *workspace, size_t workspace_size,
                                      struct CUstream_st *stream, sageattn_error *err);

/* Compares two tensors in host memory, told from a device's as by the CPU backend (docs/numerics.md
 * has the formulas). Needs no context.
 *   result  struct_size set by the caller.
 * Errors: INVALID_ARGUMENT, UNKNOWN_FIELD, MISALIGNED. */
SAGEATTN_API int32_t sageattn_compare(const sageattn_compare_args *args,
                                      sageattn_compare_result *result, sageattn_error *err);

/* Runs small attentions of every preset on the context's backend and compares them with an exact
 * computation, on a device on a stream of its own. Takes a few seconds at most, compiling apart, and
 * allocates what it needs. The log (INFO) says of each case that it passed, and with which error, or
 * why the backend cannot run it, which is not a failure.
 * Errors: SELFTEST (the message names the case that failed), and what plan and execute return. */
SAGEATTN_API int32_t sageattn_selftest(sageattn_context *ctx, sageattn_error *err);

#ifdef __cplusplus
}
#endif

#endif /* SAGEATTN_H */
