"""What include/sageattn.h declares: constants, structs and functions, in its order.

STRUCTS, CONSTANTS and FUNCTIONS hold everything by its name in C, so that a test can compare them with the
header. No value is repeated elsewhere in this package.
"""

from __future__ import annotations

import ctypes as c
from typing import Any, Dict, Tuple, Type

VERSION = (0, 1, 0)  # SAGEATTN_VERSION_MAJOR, MINOR, PATCH of the header that this file mirrors

# Constants by the start of their name and, in order of their values, the rest of it.
ENUMS: Dict[str, Dict[str, int]] = {
    "SAGEATTN_": {"OK": 0, "F16": 1, "BF16": 2, "F32": 3},
    "SAGEATTN_E_": {
        "INVALID_ARGUMENT": 100, "UNKNOWN_FIELD": 101, "MISALIGNED": 102, "ALIASED": 103, "LIMIT": 104,
        "WORKSPACE": 105, "BUFFER_TOO_SMALL": 106,
        "UNSUPPORTED": 200, "NO_DEVICE": 201, "DRIVER_TOO_OLD": 202, "NVRTC_NOT_FOUND": 203,
        "NVRTC_TOO_OLD": 204, "KERNEL_MISSING": 205, "BAD_BLOB": 206,
        "OUT_OF_MEMORY": 300,
        "CUDA": 400, "COMPILE": 401, "SELFTEST": 402,
        "INTERNAL": 500},
    "SAGEATTN_CONTEXT_": {"NO_JIT": 1, "NO_DISK_CACHE": 2, "CACHE_READ_ONLY": 4},
    "SAGEATTN_BACKEND_": {"AUTO": 0, "CUDA": 1, "CPU": 2},
    "SAGEATTN_LOG_": {"INFO": 1, "WARNING": 2},
    "SAGEATTN_PRESET_": {"AUTO": 0, "SAGE1": 1, "SAGE2_8B": 2, "SAGE2_4B": 3, "SAGE2PP": 4, "EXACT": 5},
    "SAGEATTN_LAYOUT_": {"NHD": 0, "HND": 1},
    "SAGEATTN_BATCH_": {"DENSE": 0, "VARLEN": 1},
    "SAGEATTN_MASK_": {"NONE": 0, "CAUSAL_BOTTOM_RIGHT": 1, "CAUSAL_TOP_LEFT": 2, "WINDOW": 3},
    "SAGEATTN_QK_": {"AUTO": 0, "I8": 1, "I4": 2, "NONE": 3, "E4M3": 4},
    "SAGEATTN_GRANULARITY_": {"AUTO": 0, "PER_THREAD": 1, "PER_WARP": 2, "PER_BLOCK": 3, "PER_TOKEN": 4,
                              "PER_TENSOR": 5},
    "SAGEATTN_SMOOTH_": {"AUTO": 0, "ON": 1, "OFF": 2},
    "SAGEATTN_SMOOTH_V_": {"AUTO": 0, "OFF": 1, "SEQUENCE": 2, "GROUP": 3},
    "SAGEATTN_V_SCALE_": {"AUTO": 0, "CHANNEL": 1, "GROUP": 2},
    "SAGEATTN_ROTATION_": {"NONE": 0, "HADAMARD": 1, "SMOOTHATTN": 2},
    "SAGEATTN_PV_": {"AUTO": 0, "E4M3": 1, "F16": 2, "NONE": 3, "E5M2": 4, "I8": 5},
    "SAGEATTN_ROW_SUM_": {"AUTO": 0, "P": 1, "ROUNDED_P": 2},
    "SAGEATTN_PV_ACCUM_": {"AUTO": 0, "TWO_LEVEL": 1, "F16": 2, "F32": 3, "SINGLE_LEVEL": 4},
    "SAGEATTN_KERNEL_": {"AUTO": 0, "MMA_SYNC": 1, "WGMMA": 2},
    "SAGEATTN_PV_MODEL_": {"AUTO": 0, "QMMA13": 1, "HMMA": 2},
    "SAGEATTN_ORIGIN_": {"BUILTIN": 0, "MEMORY": 1, "BLOB": 2, "DISK": 3, "COMPILED": 4},
    "SAGEATTN_SEQUENCE_": {"OK": 0, "BAD_LENGTHS": 1},
}

CONSTANTS: Dict[str, int] = {prefix + name: value for prefix, names in ENUMS.items()
                             for name, value in names.items()}

