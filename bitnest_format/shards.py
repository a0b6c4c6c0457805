"""Safetensors files as the format uses them: checked headers, single reads, streamed writes.

The safetensors library reads tensors; this module adds what it leaves to callers: messages that name the file
and say what is wrong with it, path checks for names that come out of an index, a digest of the stored bytes,
and a writer that never holds more than one tensor in memory. What is read of a checkpoint goes through `Files`, so
that the headers of a repository on the Hub are read by the same code as those of a folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import torch
from torch import Tensor

from bitnest_format.errors import FileFormatError

# The safetensors library's own limit, and the Hub's, which also bounds the JSON files of a checkpoint.
MAX_HEADER_BYTES = 100_000_000
MAX_JSON_BYTES = 25_000_000
COPY_BYTES = 1 << 24
MAX_NAME_BYTES = 255

DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
DTYPE_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor as a header describes it; `start` and `end` are offsets into the whole file, in bytes."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start


class Files(Protocol):
    """The files of one checkpoint: a folder, or a repository of which only what is asked for is transferred.

    Names are relative, with `/`; whoever takes one out of an index checks it first (`inside`). `name` is the
    checkpoint's own name for messages. `local` says whether reading a whole tensor is as cheap as it should be.
    """

    @property
    def name(self) -> str: ...

    @property
    def local(self) -> bool: ...

    def size(self, name: str) -> int | None:
        """Bytes of a file; None where there is no such file."""

    def read(self, name: str, start: int, length: int) -> bytearray:
        """Up to `length` bytes from `start` on; fewer where the file ends. Raises `OSError` or `BitnestError`."""

    def names(self) -> Iterable[str]:
        """Every file, sorted; hidden folders (.git, .cache) are left out."""

    def digest(self, name: str) -> str | None:
        """What stands for a file's content where the place knows it without reading; None where it does not."""


