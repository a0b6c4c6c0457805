"""Safetensors files: every way a header can be broken, names that leave the folder, golden bytes."""

from __future__ import annotations

import hashlib
import json
import struct

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from bitnest_format import shards
from bitnest_format.errors import FileFormatError
from bitnest_format.shards import TensorEntry, inside, read_header, read_json, write_shard

NAME = "weights.safetensors"


def file_of(header, data=b"", folder=None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode("utf-8")
    path = folder / NAME
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


def refusal(path):
    with pytest.raises(FileFormatError) as error:
        read_header(path)
    return str(error.value)


def entry(dtype="F32", shape=(2,), start=0, end=8):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


def test_read_header(tmp_path):
    header = {"__metadata__": {"format": "pt"}, "b": entry(), "a": entry("I8", (3, 1), 8, 11)}
    path = file_of(header, bytes(11), tmp_path)
    first = path.stat().st_size - 11
    assert read_header(path) == {
        "b": TensorEntry("F32", (2,), first, first + 8),
        "a": TensorEntry("I8", (3, 1), first + 8, first + 11),
    }


@pytest.mark.parametrize("metadata", [None, {}, {"format": "mlx"}], ids=["absent", "empty", "mlx"])
def test_all_forms_of_metadata_are_read(metadata, tmp_path):
    """SF-8: what other programs write is accepted on input."""
    header = {"a": entry()} | ({} if metadata is None else {"__metadata__": metadata})
    assert list(read_header(file_of(header, bytes(8), tmp_path))) == ["a"]


def test_an_empty_file_of_tensors(tmp_path):
    assert read_header(file_of({}, b"", tmp_path)) == {}


def test_empty_tensors_and_scalars(tmp_path):
    header = {"none": entry("F32", (0, 7), 0, 0), "scalar": entry("I64", (), 0, 8)}
    assert read_header(file_of(header, bytes(8), tmp_path))["scalar"].shape == ()


def test_a_missing_file(tmp_path):
    assert refusal(tmp_path / NAME) == f"{NAME}: cannot be read (No such file or directory)"


def test_a_git_lfs_pointer(tmp_path):
    """SF-5"""
    (tmp_path / NAME).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 123\n")
    assert refusal(tmp_path / NAME) == (
        f"{NAME}: a Git LFS pointer of 65 bytes, the file itself was not downloaded. "
        "Run 'git lfs pull' or download it again."
    )


@pytest.mark.parametrize(
    ("keep", "reason"),
    [
        (0, "its header is incomplete"),
        (4, "its header is incomplete"),
        (8, "its header is incomplete"),
        (30, "its header is incomplete"),
        (-1, "its header describes {size} bytes"),
        (-6, "its header describes {size} bytes"),
    ],
)
def test_a_file_that_was_cut_off(keep, reason, tmp_path):
    """SF-6"""
    path = file_of({"a": entry()}, bytes(8), tmp_path)
    size = path.stat().st_size
    kept = keep if keep >= 0 else size + keep
    path.write_bytes(path.read_bytes()[:kept])
    assert refusal(path) == f"{NAME}: cut off: has {kept} bytes, {reason.format(size=size)}. Download it again."


def test_bytes_after_the_end(tmp_path):
    path = file_of({"a": entry()}, bytes(9), tmp_path)
    size = path.stat().st_size
    assert refusal(path) == f"{NAME}: has {size} bytes, its header describes {size - 1}. Download it again."


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 101_000_000])
def test_a_huge_header_is_not_read(length, tmp_path):
    (tmp_path / NAME).write_bytes(struct.pack("<Q", length) + b"{}")
    assert refusal(tmp_path / NAME) == f"{NAME}: cut off: has 10 bytes, its header is incomplete. Download it again."


