"""Arrays of NumPy, PyTorch, CuPy and whatever has __cuda_array_interface__ or DLPack, without copies.

No framework is imported: what a caller passes brings its own.
"""

from __future__ import annotations

import contextlib
import ctypes as c
import functools
import math
import sys
from typing import Any, Dict, Iterator, NamedTuple, Optional, Tuple

Shape = Tuple[int, ...]
HOST = -1  # Array.device of host memory

_ITEM_SIZES = {"f16": 2, "bf16": 2, "f32": 4, "i32": 4, "u8": 1}
_NAMES = {"float16": "f16", "bfloat16": "bf16", "float32": "f32", "int32": "i32", "uint8": "u8"}


class Array(NamedTuple):
    """What the library must know of a caller's array."""

    data: int  # address
    shape: Shape
    strides: Shape  # in elements
    dtype: str  # a key of _ITEM_SIZES, or the framework's name of another type
    device: int  # CUDA device, or HOST
    kind: str  # "numpy", "torch", "cupy", "cuda", "dlpack"
    source: Any  # what the caller passed
    keep: Any = None  # what else must live as long as the memory is used
    stream: Optional[int] = None  # on which the producer says that the data will be ready

    @property
    def place(self) -> str:
        """Its memory in words."""
        return place(self.device)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * _ITEM_SIZES[self.dtype]


def place(device: int) -> str:
    """A device in words."""
    return "host memory" if device == HOST else f"CUDA device {device}"


