//! What `sageattn.h` declares, in its order and by its names. The header is the manual.

use std::os::raw::{c_char, c_void};

opaque! { sageattn_context, sageattn_plan, CUstream_st }

constants! {
    SAGEATTN_VERSION_MAJOR = 0;
    SAGEATTN_VERSION_MINOR = 1;
    SAGEATTN_VERSION_PATCH = 0;
    SAGEATTN_VERSION_NUMBER = SAGEATTN_VERSION_MAJOR * 10000 + SAGEATTN_VERSION_MINOR * 100 +
        SAGEATTN_VERSION_PATCH;

    SAGEATTN_OK = 0;
    SAGEATTN_E_INVALID_ARGUMENT = 100;
    SAGEATTN_E_UNKNOWN_FIELD = 101;
    SAGEATTN_E_MISALIGNED = 102;
    SAGEATTN_E_ALIASED = 103;
    SAGEATTN_E_LIMIT = 104;
    SAGEATTN_E_WORKSPACE = 105;
    SAGEATTN_E_BUFFER_TOO_SMALL = 106;
    SAGEATTN_E_UNSUPPORTED = 200;
    SAGEATTN_E_NO_DEVICE = 201;
    SAGEATTN_E_DRIVER_TOO_OLD = 202;
    SAGEATTN_E_NVRTC_NOT_FOUND = 203;
    SAGEATTN_E_NVRTC_TOO_OLD = 204;
    SAGEATTN_E_KERNEL_MISSING = 205;
    SAGEATTN_E_BAD_BLOB = 206;
    SAGEATTN_E_OUT_OF_MEMORY = 300;
    SAGEATTN_E_CUDA = 400;
    SAGEATTN_E_COMPILE = 401;
    SAGEATTN_E_SELFTEST = 402;
    SAGEATTN_E_INTERNAL = 500;

    SAGEATTN_CONTEXT_NO_JIT = 1;
    SAGEATTN_CONTEXT_NO_DISK_CACHE = 2;
    SAGEATTN_CONTEXT_CACHE_READ_ONLY = 4;

    SAGEATTN_BACKEND_AUTO = 0;
    SAGEATTN_BACKEND_CUDA = 1;
    SAGEATTN_BACKEND_CPU = 2;

    SAGEATTN_LOG_INFO = 1;
    SAGEATTN_LOG_WARNING = 2;

    SAGEATTN_PRESET_AUTO = 0;
    SAGEATTN_PRESET_SAGE1 = 1;
    SAGEATTN_PRESET_SAGE2_8B = 2;
    SAGEATTN_PRESET_SAGE2_4B = 3;
    SAGEATTN_PRESET_SAGE2PP = 4;
    SAGEATTN_PRESET_EXACT = 5;

    SAGEATTN_F16 = 1;
    SAGEATTN_BF16 = 2;
    SAGEATTN_F32 = 3;

    SAGEATTN_LAYOUT_NHD = 0;
    SAGEATTN_LAYOUT_HND = 1;

    SAGEATTN_BATCH_DENSE = 0;
    SAGEATTN_BATCH_VARLEN = 1;

    SAGEATTN_MASK_NONE = 0;
    SAGEATTN_MASK_CAUSAL_BOTTOM_RIGHT = 1;
    SAGEATTN_MASK_CAUSAL_TOP_LEFT = 2;
    SAGEATTN_MASK_WINDOW = 3;

    SAGEATTN_QK_AUTO = 0;
    SAGEATTN_QK_I8 = 1;
    SAGEATTN_QK_I4 = 2;
    SAGEATTN_QK_NONE = 3;
    SAGEATTN_QK_E4M3 = 4;

    SAGEATTN_GRANULARITY_AUTO = 0;
    SAGEATTN_GRANULARITY_PER_THREAD = 1;
    SAGEATTN_GRANULARITY_PER_WARP = 2;
    SAGEATTN_GRANULARITY_PER_BLOCK = 3;
    SAGEATTN_GRANULARITY_PER_TOKEN = 4;
    SAGEATTN_GRANULARITY_PER_TENSOR = 5;

    SAGEATTN_SMOOTH_AUTO = 0;
    SAGEATTN_SMOOTH_ON = 1;
    SAGEATTN_SMOOTH_OFF = 2;

    SAGEATTN_SMOOTH_V_AUTO = 0;
    SAGEATTN_SMOOTH_V_OFF = 1;
    SAGEATTN_SMOOTH_V_SEQUENCE = 2;
    SAGEATTN_SMOOTH_V_GROUP = 3;

    SAGEATTN_V_SCALE_AUTO = 0;
    SAGEATTN_V_SCALE_CHANNEL = 1;
    SAGEATTN_V_SCALE_GROUP = 2;

    SAGEATTN_ROTATION_NONE = 0;
    SAGEATTN_ROTATION_HADAMARD = 1;
    SAGEATTN_ROTATION_SMOOTHATTN = 2;

    SAGEATTN_PV_AUTO = 0;
    SAGEATTN_PV_E4M3 = 1;
    SAGEATTN_PV_F16 = 2;
    SAGEATTN_PV_NONE = 3;
    SAGEATTN_PV_E5M2 = 4;
    SAGEATTN_PV_I8 = 5;

    SAGEATTN_ROW_SUM_AUTO = 0;
    SAGEATTN_ROW_SUM_P = 1;
    SAGEATTN_ROW_SUM_ROUNDED_P = 2;

    SAGEATTN_PV_ACCUM_AUTO = 0;
    SAGEATTN_PV_ACCUM_TWO_LEVEL = 1;
    SAGEATTN_PV_ACCUM_F16 = 2;
    SAGEATTN_PV_ACCUM_F32 = 3;
    SAGEATTN_PV_ACCUM_SINGLE_LEVEL = 4;

    SAGEATTN_KERNEL_AUTO = 0;
    SAGEATTN_KERNEL_MMA_SYNC = 1;
    SAGEATTN_KERNEL_WGMMA = 2;

    SAGEATTN_PV_MODEL_AUTO = 0;
    SAGEATTN_PV_MODEL_QMMA13 = 1;
    SAGEATTN_PV_MODEL_HMMA = 2;

    SAGEATTN_ORIGIN_BUILTIN = 0;
    SAGEATTN_ORIGIN_MEMORY = 1;
    SAGEATTN_ORIGIN_BLOB = 2;
    SAGEATTN_ORIGIN_DISK = 3;
    SAGEATTN_ORIGIN_COMPILED = 4;

    SAGEATTN_SEQUENCE_OK = 0;
    SAGEATTN_SEQUENCE_BAD_LENGTHS = 1;
}

