"""The bytes of a GGUF file (versions 2 and 3, little-endian): metadata and tensor table, checked against its size.

The `gguf` package reads whole files well but trusts them: a cut or hostile one ends in an index error or an endless
loop. This walker takes every count and offset as a claim to be checked, and is quick on vocabularies of 100,000 words
because it builds no object per entry. Types, block sizes and dequantization come from the `gguf` package.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from bitnest_format.errors import FileFormatError

GGUF_MAGIC = b"GGUF"
OLD_MAGICS = (b"lmgg", b"tjgg", b"fmgg", b"algg")
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_NESTING = 4

SCALARS: Mapping[gguf.GGUFValueType, str] = {
    gguf.GGUFValueType.UINT8: "<u1",
    gguf.GGUFValueType.INT8: "<i1",
    gguf.GGUFValueType.UINT16: "<u2",
    gguf.GGUFValueType.INT16: "<i2",
    gguf.GGUFValueType.UINT32: "<u4",
    gguf.GGUFValueType.INT32: "<i4",
    gguf.GGUFValueType.FLOAT32: "<f4",
    gguf.GGUFValueType.BOOL: "?",
    gguf.GGUFValueType.UINT64: "<u8",
    gguf.GGUFValueType.INT64: "<i8",
    gguf.GGUFValueType.FLOAT64: "<f8",
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of the table: its type, its shape (outputs first), and its bytes as offsets into the file."""

    type: gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """`metadata` holds plain Python values; arrays of numbers and of strings are lists."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    def raw(
        self, tensor: GgufTensor, first_row: int = 0, rows: int | None = None
    ) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The stored bytes of some rows (all by default), uint8 `[rows, bytes per row]`, in memory of their own."""
        count = _rows(tensor.shape)
        row_bytes = tensor.size // count
        rows = count - first_row if rows is None else min(rows, count - first_row)
        data = np.empty(rows * row_bytes, dtype=np.uint8)
        try:
            with self.path.open("rb") as file:
                file.seek(tensor.start + first_row * row_bytes)
                count = file.readinto(data.data)
        except OSError as error:
            raise FileFormatError(f"{self.path.name}: cannot be read ({error.strerror or error})") from error
        if count != data.nbytes:
            raise FileFormatError(f"{self.path.name}: ended while a tensor was read from it")
        return data.reshape(rows, row_bytes)


