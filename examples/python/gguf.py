"""Reader for GGUF files, the container of llama.cpp / ggml models (NumPy only).

A GGUF file holds, all little-endian:

    magic "GGUF", version, tensor count, metadata count
    metadata:      key, value type, value
    tensor infos:  name, dimensions (fastest first), ggml type, data offset
    padding up to ``general.alignment`` (default 32), then the tensor data

Metadata of every defined value type is understood. Tensors can be read when
they are stored as F32, F16, Q4_0, Q4_1 or Q8_0; the quantized types are expanded
to float32 exactly as ggml does.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]
ByteArray = NDArray[np.uint8]

_MAGIC = b"GGUF"
_SUPPORTED_VERSIONS = (2, 3)

# Metadata value types: struct codes of the scalars, then the two special ones.
_SCALAR_CODES = {
    0: "B",  # UINT8
    1: "b",  # INT8
    2: "H",  # UINT16
    3: "h",  # INT16
    4: "I",  # UINT32
    5: "i",  # INT32
    6: "f",  # FLOAT32
    7: "?",  # BOOL
    10: "Q",  # UINT64
    11: "q",  # INT64
    12: "d",  # FLOAT64
}
_TYPE_STRING = 8
_TYPE_ARRAY = 9


def _dequantize_f32(raw: ByteArray) -> FloatArray:
    return raw.view("<f4").astype(np.float32)


def _dequantize_f16(raw: ByteArray) -> FloatArray:
    return raw.view("<f2").astype(np.float32)


def _nibbles(packed: ByteArray) -> ByteArray:
    """Unpack 16 bytes a block: the low nibbles are values 0-15, the high ones 16-31."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=1)


def _dequantize_q4_0(raw: ByteArray) -> FloatArray:
    """Blocks of 32: float16 scale d, 16 nibble bytes; value = d * (q - 8)."""
    blocks = raw.reshape(-1, 18)
    scale = blocks[:, 0:2].copy().view("<f2").astype(np.float32)
    return scale * (_nibbles(blocks[:, 2:]).astype(np.float32) - 8.0)


def _dequantize_q4_1(raw: ByteArray) -> FloatArray:
    """Blocks of 32: float16 scale d and minimum m, 16 nibble bytes; value = d * q + m."""
    blocks = raw.reshape(-1, 20)
    scale = blocks[:, 0:2].copy().view("<f2").astype(np.float32)
    minimum = blocks[:, 2:4].copy().view("<f2").astype(np.float32)
    return scale * _nibbles(blocks[:, 4:]).astype(np.float32) + minimum


def _dequantize_q8_0(raw: ByteArray) -> FloatArray:
    """Blocks of 32: float16 scale d, 32 signed bytes; value = d * q."""
    blocks = raw.reshape(-1, 34)
    scale = blocks[:, 0:2].copy().view("<f2").astype(np.float32)
    return scale * blocks[:, 2:].copy().view(np.int8).astype(np.float32)


@dataclass(frozen=True)
class TensorType:
    """How one ggml tensor type is laid out and how it becomes float32."""

    name: str
    block_values: int
    block_bytes: int
    dequantize: Callable[[ByteArray], FloatArray]


TENSOR_TYPES = {
    0: TensorType("F32", 1, 4, _dequantize_f32),
    1: TensorType("F16", 1, 2, _dequantize_f16),
    2: TensorType("Q4_0", 32, 18, _dequantize_q4_0),
    3: TensorType("Q4_1", 32, 20, _dequantize_q4_1),
    8: TensorType("Q8_0", 32, 34, _dequantize_q8_0),
}


@dataclass(frozen=True)
class TensorInfo:
    """Directory entry of one tensor; ``shape`` is row-major (slowest dimension first)."""

    shape: tuple[int, ...]
    type_id: int
    offset: int


class _Cursor:
    """Sequential reads of GGUF primitives from a byte buffer."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.position = 0

    def bytes(self, count: int) -> bytes:
        end = self.position + count
        if end > len(self._data):
            raise ValueError("GGUF file is truncated")
        chunk = bytes(self._data[self.position : end])
        self.position = end
        return chunk

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.bytes(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return self.bytes(self.scalar("Q")).decode("utf-8")

    def value(self, type_id: int) -> Any:
        """Read one metadata value; arrays (which may nest) become lists."""
        if type_id == _TYPE_STRING:
            return self.string()
        if type_id == _TYPE_ARRAY:
            element_type, count = self.scalar("I"), self.scalar("Q")
            return [self.value(element_type) for _ in range(count)]
        if type_id not in _SCALAR_CODES:
            raise ValueError(f"unknown GGUF metadata type {type_id}")
        return self.scalar(_SCALAR_CODES[type_id])


class GgufFile:
    """Metadata and tensors of one GGUF file; tensors are read when asked for."""

    def __init__(self, path: Path) -> None:
        self._data = np.memmap(path, dtype=np.uint8, mode="r")
        cursor = _Cursor(self._data.data)
        if cursor.bytes(4) != _MAGIC:
            raise ValueError(f"{path} is not a GGUF file")
        version = cursor.scalar("I")
        if version not in _SUPPORTED_VERSIONS:
            raise ValueError(f"GGUF version {version} is not supported")
        tensor_count, metadata_count = cursor.scalar("Q"), cursor.scalar("Q")
        self.metadata = self._read_metadata(cursor, metadata_count)
        self.tensors = self._read_tensor_infos(cursor, tensor_count)
        alignment = self.metadata.get("general.alignment", 32)
        self._data_start = -(-cursor.position // alignment) * alignment

    @staticmethod
    def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for _ in range(count):
            key = cursor.string()
            metadata[key] = cursor.value(cursor.scalar("I"))
        return metadata

    @staticmethod
    def _read_tensor_infos(cursor: _Cursor, count: int) -> dict[str, TensorInfo]:
        tensors: dict[str, TensorInfo] = {}
        for _ in range(count):
            name = cursor.string()
            fastest_first = [cursor.scalar("Q") for _ in range(cursor.scalar("I"))]
            type_id, offset = cursor.scalar("I"), cursor.scalar("Q")
            tensors[name] = TensorInfo(tuple(reversed(fastest_first)), type_id, offset)
        return tensors

    def tensor(self, name: str) -> FloatArray:
        """Return a tensor as float32, dequantized if need be."""
        info = self.tensors[name]
        if info.type_id not in TENSOR_TYPES:
            raise ValueError(f"{name}: ggml tensor type {info.type_id} is not supported")
        kind = TENSOR_TYPES[info.type_id]
        count = int(np.prod(info.shape))
        start = self._data_start + info.offset
        raw = self._data[start : start + count // kind.block_values * kind.block_bytes]
        return kind.dequantize(np.array(raw)).reshape(info.shape)