structs! {
    sageattn_error {
        struct_size: u32,
        status: i32,
        message: [c_char; 1016],
    }
    sageattn_context_desc {
        struct_size: u32,
        flags: u32,
        backend: i32,
        device: i32,
        target_arch: i32,
        num_threads: i32,
        cache_dir: *const c_char,
        nvrtc_path: *const c_char,
        alloc: Option<unsafe extern "C" fn(user: *mut c_void, size: usize, alignment: usize) ->
            *mut c_void>,
        free: Option<unsafe extern "C" fn(user: *mut c_void, memory: *mut c_void)>,
        allocator_user: *mut c_void,
        log: Option<unsafe extern "C" fn(user: *mut c_void, level: i32, message: *const c_char)>,
        log_user: *mut c_void,
    }
    sageattn_attn_desc {
        struct_size: u32,
        q_dtype: i32,
        kv_dtype: i32,
        out_dtype: i32,
        layout: i32,
        batch_mode: i32,
        mask: i32,
        window_left: i32,
        window_right: i32,
        head_dim: i32,
        head_dim_v: i32,
        num_qo_heads: i32,
        num_kv_heads: i32,
        sm_scale_set: i32,
        sm_scale: f32,
        max_batch: i32,
        max_qo_len: i32,
        max_kv_len: i32,
        max_total_qo: i64,
        max_total_kv: i64,
        qk_format: i32,
        qk_granularity: i32,
        smooth_q: i32,
        smooth_k: i32,
        smooth_v: i32,
        v_scale: i32,
        rotation: i32,
        pv_format: i32,
        row_sum: i32,
        pv_accum: i32,
        promotion_interval: i32,
        kernel: i32,
        pv_model: i32,
        bias: i32,
        num_sinks: i32,
        kv_storage: i32,
        softcap: f32,
        reserved: i32,
    }
    sageattn_plan_info {
        struct_size: u32,
        backend: i32,
        arch: i32,
        origin: i32,
        min_workspace: i64,
        preferred_workspace: i64,
        workspace_alignment: i32,
        registers: i32,
        spill_bytes: i32,
        smem_bytes: i32,
        threads: i32,
        launches: i32,
        compile_ms: f32,
        b_q: i32,
        b_k: i32,
        promotion_interval: i32,
        q_dtype: i32,
        kv_dtype: i32,
        out_dtype: i32,
        head_dim_v: i32,
        num_kv_heads: i32,
        sm_scale: f32,
        qk_format: i32,
        qk_granularity: i32,
        smooth_q: i32,
        smooth_k: i32,
        smooth_v: i32,
        v_scale: i32,
        rotation: i32,
        pv_format: i32,
        row_sum: i32,
        pv_accum: i32,
        kernel: i32,
        pv_model: i32,
        kernel_name: [c_char; 64],
        num_kernels: i32,
        reserved: i32,
    }
    sageattn_kernel_info {
        struct_size: u32,
        arch: i32,
        origin: i32,
        registers: i32,
        spill_bytes: i32,
        smem_bytes: i32,
        threads: i32,
        compile_ms: f32,
        name: [c_char; 64],
        macros: [c_char; 128],
    }
    sageattn_const_tensor {
        data: *const c_void,
        stride_batch: i64,
        stride_token: i64,
        stride_head: i64,
        stride_dim: i64,
    }
    sageattn_tensor {
        data: *mut c_void,
        stride_batch: i64,
        stride_token: i64,
        stride_head: i64,
        stride_dim: i64,
    }
    sageattn_lse_tensor {
        data: *mut f32,
        stride_batch: i64,
        stride_head: i64,
        stride_token: i64,
    }
    sageattn_execute_args {
        struct_size: u32,
        batch: i32,
        qo_len: i32,
        kv_len: i32,
        total_qo: i64,
        total_kv: i64,
        q: sageattn_const_tensor,
        k: sageattn_const_tensor,
        v: sageattn_const_tensor,
        out: sageattn_tensor,
        lse: sageattn_lse_tensor,
        cu_seqlens_q: *const i32,
        cu_seqlens_kv: *const i32,
        seqused_kv: *const i32,
        status: *mut i32,
    }
    sageattn_compare_args {
        struct_size: u32,
        out_dtype: i32,
        ref_dtype: i32,
        layout: i32,
        batch: i32,
        len: i32,
        num_heads: i32,
        head_dim: i32,
        out: sageattn_const_tensor,
        r#ref: sageattn_const_tensor,
    }
    sageattn_compare_result {
        struct_size: u32,
        worst_head: i32,
        count: i64,
        nonfinite_out: i64,
        nonfinite_ref: i64,
        cos_sim: f64,
        rel_l1: f64,
        rmse: f64,
        rel_error: f64,
        max_abs_error: f64,
        worst_cos_sim: f64,
        worst_rel_l1: f64,
        worst_rmse: f64,
        worst_rel_error: f64,
    }
}