@dataclass(frozen=True, slots=True)
class LocalFiles:
    """The files of a folder. `listing` replaces the folder's own where it holds a part of what was published."""

    folder: Path
    listing: tuple[str, ...] | None = None

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def local(self) -> bool:
        return True

    def size(self, name: str) -> int | None:
        path = self.folder / name
        try:
            return path.stat().st_size if path.is_file() else None
        except OSError:
            return None

    def read(self, name: str, start: int, length: int) -> bytearray:
        with (self.folder / name).open("rb") as file:
            file.seek(start)
            raw = bytearray(max(0, min(length, os.fstat(file.fileno()).st_size - start)))
            del raw[file.readinto(raw) :]
        return raw

    def digest(self, name: str) -> str | None:
        return None

    def names(self) -> Iterable[str]:
        if self.listing is not None:
            return sorted(self.listing)
        names: list[str] = []
        for parent, folders, files in os.walk(self.folder):
            folders[:] = [name for name in folders if not name.startswith(".")]
            names += [(Path(parent) / name).relative_to(self.folder).as_posix() for name in files]
        return sorted(names)


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of one file; reads the header alone. Raises as `header_in` does."""
    return header_in(LocalFiles(path.parent), path.name)[0]


def header_in(files: Files, name: str) -> tuple[dict[str, TensorEntry], dict[str, Any]]:
    """The tensors of one file and its `__metadata__`. Reads the header alone, and no more than a header may hold.

    Raises `FileFormatError` naming the file for anything that is not one whole safetensors file: missing,
    cut off, padded, a Git LFS pointer, overlapping or uncovered bytes, sizes that contradict shapes.
    """
    limit = MAX_HEADER_BYTES if files.local else MAX_JSON_BYTES
    last = PurePosixPath(name).name
    try:
        head = files.read(name, 0, 8)
        size = files.size(name) or 0
        if head.startswith(b"version "):
            raise FileFormatError(
                f"{last}: a Git LFS pointer of {size} bytes, the file itself was not downloaded. "
                "Run 'git lfs pull' or download it again."
            )
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if limit < length <= size - 8:
            raise FileFormatError(f"{last}: its header has {length} bytes, expected at most {limit}")
        if len(head) < 8 or length > size - 8:
            raise _cut(last, size, "its header is incomplete")
        raw = files.read(name, 8, length)
    except OSError as error:
        raise FileFormatError(f"{last}: cannot be read ({error.strerror or error})") from error
    try:
        header = json.loads(raw, object_pairs_hook=_unique_keys)
        if not isinstance(header, dict):
            raise ValueError(f"found a JSON {type(header).__name__}, expected an object")
        entries = {key: _entry(key, entry, 8 + length) for key, entry in header.items() if key != "__metadata__"}
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"{last}: its safetensors header is not valid ({error})") from error
    _check_layout(last, entries, 8 + length, size)
    metadata = header.get("__metadata__")
    return entries, metadata if isinstance(metadata, dict) else {}


def _entry(name: str, data: Any, first: int) -> TensorEntry:
    fields: dict[str, Any] = data if isinstance(data, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    listed = isinstance(shape, list) and isinstance(offsets, list) and len(offsets) == 2
    if isinstance(dtype, str) and listed and _counts(numbers := [*(shape or ()), *(offsets or ())]):
        *sizes, start, end = numbers
        return TensorEntry(dtype, tuple(sizes), first + start, first + end)
    raise ValueError(f"{name}: dtype, shape and two data_offsets are expected, the numbers 0 or more")


def _counts(numbers: list[Any]) -> bool:
    # `type` and not `isinstance`: true and false are no numbers here.
    return all(type(number) is int and number >= 0 for number in numbers)


def _check_layout(file: str, entries: Mapping[str, TensorEntry], first: int, size: int) -> None:
    position = first
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.dtype in DTYPES:
            expected = DTYPES[entry.dtype].itemsize
            for dimension in entry.shape:
                expected *= dimension
            if expected != entry.size:
                raise FileFormatError(
                    f"{file}: {name}: {entry.size} bytes for shape {list(entry.shape)} of {entry.dtype}, "
                    f"expected {expected}"
                )
        if entry.start != position or entry.end < entry.start:
            raise FileFormatError(f"{file}: {name}: its bytes overlap or leave a gap before them")
        position = entry.end
    if position > size:
        raise _cut(file, size, f"its header describes {position} bytes")
    if position < size:
        raise FileFormatError(f"{file}: has {size} bytes, its header describes {position}. Download it again.")


def _cut(file: str, size: int, what: str) -> FileFormatError:
    return FileFormatError(f"{file}: cut off: has {size} bytes, {what}. Download it again.")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {twice!r} stands twice in one object")
    return dict(pairs)


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON number")


def inside(folder: Path, name: object) -> Path:
    """`folder / name` for a name that stays inside the folder.

    Raises `FileFormatError` quoting the name for absolute paths, `..`, drive letters, backslashes, empty names,
    and names that no file can have: control characters, parts of more than 255 bytes.
    """
    if isinstance(name, str):
        parts = PurePosixPath(name).parts
        plain = parts and ".." not in parts and not name.startswith("/") and not set("\\:") & set(name)
        # Control characters and half surrogates are not printable, and some systems cannot look them up at all.
        if plain and name.isprintable() and all(len(part.encode()) <= MAX_NAME_BYTES for part in parts):
            return folder / name
    raise FileFormatError(f"{name!r} is not a file inside {folder.name}: a plain relative name is expected")


def read_json(path: Path, *, strict: bool = False) -> Any:
    """Parse a UTF-8 JSON file. Raises `FileFormatError` naming the file and the place of the fault.

    `strict` refuses what parsers disagree about: a key that stands twice in an object, NaN and Infinity.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise FileFormatError(f"{path.name}: cannot be read ({error.strerror or error})") from error
    return _parse_json(path.name, raw, strict)


