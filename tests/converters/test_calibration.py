"""Where calibration tokens come from, and what is said where none can be had."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bitnest_format.converters import calibration
from bitnest_format.converters.calibration import load_calibration
from bitnest_format.errors import SourceError, UsageError
from bitnest_format.shards import tensor_sha256


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A folder with a tokenizer of one token a character: its code point, up to 255."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {chr(code): code for code in range(256)}
    built = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    built.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=built, unk_token="?").save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def _load(source: str | Path, tokenizer: Path, samples: int = 2, length: int = 4, vocabulary: int = 256) -> list[str]:
    loaded = load_calibration(str(source), tokenizer, samples=samples, sequence_length=length, vocab_size=vocabulary)
    assert loaded.input_ids.dtype == torch.int64
    return ["".join(map(chr, row)) for row in loaded.input_ids.tolist()]


def test_text_is_cut_into_sequences_in_order(tmp_path: Path, tokenizer: Path) -> None:
    path = tmp_path / "some.txt"
    path.write_text("abcdefghijk", encoding="utf-8")
    assert _load(path, tokenizer) == ["abcd", "efgh"]
    # Fewer tokens than asked for are taken as they come.
    assert _load(path, tokenizer, samples=9, length=5) == ["abcde", "fghij"]


def test_a_dataset_of_the_hub_is_recorded(tmp_path: Path, tokenizer: Path) -> None:
    """For the model card: a file in the Hub's cache says which dataset it belongs to, another file does not."""
    path = tmp_path / "datasets--owner--the-chat" / "snapshots" / "0123" / "train.txt"
    path.parent.mkdir(parents=True)
    path.write_text("abcdefgh", encoding="utf-8")
    loaded = load_calibration(str(path), tokenizer, samples=1, sequence_length=4, vocab_size=256)
    assert (loaded.record()["description"], loaded.record()["dataset"]) == ("file train.txt", "owner/the-chat")
    copy = tmp_path / "train.txt"
    copy.write_text("abcdefgh", encoding="utf-8")
    loaded = load_calibration(str(copy), tokenizer, samples=1, sequence_length=4, vocab_size=256)
    assert "dataset" not in loaded.record()


def test_documents_are_joined_by_newlines(tmp_path: Path, tokenizer: Path) -> None:
    records = [{"text": "ab"}, "cd", {"content": "e"}, {"messages": [{"role": "user", "content": "f"}, {"value": "g"}]}]
    lines = tmp_path / "some.jsonl"
    lines.write_text("\n\n".join(map(json.dumps, records)) + "\n", encoding="utf-8")
    listed = tmp_path / "some.json"
    listed.write_text(json.dumps(records), encoding="utf-8")
    for path in (lines, listed):
        assert _load(path, tokenizer, samples=1, length=11) == ["ab\ncd\ne\nf\ng"]


def test_line_separators_inside_strings_do_not_split_records(tmp_path: Path, tokenizer: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text('{"text": "a\x85bc"}\n', encoding="utf-8")
    assert _load(path, tokenizer, samples=1) == ["a\x85bc"]


def test_parquet(tmp_path: Path, tokenizer: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": ["abcd", "ef"]}), tmp_path / "some.parquet")
    assert _load(tmp_path / "some.parquet", tokenizer, samples=1, length=7) == ["abcd\nef"]


def test_parquet_without_pyarrow(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "some.parquet").write_bytes(b"PAR1")
    with pytest.raises(UsageError, match=r"reading Parquet needs pyarrow: pip install 'bitnest-format\[parquet\]'"):
        _load(tmp_path / "some.parquet", tokenizer)


def test_token_ids_are_taken_as_they_are(tmp_path: Path, tokenizer: Path) -> None:
    ids = torch.arange(40).view(4, 10)
    save_file({"input_ids": ids.int()}, tmp_path / "ids.safetensors")
    loaded = load_calibration(
        str(tmp_path / "ids.safetensors"), tmp_path / "no-tokenizer", samples=3, sequence_length=8, vocab_size=64
    )
    assert torch.equal(loaded.input_ids, ids[:3, :8])
    assert loaded.record() == {
        "description": "token ids from ids.safetensors",
        "tokens": 24,
        "sequence_length": 8,
        "sha256": tensor_sha256(ids[:3, :8].contiguous()),
    }


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.txt", None, "--calibration {path}: no such file"),
        ("short.txt", "abc", "--calibration {path}: 3 tokens do not fill one sequence of 4; give more text or a smaller"
         " --sequence-length"),
        ("bad.txt", b"\xff\xfe\x00", "{path}: is not UTF-8 text (invalid start byte at byte 0); give .txt, .jsonl, "
         ".json, .parquet or .safetensors"),
        ("bad.jsonl", '{"text": "a"}\n{"text"', "{path}: line 2 is not valid JSON (Expecting ':' delimiter: line 1 "
         "column 8 (char 7))"),
        ("bad.json", "[1,", "{path}: is not valid JSON (Expecting value: line 1 column 4 (char 3))"),
        ("odd.jsonl", '{"score": 1}', "{path}: record 1 has no text: found score, expected one of text, content, "
         "prompt, instruction, value, body, or messages"),
    ],
)  # fmt: skip
def test_unusable_texts(name: str, content: str | bytes | None, message: str, tmp_path: Path, tokenizer: Path) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
    with pytest.raises(SourceError) as error:
        _load(path, tokenizer)
    assert str(error.value) == message.format(path=path)


def test_unusable_token_ids(tmp_path: Path, tokenizer: Path) -> None:
    path = tmp_path / "ids.safetensors"
    save_file({"input_ids": torch.zeros(3, 3)}, path)
    with pytest.raises(SourceError) as error:
        _load(path, tokenizer)
    assert str(error.value) == (f"{path}: input_ids is torch.float32 [3, 3], expected integers [N, T] with T >= 4")
    save_file({"input_ids": torch.full((2, 4), 300)}, path)
    with pytest.raises(SourceError) as error:
        _load(path, tokenizer)
    assert str(error.value) == f"--calibration {path}: token ids 300..300, expected 0..255"
    save_file({"other": torch.zeros(2, 4)}, path)
    with pytest.raises(SourceError, match="holds no readable tensor input_ids"):
        _load(path, tokenizer)


def test_builtin_text_is_plain_and_large_enough(tokenizer: Path) -> None:
    text = next(calibration._documents("builtin", 1))
    assert text.isascii() and "\r" not in text and text.endswith("\n")
    loaded = load_calibration("builtin", tokenizer, samples=4, sequence_length=512, vocab_size=256)
    assert loaded.input_ids.shape == (4, 512)
    assert loaded.description == "built-in public-domain text"