def contiguous(shape: Shape) -> Shape:
    """Strides of a shape in C order."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _element_strides(name: str, strides: Shape, item: int) -> Shape:
    for stride in strides:
        if stride % item:
            raise ValueError(f"{name} has a stride of {stride} bytes, which is no multiple of its element's "
                             f"{item} bytes")
    return tuple(stride // item for stride in strides)


def adapt(array: Any, name: str, dtype: Optional[str] = None, write: bool = False) -> Array:
    """Describe an array; `name` is for messages, dtype="bf16" reads 16-bit integers as bfloat16.

    Raises TypeError for what is no array, and ValueError for one that the library cannot use.
    """
    # Asked of the type, for the interfaces are made anew each time they are read.
    if hasattr(array, "data_ptr") and hasattr(array, "stride"):
        found = _from_torch(array, name)
    elif hasattr(type(array), "__array_interface__") and hasattr(array, "dtype"):
        found = _from_numpy(array, name, write)
    elif hasattr(array, "__cuda_array_interface__"):
        found = _from_cuda(array, name, write)
    elif hasattr(array, "__dlpack__"):
        found = _from_dlpack(array, name, write)
    else:
        raise TypeError(f"{name} is a {type(array).__name__}; allowed are NumPy arrays, PyTorch tensors, CuPy "
                        "arrays and objects with __cuda_array_interface__ or __dlpack__")
    if dtype == "bf16" and found.dtype in ("uint16", "int16"):
        found = found._replace(dtype="bf16")
    return found


# ---- PyTorch ------------------------------------------------------------------------------------

@functools.lru_cache(maxsize=64)
def _torch_dtype(dtype: Any) -> str:
    name = str(dtype).rpartition(".")[2]
    return _NAMES.get(name, name)


def _from_torch(tensor: Any, name: str) -> Array:
    torch = sys.modules.get("torch")
    if tensor.requires_grad and (torch is None or torch.is_grad_enabled()):
        raise ValueError(f"{name} requires grad, but there is no backward pass: call under torch.no_grad() or "
                         f"torch.inference_mode(), or pass {name}.detach()")
    device = tensor.device
    if device.type == "cuda":
        index = device.index if device.index is not None else 0
    elif device.type == "cpu":
        index = HOST
    else:
        raise ValueError(f"{name} is on device {str(device)!r}; allowed are 'cpu' and 'cuda'")
    layout = str(getattr(tensor, "layout", "torch.strided"))
    if layout != "torch.strided":
        raise ValueError(f"{name} has layout {layout}; only torch.strided is allowed")
    return Array(int(tensor.data_ptr()), tuple(tensor.shape), tuple(tensor.stride()),
                 _torch_dtype(tensor.dtype), index, "torch", tensor)


# ---- NumPy --------------------------------------------------------------------------------------

@functools.lru_cache(maxsize=64)
def _numpy_dtype(dtype: Any) -> str:
    if not dtype.isnative:
        return f"{dtype.name} of foreign byte order"
    name = str(dtype.name)
    return _NAMES.get(name, name)


def _from_numpy(array: Any, name: str, write: bool) -> Array:
    address, read_only = array.__array_interface__["data"]
    if write and read_only:
        raise ValueError(f"{name} is read-only")
    return Array(address, array.shape, _element_strides(name, array.strides, array.dtype.itemsize),
                 _numpy_dtype(array.dtype), HOST, "numpy", array)


# ---- __cuda_array_interface__ -------------------------------------------------------------------

_TYPESTRS = {"<f2": "f16", "<f4": "f32", "<i4": "i32", "|u1": "u8", "<u2": "uint16", "<i2": "int16"}


def _from_cuda(array: Any, name: str, write: bool) -> Array:
    interface: Dict[str, Any] = array.__cuda_array_interface__
    if interface.get("mask") is not None:
        raise ValueError(f"{name} has a mask, which is not supported")
    shape = tuple(interface["shape"])
    typestr = interface["typestr"]
    dtype = _TYPESTRS.get(typestr, typestr)
    if getattr(getattr(array, "dtype", None), "name", "") == "bfloat16":  # which has no typestr
        dtype = "bf16"
    address, read_only = interface["data"]
    if write and read_only:
        raise ValueError(f"{name} is read-only")
    item = int(typestr[2:])
    strides = interface.get("strides")
    is_cupy = type(array).__module__.partition(".")[0] == "cupy"
    if address:
        device = _device_of(address)
    else:  # an empty array has no address to ask about
        device = int(array.device.id) if is_cupy else 0
    return Array(address or 0, shape,
                 contiguous(shape) if strides is None else _element_strides(name, strides, item), dtype,
                 device, "cupy" if is_cupy else "cuda", array, stream=interface.get("stream"))


# ---- DLPack -------------------------------------------------------------------------------------

class _DLTensor(c.Structure):
    _fields_ = [("data", c.c_void_p), ("device_type", c.c_int32), ("device_id", c.c_int32),
                ("ndim", c.c_int32), ("code", c.c_uint8), ("bits", c.c_uint8), ("lanes", c.c_uint16),
                ("shape", c.POINTER(c.c_int64)), ("strides", c.POINTER(c.c_int64)),
                ("byte_offset", c.c_uint64)]


class _DLManaged(c.Structure):  # "dltensor"
    _fields_ = [("tensor", _DLTensor), ("context", c.c_void_p), ("deleter", c.c_void_p)]


class _DLManagedVersioned(c.Structure):  # "dltensor_versioned"
    _fields_ = [("major", c.c_uint32), ("minor", c.c_uint32), ("context", c.c_void_p),
                ("deleter", c.c_void_p), ("flags", c.c_uint64), ("tensor", _DLTensor)]


_DL_READ_ONLY = 1
_DL_TYPES = {(2, 16): "f16", (4, 16): "bf16", (2, 32): "f32", (0, 32): "i32", (1, 8): "u8",
             (1, 16): "uint16", (0, 16): "int16", (2, 64): "float64"}
_DL_HOST, _DL_CUDA = (1, 3), (2, 13)  # memory, pinned; memory, managed


def _capsule_pointer(capsule: Any, name: bytes) -> int:
    get = c.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = c.c_void_p, [c.py_object, c.c_char_p]
    return int(get(capsule, name))


def _capsule_is(capsule: Any, name: bytes) -> bool:
    valid = c.pythonapi.PyCapsule_IsValid
    valid.restype, valid.argtypes = c.c_int, [c.py_object, c.c_char_p]
    return bool(valid(capsule, name))


def _from_dlpack(array: Any, name: str, write: bool) -> Array:
    device_type, device_id = array.__dlpack_device__()
    if device_type not in _DL_HOST + _DL_CUDA:
        raise ValueError(f"{name} is on DLPack device type {int(device_type)}; allowed are host memory (1, 3) "
                         "and CUDA (2, 13)")
    # 1 is the legacy default stream, which all others but non-blocking ones wait for.
    stream = {"stream": 1} if device_type in _DL_CUDA else {}
    try:
        capsule = array.__dlpack__(max_version=(1, 0), **stream)
    except TypeError:  # of a producer that is older than versions
        capsule = array.__dlpack__(**stream)
    if _capsule_is(capsule, b"dltensor_versioned"):
        versioned = _DLManagedVersioned.from_address(_capsule_pointer(capsule, b"dltensor_versioned"))
        if versioned.major != 1:
            raise ValueError(f"{name} comes as DLPack {versioned.major}.{versioned.minor}; known is 1.x")
        if write and versioned.flags & _DL_READ_ONLY:
            raise ValueError(f"{name} is read-only")
        tensor = versioned.tensor
    elif _capsule_is(capsule, b"dltensor"):
        tensor = _DLManaged.from_address(_capsule_pointer(capsule, b"dltensor")).tensor
    else:
        raise ValueError(f"{name}.__dlpack__() gave no DLPack capsule")
    shape = tuple(tensor.shape[:tensor.ndim])
    strides = tuple(tensor.strides[:tensor.ndim]) if tensor.strides else contiguous(shape)
    code = (tensor.code, tensor.bits)
    dtype = _DL_TYPES.get(code, f"DLPack type code {code[0]} of {code[1]} bits")
    if tensor.lanes != 1:
        dtype += f" in {tensor.lanes} lanes"
    # The capsule keeps its name, so it still owns the memory and frees its claim when it goes.
    return Array((tensor.data or 0) + tensor.byte_offset, shape, strides, dtype,
                 HOST if device_type in _DL_HOST else int(device_id), "dlpack", array, capsule,
                 1 if device_type in _DL_CUDA else None)


# ---- Streams ------------------------------------------------------------------------------------

def stream_handle(stream: Any) -> int:
    """The CUstream of an integer or of an object of torch, CuPy or with __cuda_stream__."""
    if isinstance(stream, int):
        return stream
    for attribute in ("cuda_stream", "ptr"):
        value = getattr(stream, attribute, None)
        if isinstance(value, int):
            return value
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        return int((protocol() if callable(protocol) else protocol)[1])
    raise TypeError(f"stream is a {type(stream).__name__}; allowed are an integer (a CUstream), an object with "
                    "cuda_stream, ptr or __cuda_stream__, and None")


def current_stream(arrays: Tuple[Array, ...]) -> int:
    """The stream on which the caller's framework works now, or that on which arrays become ready."""
    for array in arrays:
        module = sys.modules.get(array.kind)
        if array.kind == "torch" and module is not None:
            return int(module.cuda.current_stream(array.device).cuda_stream)
        if array.kind == "cupy" and module is not None:
            with array.source.device:
                return int(module.cuda.get_current_stream().ptr)
    streams = {array.stream for array in arrays if array.stream is not None}
    if len(streams) > 1:
        raise ValueError(f"the arrays become ready on different streams {sorted(streams)}: make one wait for the "
                         "others, and pass it as stream")
    return streams.pop() if streams else 0