def json_in(files: Files, name: str, *, strict: bool = False) -> Any:
    """`read_json` of a file that anybody may have written: at most `MAX_JSON_BYTES` are read."""
    last = PurePosixPath(name).name
    if (size := files.size(name) or 0) > MAX_JSON_BYTES:
        raise FileFormatError(f"{last}: has {size} bytes, expected at most {MAX_JSON_BYTES}")
    try:
        raw = files.read(name, 0, MAX_JSON_BYTES)
    except OSError as error:
        raise FileFormatError(f"{last}: cannot be read ({error.strerror or error})") from error
    return _parse_json(last, raw, strict)


def _parse_json(name: str, raw: bytes | bytearray, strict: bool) -> Any:
    if raw.startswith(b"version https://git-lfs"):
        raise FileFormatError(f"{name}: a Git LFS pointer, the file itself was not downloaded")
    try:
        text = raw.decode("utf-8")
        if strict:
            return json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
        return json.loads(text)
    except ValueError as error:
        raise FileFormatError(f"{name}: is not valid JSON ({error})") from error
    except RecursionError as error:
        raise FileFormatError(f"{name}: is nested too deeply") from error


def write_json(path: Path, data: Any) -> None:
    """Write UTF-8 JSON with two-space indents and a final newline."""
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The little-endian bytes of a tensor as they are stored, without a copy where it is contiguous."""
    flat = tensor.detach().cpu().contiguous().flatten()
    return flat.view(torch.uint8).numpy().data


def tensor_sha256(tensor: Tensor) -> str:
    """SHA-256 of `tensor_bytes`, in hexadecimal."""
    return hashlib.sha256(tensor_bytes(tensor)).hexdigest()


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True, slots=True)
class Pending:
    """A tensor to be written: its type, its shape, and how to get its bytes in pieces."""

    dtype: str
    shape: tuple[int, ...]
    size: int
    chunks: Callable[[], Iterable[memoryview | bytes]]


def pending_tensor(tensor: Tensor) -> Pending:
    """A tensor in memory, ready to be written."""
    size = tensor.numel() * tensor.element_size()
    return Pending(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), size, lambda: [tensor_bytes(tensor)])


def pending_copy(path: Path, entry: TensorEntry) -> Pending:
    """A tensor that already lies in another safetensors file; its bytes are copied piecewise."""
    return Pending(entry.dtype, entry.shape, entry.size, lambda: _file_chunks(path, entry))


def _file_chunks(path: Path, entry: TensorEntry) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(entry.start)
        left = entry.size
        while left:
            chunk = file.read(min(left, COPY_BYTES))
            if not chunk:
                raise FileFormatError(f"{path.name}: ended while a tensor was copied out of it")
            left -= len(chunk)
            yield chunk


def split_by_size(tensors: Mapping[str, Pending], limit: int) -> list[list[str]]:
    """Names in order, cut into runs of at most `limit` bytes; a larger tensor stands alone."""
    shards: list[list[str]] = []
    filled = limit
    for name, tensor in tensors.items():
        if filled + tensor.size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += tensor.size
    return shards


def write_shard(path: Path, tensors: Mapping[str, Pending], metadata: Mapping[str, str]) -> tuple[int, str]:
    """Write one safetensors file in the given order; returns its size in bytes and its SHA-256.

    Memory stays at one chunk. The header is padded so that the data starts at a multiple of 8 bytes.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    position = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [position, position + tensor.size],
        }
        position += tensor.size
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    raw += b" " * (-len(raw) % 8)
    digest = hashlib.sha256()
    # A new file, not new content: whoever has the old one mapped into memory would crash.
    path.unlink(missing_ok=True)
    with path.open("wb") as file:
        for piece in (struct.pack("<Q", len(raw)), raw):
            digest.update(piece)
            file.write(piece)
        for tensor in tensors.values():
            for chunk in tensor.chunks():
                digest.update(chunk)
                file.write(chunk)
    return 8 + len(raw) + position, digest.hexdigest()
