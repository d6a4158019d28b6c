"""Read and write safetensors files (NumPy only).

A safetensors file is an 8-byte little-endian header length, a JSON header, and
the tensors' bytes one after the other. The header maps each tensor's name to its
``dtype``, ``shape`` and ``data_offsets`` (begin, end) within the data, and
``__metadata__`` to a dictionary of strings.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_HEADER_ALIGNMENT = 8


def save(path: Path, tensors: Mapping[str, Array], metadata: Mapping[str, str]) -> None:
    """Write ``tensors``, in their order, and ``metadata`` to ``path``."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": _NAMES[tensor.dtype.newbyteorder("<")],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    encoded = json.dumps(header, separators=(",", ":")).encode("utf-8")
    encoded += b" " * (-len(encoded) % _HEADER_ALIGNMENT)  # keeps the data aligned
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor, tensor.dtype.newbyteorder("<")).tobytes())


def load(path: Path) -> tuple[dict[str, Array], dict[str, str]]:
    """Return all tensors and the metadata of ``path``; raise ValueError if it is malformed.

    The tensors are read-only views of one buffer. BF16, which NumPy lacks, is
    returned as float32.
    """
    content = path.read_bytes()
    data_start = 8 + int.from_bytes(content[:8], "little")
    if data_start > len(content):
        raise ValueError(f"{path}: the safetensors header is truncated")
    header = json.loads(content[8:data_start])
    metadata = header.pop("__metadata__", {})
    data = memoryview(content)[data_start:]
    _check_offsets(path, header, len(data))
    return {name: _decode(name, entry, data) for name, entry in header.items()}, metadata


def _check_offsets(path: Path, header: Mapping[str, Any], data_size: int) -> None:
    """Require that the tensors cover the data without a gap or an overlap."""
    expected_begin = 0
    for begin, end in sorted(tuple(entry["data_offsets"]) for entry in header.values()):
        if begin != expected_begin or end < begin:
            raise ValueError(f"{path}: data offsets [{begin}, {end}] leave a gap or overlap")
        expected_begin = end
    if expected_begin != data_size:
        raise ValueError(f"{path}: the tensors cover {expected_begin} of {data_size} bytes")


def _decode(name: str, entry: Mapping[str, Any], data: memoryview) -> Array:
    """Turn one header entry and its bytes into an array."""
    begin, end = entry["data_offsets"]
    raw, shape = data[begin:end], entry["shape"]
    if entry["dtype"] == "BF16":
        upper_halves = np.frombuffer(raw, "<u2").astype(np.uint32)
        return (upper_halves << 16).view(np.float32).reshape(shape)
    if entry["dtype"] not in _DTYPES:
        raise ValueError(f"{name}: safetensors type {entry['dtype']} is not supported")
    flat: Array = np.frombuffer(raw, _DTYPES[entry["dtype"]])
    return flat.reshape(shape)