INVALID = "its safetensors header is not valid"
NUMBERS = "dtype, shape and two data_offsets are expected, the numbers 0 or more"


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (b"what", f"{INVALID} (Expecting value: line 1 column 1 (char 0))"),
        (b"\xff\xff", f"{INVALID} ('utf-8' codec can't decode byte 0xff in position 0: invalid start byte)"),
        (b"[]", f"{INVALID} (found a JSON list, expected an object)"),
        (b'{"a": 1, "a": 2}', f"{INVALID} (the name 'a' stands twice in one object)"),
        ({"a": {}}, f"{INVALID} (a: {NUMBERS})"),
        ({"a": []}, f"{INVALID} (a: {NUMBERS})"),
        ({"a": entry() | {"dtype": ["F32"]}}, f"{INVALID} (a: {NUMBERS})"),
        ({"a": entry() | {"shape": "2"}}, f"{INVALID} (a: {NUMBERS})"),
        ({"a": entry() | {"shape": [2.0]}}, f"{INVALID} (a: {NUMBERS})"),
        ({"a": entry() | {"shape": [True, 2]}}, f"{INVALID} (a: {NUMBERS})"),
        ({"a": entry() | {"shape": [-1, -2]}}, f"{INVALID} (a: {NUMBERS})"),
        ({"a": entry() | {"data_offsets": [0]}}, f"{INVALID} (a: {NUMBERS})"),
        ({"a": entry() | {"data_offsets": [-8, 0]}}, f"{INVALID} (a: {NUMBERS})"),
        ({"a": entry(shape=(3,))}, "a: 8 bytes for shape [3] of F32, expected 12"),
        ({"a": entry(shape=(2**40, 2**40))}, f"a: 8 bytes for shape [{2**40}, {2**40}] of F32, expected {2**82}"),
        (
            {"a": entry(end=4, shape=(1,)), "b": entry(start=0, end=4, shape=(1,))},
            "b: its bytes overlap or leave a gap before them",
        ),
        ({"a": entry(start=4, end=8, shape=(1,))}, "a: its bytes overlap or leave a gap before them"),
        ({"a": entry("strange", (1,), 8, 0)}, "a: its bytes overlap or leave a gap before them"),
    ],
    ids=lambda value: value[:60] if isinstance(value, str) else "",
)
def test_broken_headers(header, reason, tmp_path):
    assert refusal(file_of(header, bytes(8), tmp_path)) == f"{NAME}: {reason}"


def test_a_header_that_is_nested_too_deeply(tmp_path):
    assert refusal(file_of(b"[" * 100_000, b"", tmp_path)).startswith(f"{NAME}: {INVALID} (maximum recursion depth")


@pytest.mark.parametrize("name", ["a.safetensors", "sub/a.json", "a..b", "...", "köln.json", "a" * 255])
def test_names_inside(name, tmp_path):
    assert inside(tmp_path, name) == tmp_path / name


@pytest.mark.parametrize(
    "name",
    ["", "..", "../a", "a/../../b", "/etc/passwd", "a\\b", "c:a", "a\0b", "a\nb", "\ud800", "a" * 256, None, 7, ["a"]],
    ids=ascii,
)
def test_names_outside(name, tmp_path):
    """SF-4"""
    with pytest.raises(FileFormatError) as error:
        inside(tmp_path, name)
    assert str(error.value) == f"{name!r} is not a file inside {tmp_path.name}: a plain relative name is expected"


@pytest.mark.parametrize(
    ("content", "strict", "reason"),
    [
        (
            b"{",
            False,
            "is not valid JSON (Expecting property name enclosed in double quotes: line 1 column 2 (char 1))",
        ),
        (
            b"\xe9",
            False,
            "is not valid JSON ('utf-8' codec can't decode byte 0xe9 in position 0: unexpected end of data)",
        ),
        (
            b"version https://git-lfs.github.com/spec/v1\n",
            False,
            "a Git LFS pointer, the file itself was not downloaded",
        ),
        (b"[" * 100_000, False, "is nested too deeply"),
        (b'{"a": {"b": 1, "b": 2}}', True, "is not valid JSON (the name 'b' stands twice in one object)"),
        (b"[NaN]", True, "is not valid JSON (NaN is no JSON number)"),
        (b"[-Infinity]", True, "is not valid JSON (-Infinity is no JSON number)"),
    ],
    ids=["cut", "not-utf-8", "lfs", "deep", "twice", "nan", "infinity"],
)
def test_read_json_refuses(content, strict, reason, tmp_path):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(FileFormatError) as error:
        read_json(tmp_path / "a.json", strict=strict)
    assert str(error.value) == f"a.json: {reason}"


def test_read_json_is_lenient_by_default(tmp_path):
    (tmp_path / "a.json").write_text('{"a": 1, "a": Infinity}', encoding="utf-8")
    assert read_json(tmp_path / "a.json") == {"a": float("inf")}


def test_json_round_trip_of_any_script(tmp_path):
    """PU-4: UTF-8 whatever the locale."""
    data = {"token": "汉字 🦉 naïve", "list": [1, None]}
    shards.write_json(tmp_path / "a.json", data)
    assert "🦉".encode() in (tmp_path / "a.json").read_bytes()
    assert read_json(tmp_path / "a.json", strict=True) == data