# The enumerated fields of the structs, each with its values by the names that this package gives them.
_FIELD_PREFIXES = {
    "backend": "SAGEATTN_BACKEND_", "preset": "SAGEATTN_PRESET_", "layout": "SAGEATTN_LAYOUT_",
    "batch_mode": "SAGEATTN_BATCH_", "mask": "SAGEATTN_MASK_", "origin": "SAGEATTN_ORIGIN_",
    "qk_format": "SAGEATTN_QK_", "qk_granularity": "SAGEATTN_GRANULARITY_",
    "smooth_q": "SAGEATTN_SMOOTH_", "smooth_k": "SAGEATTN_SMOOTH_", "smooth_v": "SAGEATTN_SMOOTH_V_",
    "v_scale": "SAGEATTN_V_SCALE_", "rotation": "SAGEATTN_ROTATION_", "pv_format": "SAGEATTN_PV_",
    "row_sum": "SAGEATTN_ROW_SUM_", "pv_accum": "SAGEATTN_PV_ACCUM_", "kernel": "SAGEATTN_KERNEL_",
    "pv_model": "SAGEATTN_PV_MODEL_",
}
CHOICES: Dict[str, Dict[str, int]] = {
    field: {name.lower(): value for name, value in ENUMS[prefix].items()}
    for field, prefix in _FIELD_PREFIXES.items()}
DTYPES: Dict[str, int] = {"f16": 1, "bf16": 2, "f32": 3}
for _field in ("q_dtype", "kv_dtype", "out_dtype", "ref_dtype"):
    CHOICES[_field] = DTYPES
# The fields of a desc that choose numerics.
NUMERICS = ("qk_format", "qk_granularity", "smooth_q", "smooth_k", "smooth_v", "v_scale", "rotation",
            "pv_format", "row_sum", "pv_accum", "promotion_interval", "kernel", "pv_model")

_TYPES: Dict[str, Any] = {"u32": c.c_uint32, "i32": c.c_int32, "i64": c.c_int64, "f32": c.c_float,
                          "f64": c.c_double, "ptr": c.c_void_p}


def _fields(text: str) -> Any:
    """Members of a struct: "type name name ...; type name[count] ..."."""
    members = []
    for declaration in text.split(";"):
        kind, *names = declaration.split()
        for name in names:
            if kind == "char":
                name, count = name.rstrip("]").split("[")
                members.append((name, c.c_char * int(count)))
            else:
                members.append((name, _TYPES[kind]))
    return members


class Error(c.Structure):
    """sageattn_error."""

    _fields_ = _fields("u32 struct_size; i32 status; char message[1016]")


class ContextDesc(c.Structure):
    """sageattn_context_desc; hooks as addresses."""

    _fields_ = _fields("u32 struct_size flags; i32 backend device target_arch num_threads;"
                       "ptr cache_dir nvrtc_path alloc free allocator_user log log_user")


class AttnDesc(c.Structure):
    """sageattn_attn_desc."""

    _fields_ = _fields(
        "u32 struct_size; i32 q_dtype kv_dtype out_dtype layout batch_mode mask window_left window_right"
        " head_dim head_dim_v num_qo_heads num_kv_heads sm_scale_set; f32 sm_scale;"
        "i32 max_batch max_qo_len max_kv_len; i64 max_total_qo max_total_kv;"
        "i32 qk_format qk_granularity smooth_q smooth_k smooth_v v_scale rotation pv_format row_sum"
        " pv_accum promotion_interval kernel pv_model bias num_sinks kv_storage; f32 softcap; i32 reserved")


class PlanInfo(c.Structure):
    """sageattn_plan_info."""

    _fields_ = _fields(
        "u32 struct_size; i32 backend arch origin; i64 min_workspace preferred_workspace;"
        "i32 workspace_alignment registers spill_bytes smem_bytes threads launches; f32 compile_ms;"
        "i32 b_q b_k promotion_interval q_dtype kv_dtype out_dtype head_dim_v num_kv_heads; f32 sm_scale;"
        "i32 qk_format qk_granularity smooth_q smooth_k smooth_v v_scale rotation pv_format row_sum"
        " pv_accum kernel pv_model; char kernel_name[64]; i32 num_kernels reserved")


class KernelInfo(c.Structure):
    """sageattn_kernel_info."""

    _fields_ = _fields("u32 struct_size; i32 arch origin registers spill_bytes smem_bytes threads;"
                       "f32 compile_ms; char name[64] macros[128]")