# ---- The CUDA driver ----------------------------------------------------------------------------

class CudaError(RuntimeError):
    """A call of the CUDA driver by this package that failed."""


@functools.lru_cache(maxsize=None)
def _driver() -> c.CDLL:
    try:
        loaded = c.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaError(f"memory of a GPU needs the NVIDIA driver's libcuda.so.1: {error}") from None
    for name, arguments in {
            "cuInit": [c.c_uint],
            "cuPointerGetAttribute": [c.c_void_p, c.c_int, c.c_uint64],
            "cuDevicePrimaryCtxRetain": [c.c_void_p, c.c_int],
            "cuCtxPushCurrent_v2": [c.c_void_p], "cuCtxPopCurrent_v2": [c.c_void_p],
            "cuMemAllocAsync": [c.c_void_p, c.c_size_t, c.c_void_p],
            "cuMemFreeAsync": [c.c_uint64, c.c_void_p]}.items():
        getattr(loaded, name).argtypes = arguments
    if (result := loaded.cuInit(0)) != 0:
        raise CudaError(f"cuInit: CUDA error {result}")
    return loaded


def _cuda(name: str, *arguments: Any) -> None:
    if (result := getattr(_driver(), name)(*arguments)) != 0:
        raise CudaError(f"{name}: CUDA error {result}")