def test_write_shard_golden_bytes(tmp_path):
    tensors = {
        "b": torch.tensor([[1, -2]], dtype=torch.int32),
        "a": torch.tensor([0.5], dtype=torch.float16),
    }
    pending = {name: shards.pending_tensor(tensor) for name, tensor in tensors.items()}
    size, digest = write_shard(tmp_path / NAME, pending, {"bitnest_planes": "base"})
    header = (
        b'{"__metadata__":{"format":"pt","bitnest_planes":"base"},'
        b'"b":{"dtype":"I32","shape":[1,2],"data_offsets":[0,8]},'
        b'"a":{"dtype":"F16","shape":[1],"data_offsets":[8,10]}}'
    )
    header += b" " * (-len(header) % 8)
    expected = struct.pack("<Q", len(header)) + header + bytes.fromhex("01000000 feffffff 0038")
    assert (tmp_path / NAME).read_bytes() == expected
    assert (size, digest) == (len(expected), hashlib.sha256(expected).hexdigest())


@pytest.mark.parametrize("dtype", list(shards.DTYPE_NAMES), ids=str)
def test_every_type_is_read_back_by_the_safetensors_library(dtype, tmp_path):
    tensor = torch.arange(6).reshape(2, 3).to(dtype)
    write_shard(tmp_path / NAME, {"a": shards.pending_tensor(tensor)}, {})
    loaded = load_file(tmp_path / NAME)["a"]
    assert loaded.dtype == dtype
    assert shards.tensor_sha256(loaded) == shards.tensor_sha256(tensor)
    assert read_header(tmp_path / NAME)["a"].dtype == shards.DTYPE_NAMES[dtype]


def test_tensors_that_are_not_aligned_are_read_back(tmp_path):
    tensors = {"odd": torch.ones(3, dtype=torch.int8), "wide": torch.arange(4, dtype=torch.int64)}
    write_shard(tmp_path / NAME, {name: shards.pending_tensor(t) for name, t in tensors.items()}, {})
    torch.testing.assert_close(load_file(tmp_path / NAME), tensors, rtol=0, atol=0)


def test_tensors_that_are_not_contiguous_are_written_in_order(tmp_path):
    """SF-7"""
    whole = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    tensors = {"transposed": whole.t(), "sliced": whole[:, 1:3], "empty": whole[:0], "scalar": whole[1, 1]}
    write_shard(tmp_path / NAME, {name: shards.pending_tensor(t) for name, t in tensors.items()}, {})
    torch.testing.assert_close(load_file(tmp_path / NAME), tensors, rtol=0, atol=0)


def test_tensors_of_one_storage_are_written_twice(tmp_path):
    """TE-2"""
    tensor = torch.randn(4, 4)
    write_shard(tmp_path / NAME, {"a": shards.pending_tensor(tensor), "b": shards.pending_tensor(tensor)}, {})
    loaded = load_file(tmp_path / NAME)
    torch.testing.assert_close(loaded["a"], loaded["b"], rtol=0, atol=0)


def test_pending_copy_copies_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "COPY_BYTES", 7)
    tensors = {"a": torch.randn(5, 3), "b": torch.arange(9)}
    save_file(tensors, tmp_path / "source.safetensors")
    header = read_header(tmp_path / "source.safetensors")
    pending = {name: shards.pending_copy(tmp_path / "source.safetensors", header[name]) for name in ("b", "a")}
    write_shard(tmp_path / NAME, pending, {})
    torch.testing.assert_close(load_file(tmp_path / NAME), tensors, rtol=0, atol=0)
    with safe_open(tmp_path / NAME, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_pending_copy_of_a_file_that_shrank(tmp_path):
    save_file({"a": torch.zeros(100)}, tmp_path / "source.safetensors")
    pending = shards.pending_copy(tmp_path / "source.safetensors", read_header(tmp_path / "source.safetensors")["a"])
    (tmp_path / "source.safetensors").write_bytes(bytes(50))
    with pytest.raises(FileFormatError, match=r"^source.safetensors: ended while a tensor was copied out of it$"):
        write_shard(tmp_path / NAME, {"a": pending}, {})


def test_digests(tmp_path):
    tensor = torch.tensor([1.0, -2.0], dtype=torch.bfloat16)
    assert shards.tensor_sha256(tensor) == hashlib.sha256(bytes.fromhex("803f 00c0")).hexdigest()
    assert shards.tensor_sha256(torch.empty(0)) == hashlib.sha256(b"").hexdigest()
    (tmp_path / "a").write_bytes(b"abc")
    assert shards.file_sha256(tmp_path / "a") == hashlib.sha256(b"abc").hexdigest()