class ConstTensor(c.Structure):
    """sageattn_const_tensor."""

    _fields_ = _fields("ptr data; i64 stride_batch stride_token stride_head stride_dim")


class Tensor(c.Structure):
    """sageattn_tensor."""

    _fields_ = _fields("ptr data; i64 stride_batch stride_token stride_head stride_dim")


class LseTensor(c.Structure):
    """sageattn_lse_tensor."""

    _fields_ = _fields("ptr data; i64 stride_batch stride_head stride_token")


class ExecuteArgs(c.Structure):
    """sageattn_execute_args."""

    _fields_ = [*_fields("u32 struct_size; i32 batch qo_len kv_len; i64 total_qo total_kv"),
                ("q", ConstTensor), ("k", ConstTensor), ("v", ConstTensor), ("out", Tensor),
                ("lse", LseTensor), *_fields("ptr cu_seqlens_q cu_seqlens_kv seqused_kv status")]


class CompareArgs(c.Structure):
    """sageattn_compare_args."""

    _fields_ = [*_fields("u32 struct_size; i32 out_dtype ref_dtype layout batch len num_heads head_dim"),
                ("out", ConstTensor), ("ref", ConstTensor)]


class CompareResult(c.Structure):
    """sageattn_compare_result."""

    _fields_ = _fields("u32 struct_size; i32 worst_head; i64 count nonfinite_out nonfinite_ref;"
                       "f64 cos_sim rel_l1 rmse rel_error max_abs_error worst_cos_sim worst_rel_l1"
                       " worst_rmse worst_rel_error")


STRUCTS: Dict[str, Type[c.Structure]] = {
    "sageattn_error": Error,
    "sageattn_context_desc": ContextDesc,
    "sageattn_attn_desc": AttnDesc,
    "sageattn_plan_info": PlanInfo,
    "sageattn_kernel_info": KernelInfo,
    "sageattn_const_tensor": ConstTensor,
    "sageattn_tensor": Tensor,
    "sageattn_lse_tensor": LseTensor,
    "sageattn_execute_args": ExecuteArgs,
    "sageattn_compare_args": CompareArgs,
    "sageattn_compare_result": CompareResult,
}

LogFunction = c.CFUNCTYPE(None, c.c_void_p, c.c_int32, c.c_char_p)

_POINTER, _SIZE, _I32, _TEXT = c.c_void_p, c.c_size_t, c.c_int32, c.c_char_p

# Result and parameters of every function. Pointers to structs and handles are void *.
FUNCTIONS: Dict[str, Tuple[Any, Tuple[Any, ...]]] = {
    "sageattn_version": (c.c_uint32, ()),
    "sageattn_version_string": (_TEXT, ()),
    "sageattn_source_id": (_TEXT, ()),
    "sageattn_status_name": (_TEXT, (_I32,)),
    "sageattn_context_create": (_I32, (_POINTER,) * 3),
    "sageattn_context_destroy": (None, (_POINTER,)),
    "sageattn_context_report": (_I32, (_POINTER, _POINTER, _SIZE, _POINTER, _POINTER)),
    "sageattn_context_import_blob": (_I32, (_POINTER, _POINTER, _SIZE, _POINTER)),
    "sageattn_context_export_blob": (_I32, (_POINTER, _POINTER, _SIZE, _POINTER, _POINTER)),
    "sageattn_attn_desc_init": (_I32, (_POINTER, c.c_uint32, _I32, _POINTER)),
    "sageattn_plan_create": (_I32, (_POINTER,) * 4),
    "sageattn_plan_destroy": (None, (_POINTER,)),
    "sageattn_plan_get_info": (_I32, (_POINTER,) * 3),
    "sageattn_plan_get_kernel": (_I32, (_POINTER, _I32, _POINTER, _POINTER)),
    "sageattn_plan_query": (_I32, (_POINTER,) * 4),
    "sageattn_plan_export_blob": (_I32, (_POINTER, _POINTER, _SIZE, _POINTER, _POINTER)),
    "sageattn_execute": (_I32, (_POINTER, _POINTER, _POINTER, _SIZE, _POINTER, _POINTER)),
    "sageattn_compare": (_I32, (_POINTER,) * 3),
    "sageattn_selftest": (_I32, (_POINTER, _POINTER)),
}
