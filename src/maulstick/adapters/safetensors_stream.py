"""Safetensors files tensor by tensor: reading into memory of our own, and writing without holding the file.

A mapped file would do for reading, but its pages count as memory in use; here only the tensor at hand does.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from maulstick.errors import ModelError

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_CHUNK = 4 * 2**20


class TensorSpec(NamedTuple):
    """Name, dtype and shape of a tensor in a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def header_bytes(tensors: Iterable[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    """Length and JSON header for tensors that follow in this order.

    The metadata is sorted and first; the header is padded with spaces so that the data is aligned to 8 bytes.
    """
    content: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.nbytes
        content[tensor.name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


class SafetensorsReader:
    """Reads single tensors of a file.

    Attributes:
        specs: name -> dtype and shape, in the order of the data.
        metadata: the file's own entries.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        header, self._start = _read_header(path)
        self.metadata: dict[str, str] = {str(k): str(v) for k, v in (header.pop("__metadata__", None) or {}).items()}
        by_offset = sorted(header.items(), key=lambda item: item[1]["data_offsets"][0])
        self._offsets: dict[str, int] = {name: entry["data_offsets"][0] for name, entry in by_offset}
        self.specs: dict[str, TensorSpec] = {}
        for name, entry in by_offset:
            dtype = _DTYPES.get(entry["dtype"])
            if dtype is None:
                raise ModelError(f"{path}: tensor '{name}' is of type {entry['dtype']}, which cannot be read here.")
            self.specs[name] = TensorSpec(name, dtype, tuple(entry["shape"]))

    def read(self, name: str) -> Tensor:
        """Return the tensor on the CPU, in memory of its own."""
        spec = self.specs[name]
        if spec.nbytes == 0:
            return torch.empty(spec.shape, dtype=spec.dtype)
        content = bytearray(spec.nbytes)
        with self.path.open("rb") as file:
            file.seek(self._start + self._offsets[name])
            if file.readinto(content) != spec.nbytes:
                raise ModelError(f"{self.path} is cut off within tensor '{name}'.")
        return torch.frombuffer(content, dtype=spec.dtype).reshape(spec.shape)

    def chunks(self, name: str) -> Iterator[bytes]:
        """The tensor's bytes as they lie in the file, a few MiB at a time."""
        left = self.specs[name].nbytes
        with self.path.open("rb") as file:
            file.seek(self._start + self._offsets[name])
            while left:
                chunk = file.read(min(left, _CHUNK))
                if not chunk:
                    raise ModelError(f"{self.path} is cut off within tensor '{name}'.")
                left -= len(chunk)
                yield chunk


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header's content and where the data starts; refuses what is no complete safetensors file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(9)
            length = struct.unpack("<Q", start[:8])[0] if len(start) == 9 else 0
            if len(start) < 9 or start[8:9] != b"{" or length > 100_000_000:
                raise ModelError(f"{path} is not a safetensors file.")
            file.seek(8)
            header = json.loads(file.read(length))
            ends = [int(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__"]
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ModelError(f"{path} is a damaged safetensors file: its header cannot be read ({error}).") from error
    if 8 + length + max(ends, default=0) != size:
        raise ModelError(
            f"{path} is not complete: it should have {8 + length + max(ends, default=0)} bytes and has {size}."
        )
    return header, 8 + length


def write_stream(
    path: Path,
    tensors: Sequence[TensorSpec],
    metadata: Mapping[str, str],
    content: Callable[[str], Tensor | Iterable[bytes | memoryview]],
    written: Callable[[TensorSpec], None] = lambda spec: None,
) -> None:
    """Write a file, asking ``content`` for one tensor (or its bytes) at a time.

    Wide dtypes come first, so that every tensor is aligned; otherwise the order is kept. ``written`` is told of each
    tensor that is done. The file is written in place: give a temporary path.
    """
    ordered = sorted(tensors, key=lambda spec: -spec.dtype.itemsize)
    with path.open("wb") as file:
        file.write(header_bytes(ordered, metadata))
        for spec in ordered:
            count = _write(file, content(spec.name))
            if count != spec.nbytes:
                raise ValueError(f"{spec.name}: {count} bytes for a tensor of {spec.nbytes}")
            written(spec)


def _write(file: BinaryIO, value: Tensor | Iterable[bytes | memoryview]) -> int:
    """Write and forget: no name in the loop above may hold a tensor while the next one is read."""
    count = 0
    for chunk in tensor_bytes(value) if isinstance(value, Tensor) else value:
        count += len(chunk)
        file.write(chunk)
    return count


def tensor_bytes(tensor: Tensor) -> Iterator[memoryview]:
    """The tensor's bytes as one view."""
    yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