functions! {
    sageattn_version() -> u32;
    sageattn_version_string() -> *const c_char;
    sageattn_source_id() -> *const c_char;
    sageattn_status_name(status: i32) -> *const c_char;
    sageattn_context_create(desc: *const sageattn_context_desc, ctx: *mut *mut sageattn_context,
        err: *mut sageattn_error) -> i32;
    sageattn_context_destroy(ctx: *mut sageattn_context);
    sageattn_context_report(ctx: *mut sageattn_context, text: *mut c_char, capacity: usize,
        needed: *mut usize, err: *mut sageattn_error) -> i32;
    sageattn_context_import_blob(ctx: *mut sageattn_context, data: *const c_void, size: usize,
        err: *mut sageattn_error) -> i32;
    sageattn_context_export_blob(ctx: *mut sageattn_context, data: *mut c_void, capacity: usize,
        needed: *mut usize, err: *mut sageattn_error) -> i32;
    sageattn_attn_desc_init(desc: *mut sageattn_attn_desc, size: u32, preset: i32, err: *mut
        sageattn_error) -> i32;
    sageattn_plan_create(ctx: *mut sageattn_context, desc: *const sageattn_attn_desc, plan: *mut
        *mut sageattn_plan, err: *mut sageattn_error) -> i32;
    sageattn_plan_destroy(plan: *mut sageattn_plan);
    sageattn_plan_get_info(plan: *const sageattn_plan, info: *mut sageattn_plan_info, err: *mut
        sageattn_error) -> i32;
    sageattn_plan_get_kernel(plan: *const sageattn_plan, index: i32, info: *mut
        sageattn_kernel_info, err: *mut sageattn_error) -> i32;
    sageattn_plan_query(ctx: *mut sageattn_context, desc: *const sageattn_attn_desc, info: *mut
        sageattn_plan_info, err: *mut sageattn_error) -> i32;
    sageattn_plan_export_blob(plan: *const sageattn_plan, data: *mut c_void, capacity: usize,
        needed: *mut usize, err: *mut sageattn_error) -> i32;
    sageattn_execute(plan: *const sageattn_plan, args: *const sageattn_execute_args, workspace:
        *mut c_void, workspace_size: usize, stream: *mut CUstream_st, err: *mut sageattn_error)
        -> i32;
    sageattn_compare(args: *const sageattn_compare_args, result: *mut sageattn_compare_result,
        err: *mut sageattn_error) -> i32;
    sageattn_selftest(ctx: *mut sageattn_context, err: *mut sageattn_error) -> i32;
}
