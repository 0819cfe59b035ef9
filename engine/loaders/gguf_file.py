"""The GGUF container: metadata and tensors of one file, every length checked against the file before it is used.

The `gguf` package supplies the constants and the dequantisers. Its own reader makes an array object for every string of
a vocabulary, which takes seconds on a real model, and trusts the lengths it finds; so the container is parsed here.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize

from kvblend.engine.config import BadModelFile, UnsupportedModel

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DIMENSIONS_MAX = 4
_SCALARS: dict[int, str] = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.BOOL: "<?",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT64: "<d",
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: `shape` outermost first, `offset` and `length` in bytes of the file."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    length: int


class GGUFFile:
    """A GGUF file held open; use it as a context manager. Nothing it returns refers to the file's memory.

    Raises BadModelFile (not GGUF, cut short, inconsistent) or UnsupportedModel (a version or byte order of another
    kind), both naming the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        with path.open("rb") as file:
            if file.read(4) != MAGIC:
                raise BadModelFile(f"{path}: not a GGUF file (it does not begin with the letters GGUF)")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            self._parse()
        except BaseException:
            self._map.close()
            raise

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file; `metadata` and `tensors` stay readable."""
        self._map.close()

    def read(self, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        """A float32 copy of a tensor, dequantised where it is quantised.

        UnsupportedModel names a tensor type the `gguf` package cannot dequantise.
        """
        info = self.tensors[name]
        raw = np.frombuffer(self._map[info.offset : info.offset + info.length], dtype=np.uint8)
        rows = raw.reshape(*info.shape[:-1], -1)
        if info.kind == GGMLQuantizationType.F64:
            return rows.view(np.float64).astype(np.float32).reshape(info.shape)
        try:
            values = dequantize(rows, info.kind)
        except NotImplementedError:
            raise UnsupportedModel(
                f"{self.path}: tensor {name} has type {info.kind.name}, which cannot be dequantised"
            ) from None
        return np.array(values, dtype=np.float32, copy=True).reshape(info.shape)

    def _parse(self) -> None:
        cursor = _Cursor(self.path, self._map, 4)
        version = cursor.scalar("<I", "the version")
        if version not in VERSIONS:
            swapped = version & 0xFFFF == 0
            what = "big-endian byte order" if swapped else f"version {version}"
            raise UnsupportedModel(f"{self.path}: GGUF of {what} is not supported; supported: little-endian 2 and 3")
        tensor_count = cursor.scalar("<Q", "the tensor count")
        field_count = cursor.scalar("<Q", "the field count")
        for _ in range(field_count):
            name = cursor.string("a field's name")
            if name in self.metadata:
                raise BadModelFile(f"{self.path}: field {name} occurs twice")
            self.metadata[name] = cursor.value(cursor.scalar("<I", name), name)
        infos = [self._tensor_header(cursor) for _ in range(_bounded(tensor_count, cursor, "tensors"))]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise BadModelFile(f"{self.path}: general.alignment is {alignment!r}; it must be a positive number")
        start = -(-cursor.at // alignment) * alignment
        for name, shape, kind, offset in infos:
            self._place(name, shape, kind, start + offset)

    def _tensor_header(self, cursor: _Cursor) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = cursor.string("a tensor's name")
        dimensions = cursor.scalar("<I", name)
        if not 1 <= dimensions <= DIMENSIONS_MAX:
            raise BadModelFile(f"{self.path}: tensor {name} has {dimensions} dimensions; 1 to {DIMENSIONS_MAX} can be")
        shape = tuple(cursor.scalar("<Q", name) for _ in range(dimensions))[::-1]
        number = cursor.scalar("<I", name)
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise UnsupportedModel(f"{self.path}: tensor {name} has the unknown type number {number}") from None
        return name, shape, kind, cursor.scalar("<Q", name)

    def _place(self, name: str, shape: tuple[int, ...], kind: GGMLQuantizationType, offset: int) -> None:
        if name in self.tensors:
            raise BadModelFile(f"{self.path}: tensor {name} occurs twice")
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if min(shape) < 1 or shape[-1] % block:
            raise BadModelFile(f"{self.path}: tensor {name} has shape {list(shape)}, not whole {kind.name} blocks")
        length = block_bytes * (shape[-1] // block)
        for size in shape[:-1]:
            length *= size
        if offset + length > len(self._map):
            raise BadModelFile(
                f"{self.path}: cut short: tensor {name} ends at byte {offset + length}, the file at {len(self._map)}"
            )
        self.tensors[name] = TensorInfo(shape, kind, offset, length)


class _Cursor:
    """A reading position; every read checks that the file is long enough."""

    def __init__(self, path: Path, data: mmap.mmap, at: int) -> None:
        self.path, self.data, self.at = path, data, at
        self.size = len(data)

    def take(self, length: int, what: str) -> bytes:
        end = self.at + length
        if end > self.size:
            raise BadModelFile(f"{self.path}: cut short: {what} ends at byte {end}, the file at {self.size}")
        taken = self.data[self.at : end]
        self.at = end
        return taken

    def scalar(self, code: str, what: str) -> Any:
        return struct.unpack(code, self.take(struct.calcsize(code), what))[0]

    def string(self, what: str) -> str:
        raw = self.take(self.scalar("<Q", what), what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise BadModelFile(f"{self.path}: {what} is not valid UTF-8 ({error.reason})") from None

    def value(self, kind: int, what: str, depth: int = 0) -> Any:
        """A scalar, a string or a list of them; `depth` bounds arrays of arrays."""
        if kind == GGUFValueType.STRING:
            return self.string(what)
        if kind == GGUFValueType.ARRAY and depth < 2:
            item, count = self.scalar("<I", what), self.scalar("<Q", what)
            if item in _SCALARS:
                code = _SCALARS[item]
                raw = self.take(struct.calcsize(code) * count, what)
                return list(struct.unpack(f"<{count}{code[1]}", raw))
            return [self.value(item, what, depth + 1) for _ in range(_bounded(count, self, what))]
        if kind not in _SCALARS:
            raise BadModelFile(f"{self.path}: field {what} has a value of unknown type {kind}")
        return self.scalar(_SCALARS[kind], what)


def _bounded(count: int, cursor: _Cursor, what: str) -> int:
    """`count` entries of at least 8 bytes each must fit into what is left of the file."""
    if count * 8 > cursor.size - cursor.at:
        raise BadModelFile(f"{cursor.path}: cut short: {count} entries of {what} do not fit into the file")
    return count
