"""Finding and calling libsageattn, and the errors that its calls give."""

from __future__ import annotations

import ctypes as c
import importlib.util
import os
import threading
from pathlib import Path
from typing import Any, Callable, List, Optional, Tuple

from . import _abi

SONAME = "libsageattn.so.0"
_PACKAGE = Path(__file__).resolve().parent
_lock = threading.Lock()
_library: Optional[c.CDLL] = None


class SageAttentionError(RuntimeError):
    """A call of the library that failed.

    status: the number that the library returned (SAGEATTN_E_* of sageattn.h); status_name: its name, for
    instance "SAGEATTN_E_LIMIT". The text names the function, the field, its value and what is allowed.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status

    @property
    def status_name(self) -> str:
        """The constant's name in sageattn.h."""
        return status_name(self.status)

    def __reduce__(self) -> Tuple[Any, ...]:
        return type(self), (self.status, str(self))


class InvalidArgumentError(SageAttentionError, ValueError):
    """The call is wrong (status 100..199)."""


class UnsupportedError(SageAttentionError, NotImplementedError):
    """This library, backend or machine cannot do it (SAGEATTN_E_UNSUPPORTED)."""


class OutOfMemoryError(SageAttentionError, MemoryError):
    """Memory of the host or the device is exhausted (SAGEATTN_E_OUT_OF_MEMORY)."""


def _places() -> List[Tuple[str, str]]:
    """Where the library may be: what to load, and why there."""
    if chosen := os.environ.get("SAGEATTN_LIBRARY"):
        return [(chosen, "$SAGEATTN_LIBRARY")]
    places = [(str(_PACKAGE / SONAME), "the package's folder")]
    root = _PACKAGE.parents[2]
    if (root / "include" / "sageattn.h").is_file():
        places.append((str(root / "build" / "release" / SONAME), "the checkout's build folder"))
    return [*places, (SONAME, "the system's loader"), (f"/usr/local/lib/{SONAME}", "/usr/local/lib")]


def _load() -> c.CDLL:
    tried = []
    for path, why in _places():
        if "/" in path and why != "$SAGEATTN_LIBRARY" and not os.path.exists(path):
            tried.append(f"{path} ({why}): no such file")
            continue
        try:
            loaded = c.CDLL(path)
        except OSError as error:
            tried.append(f"{path} ({why}): {error}")
            continue
        for name, (result, arguments) in _abi.FUNCTIONS.items():
            try:
                function = getattr(loaded, name)
            except AttributeError:
                raise ImportError(f"{path} ({why}) is no libsageattn {_abi.VERSION[0]}."
                                  f"{_abi.VERSION[1]}: it has no {name}") from None
            function.restype, function.argtypes = result, arguments
        # Before 1.0 a new minor version may change structs.
        if int(loaded.sageattn_version()) // 100 != _abi.VERSION[0] * 100 + _abi.VERSION[1]:
            found = loaded.sageattn_version_string().decode()
            raise ImportError(f"{path} ({why}) is version {found}; this package is for "
                              f"{_abi.VERSION[0]}.{_abi.VERSION[1]}.x")
        return loaded
    advice = ("SAGEATTN_LIBRARY does not name one that can be loaded" if os.environ.get("SAGEATTN_LIBRARY")
              else "set SAGEATTN_LIBRARY to its path")
    raise ImportError(f"{SONAME} was not found; {advice}. Tried:\n  " + "\n  ".join(tried))


def library() -> c.CDLL:
    """The library, loaded at the first call. Raises ImportError that says what was tried."""
    global _library
    if _library is None:
        with _lock:
            if _library is None:
                _library = _load()
    return _library


def call(function: Callable[..., int], *arguments: Any) -> None:
    """Call a function that takes a sageattn_error last; raises SageAttentionError if it fails."""
    error = _abi.Error(struct_size=c.sizeof(_abi.Error))
    status = function(*arguments, c.byref(error))
    if status == 0:
        return
    kind = SageAttentionError
    if 100 <= status < 200:
        kind = InvalidArgumentError
    elif status == _abi.CONSTANTS["SAGEATTN_E_UNSUPPORTED"]:
        kind = UnsupportedError
    elif status == _abi.CONSTANTS["SAGEATTN_E_OUT_OF_MEMORY"]:
        kind = OutOfMemoryError
    raise kind(status, error.message.decode(errors="replace"))


def read_bytes(function: Callable[..., int], handle: c.c_void_p) -> bytes:
    """What a function writes that tells how large its buffer must be."""
    needed, error = c.c_size_t(), _abi.CONSTANTS["SAGEATTN_E_BUFFER_TOO_SMALL"]
    buffer = c.create_string_buffer(0)
    while True:
        try:
            call(function, handle, buffer, len(buffer), c.byref(needed))
        except SageAttentionError as failure:
            if failure.status != error:
                raise
            buffer = c.create_string_buffer(needed.value)
        else:
            return buffer.raw[:needed.value]


def status_name(status: int) -> str:
    """The name of a status in sageattn.h, for instance "SAGEATTN_E_LIMIT"."""
    text: bytes = library().sageattn_status_name(status)
    return text.decode()


def version() -> str:
    """The library's version and the start of the digest of its sources, e.g. "0.1.0 (0123456789ab)"."""
    loaded = library()
    return (f"{loaded.sageattn_version_string().decode()} "
            f"({loaded.sageattn_source_id().decode()[:12]})")


_LOADER_CACHE = Path("/etc/ld.so.cache")  # holds the names of all that the loader finds in its folders
_NVRTC_NAMES = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")


def _is_loaded(name: str) -> bool:
    try:
        c.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return False
    return True


def _loader_has(name: str) -> bool:
    """Whether the loader would find it; asked without loading it, which takes long."""
    folders = [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    if any(os.path.exists(os.path.join(folder, name)) for folder in folders):
        return True
    try:
        return name.encode() + b"\0" in _LOADER_CACHE.read_bytes()
    except OSError:
        return False


def nvrtc_in_wheels() -> Optional[str]:
    """NVRTC of NVIDIA's wheels in this interpreter, or None if the library has no need of it.

    It has none if it is told where NVRTC is ($SAGEATTN_NVRTC), if one is loaded, or if the loader finds
    one. A path given to it has no fall-back, so it is only that of a file which exists.
    """
    if os.environ.get("SAGEATTN_NVRTC") or any(map(_is_loaded, _NVRTC_NAMES)):
        return None
    try:
        spec = importlib.util.find_spec("nvidia")
    except (ImportError, ValueError):
        return None
    for root in (spec.submodule_search_locations or ()) if spec is not None else ():
        for folder in ("cu13/lib", "cuda_nvrtc/lib"):
            for name in _NVRTC_NAMES:
                path = os.path.join(root, folder, name)
                if os.path.isfile(path):
                    return None if any(map(_loader_has, _NVRTC_NAMES)) else path
    return None