def read_gguf(path: Path) -> GgufFile:
    """Read metadata and tensor table. Raises `FileFormatError` naming the file for anything that is not whole."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            _check_start(path.name, file.read(24), size)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                metadata, tensors = _Walker(path.name, data).walk()
    except OSError as error:
        raise FileFormatError(f"{path.name}: cannot be read ({error.strerror or error})") from error
    return GgufFile(path, metadata, tensors)


def _check_start(name: str, head: bytes, size: int) -> None:
    if head.startswith(b"version https://git-lfs"):
        raise FileFormatError(
            f"{name}: a Git LFS pointer of {size} bytes, the file itself was not downloaded. Run 'git lfs pull' or "
            "download it again."
        )
    if head[:4] in OLD_MAGICS:
        raise FileFormatError(f"{name}: a GGML file from before GGUF; convert the original model to GGUF again")
    if head[:4] != GGUF_MAGIC:
        raise FileFormatError(f"{name}: is not a GGUF file: starts with {head[:4]!r}, expected {GGUF_MAGIC!r}")
    if len(head) < 24:
        raise FileFormatError(f"{name}: cut off: has {size} bytes, its header is incomplete. Download it again.")
    version = struct.unpack("<I", head[4:8])[0]
    if version & 0xFFFF == 0:
        raise FileFormatError(f"{name}: is big-endian; expected a little-endian GGUF file")
    if version not in VERSIONS:
        raise FileFormatError(f"{name}: is of GGUF version {version}, expected {' or '.join(map(str, VERSIONS))}")


class _Walker:
    """One pass over the header of a mapped file."""

    def __init__(self, name: str, data: mmap.mmap):
        self.name = name
        self.data = data
        self.size = len(data)
        self.position = 8

    def walk(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        tensor_count, field_count = self._numbers("<u8", 2)
        metadata: dict[str, Any] = {}
        for _ in range(field_count):
            key = self._string()
            if key in metadata:
                raise self._broken(f"the metadata key {key} stands twice")
            metadata[key] = self._value(self._type())
        table = [self._table_entry() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._broken(f"general.alignment is {alignment!r}, expected a power of two")
        first = -(-self.position // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, kind, shape, offset in table:
            if name in tensors:
                raise self._broken(f"the tensor {name} stands twice")
            tensors[name] = GgufTensor(kind, shape, first + offset, self._bytes_of(name, kind, shape))
        end = max((tensor.start + tensor.size for tensor in tensors.values()), default=0)
        if end > self.size:
            raise self._cut(f"its header describes {end} bytes")
        return metadata, tensors

    def _table_entry(self) -> tuple[str, gguf.GGMLQuantizationType, tuple[int, ...], int]:
        name = self._string()
        dimensions = self._numbers("<u4", 1)[0]
        if not 1 <= dimensions <= 4:
            raise self._broken(f"{name} has {dimensions} dimensions, expected 1 to 4")
        shape = tuple(reversed(self._numbers("<u8", dimensions)))
        number, offset = self._numbers("<u4", 1)[0], self._numbers("<u8", 1)[0]
        try:
            kind = gguf.GGMLQuantizationType(number)
        except ValueError:
            raise self._broken(f"{name} is of the unknown tensor type {number}") from None
        return name, kind, shape, offset

    def _bytes_of(self, name: str, kind: gguf.GGMLQuantizationType, shape: tuple[int, ...]) -> int:
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if 0 in shape or shape[-1] % block:
            raise self._broken(f"{name}: rows of shape {list(shape)} do not fill blocks of {block} ({kind.name})")
        return int(_rows(shape) * (shape[-1] // block) * block_bytes)

    def _value(self, kind: gguf.GGUFValueType, depth: int = 0) -> Any:
        if kind == gguf.GGUFValueType.STRING:
            return self._string()
        if kind != gguf.GGUFValueType.ARRAY:
            return self._numbers(SCALARS[kind], 1)[0]
        inner, count = self._type(), self._numbers("<u8", 1)[0]
        if inner in SCALARS:
            return self._numbers(SCALARS[inner], count)
        if depth == MAX_NESTING:
            raise self._broken("its metadata is nested too deeply")
        return [self._value(inner, depth + 1) for _ in range(count)]

    def _type(self) -> gguf.GGUFValueType:
        number = self._numbers("<u4", 1)[0]
        try:
            return gguf.GGUFValueType(number)
        except ValueError:
            raise self._broken(f"its metadata has a value of the unknown type {number}") from None

    def _string(self) -> str:
        length = self._numbers("<u8", 1)[0]
        return self._take(length).decode("utf-8", errors="replace")

    def _numbers(self, dtype: str, count: int) -> list[Any]:
        raw = self._take(count * np.dtype(dtype).itemsize)
        numbers: list[Any] = np.frombuffer(raw, dtype=dtype).tolist()
        return numbers

    def _take(self, count: int) -> bytes:
        if count > self.size - self.position:
            raise self._cut("its header is incomplete")
        start = self.position
        self.position += count
        return self.data[start : self.position]

    def _cut(self, what: str) -> FileFormatError:
        return FileFormatError(f"{self.name}: cut off: has {self.size} bytes, {what}. Download it again.")

    def _broken(self, what: str) -> FileFormatError:
        return FileFormatError(f"{self.name}: is not a valid GGUF file: {what}")


def _rows(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape[:-1]:
        count *= size
    return count