def _device_of(address: int) -> int:
    ordinal = c.c_int()
    _cuda("cuPointerGetAttribute", c.byref(ordinal), 9, address)  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    return ordinal.value


@functools.lru_cache(maxsize=None)
def _primary_context(device: int) -> c.c_void_p:
    context = c.c_void_p()
    _cuda("cuDevicePrimaryCtxRetain", c.byref(context), device)
    return context


@contextlib.contextmanager
def device_memory(device: int, size: int, stream: int) -> Iterator[int]:
    """Memory for what is enqueued on the stream meanwhile, taken and given back in the stream's order."""
    _cuda("cuCtxPushCurrent_v2", _primary_context(device))
    try:
        address = c.c_uint64()
        _cuda("cuMemAllocAsync", c.byref(address), max(size, 1), stream)
        try:
            yield address.value
        finally:
            _cuda("cuMemFreeAsync", address, stream)
    finally:
        _cuda("cuCtxPopCurrent_v2", c.byref(c.c_void_p()))


# ---- New arrays ---------------------------------------------------------------------------------

def _on_stream(array: Array, stream: Optional[int]) -> contextlib.ExitStack:
    """A context in which the framework's allocator serves the stream; None is the current one."""
    stack = contextlib.ExitStack()
    if array.device == HOST or (stream is None and array.kind == "torch"):
        return stack
    module = sys.modules[array.kind]
    if array.kind == "torch":
        if module.cuda.current_stream(array.device).cuda_stream != stream:
            # ExternalStream takes 0 for "make one".
            other = (module.cuda.ExternalStream(stream, device=array.source.device) if stream
                     else module.cuda.default_stream(array.device))
            stack.enter_context(module.cuda.stream(other))
    else:
        stack.enter_context(array.source.device)
        if stream is not None and module.cuda.get_current_stream().ptr != stream:
            stack.enter_context(module.cuda.ExternalStream(stream))
    return stack


def new(like: Array, shape: Shape, dtype: str, stream: Optional[int]) -> Any:
    """An array of the same framework in the same memory, uninitialised, for use on a stream.

    stream: None for the framework's current one.
    """
    if like.device == HOST and like.kind in ("numpy", "dlpack"):
        try:
            import numpy
        except ImportError:
            raise TypeError("without NumPy there is nothing to make an output of; pass out") from None
        if dtype == "bf16":
            if like.dtype != "bf16" or like.kind != "numpy":
                raise TypeError("NumPy has no bfloat16 to make an output of; pass out, or another out_dtype")
            return numpy.empty(shape, like.source.dtype)  # of ml_dtypes, or bits
        return numpy.empty(shape, _long_name(dtype))
    if like.kind == "torch" and "torch" in sys.modules:
        with _on_stream(like, stream):
            return like.source.new_empty(shape, dtype=getattr(sys.modules["torch"], _long_name(dtype)))
    if like.kind == "cupy" and "cupy" in sys.modules:
        with _on_stream(like, stream):
            same = dtype == like.dtype
            return sys.modules["cupy"].empty(shape, like.source.dtype if same else _long_name(dtype))
    raise TypeError(f"nothing is known of how {type(like.source).__name__} makes arrays in {like.place}; pass out "
                    "(and lse, if wanted)")


def _long_name(dtype: str) -> str:
    return next(long for long, short in _NAMES.items() if short == dtype)


def short_name(dtype: str) -> str:
    """"f16" of "float16", and so on."""
    return _NAMES.get(dtype, dtype)
