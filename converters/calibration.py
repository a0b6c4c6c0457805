"""Token sequences to calibrate on: from the built-in text, a file of text, JSON Lines, Parquet, or token ids.

The built-in text is made of two public-domain documents (the Declaration of Independence and the Constitution of the
United States) and, between their parts, of questions and answers in prose and code that were written for this project
and are dedicated to the public domain (CC0).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bitnest_format.errors import SourceError, UsageError
from bitnest_format.shards import tensor_sha256

BUILTIN = "builtin"
BUILTIN_FILE = "calibration.txt"
TEXT_FIELDS = ("text", "content", "prompt", "instruction", "value", "body")
TOKENS_NAME = "input_ids"
CHARACTERS_PER_TOKEN = 12


@dataclass(frozen=True, slots=True)
class Calibration:
    """`input_ids` int64 `[N, T]`, and what the manifest says of them; `dataset` is that of the Hub, if it is one."""

    input_ids: Tensor
    description: str
    dataset: str | None = None

    def record(self) -> dict[str, Any]:
        """The manifest's `calibration` entry."""
        return {
            "description": self.description,
            "tokens": self.input_ids.numel(),
            "sequence_length": self.input_ids.shape[1],
            "sha256": tensor_sha256(self.input_ids),
            **({"dataset": self.dataset} if self.dataset else {}),
        }


def load_calibration(
    source: str, tokenizer_folder: Path, *, samples: int, sequence_length: int, vocab_size: int
) -> Calibration:
    """Up to `samples` sequences of `sequence_length` tokens, in the order in which they stand in the source.

    `source` is `builtin` or a path: `.txt`/`.md` is one document, `.jsonl`/`.json` and `.parquet` give a document
    a record (a text field, or a list of chat messages), `.safetensors` holds `input_ids` `[N, T]` as they are.
    Documents are joined by newlines and tokenized without special tokens. Fewer tokens than asked for are taken
    as they come, as long as they fill one sequence.

    Raises `SourceError` naming the file where it cannot be read, holds no text, or fills no sequence.
    """
    path = Path(source)
    if source != BUILTIN and not path.is_file():
        raise SourceError(f"--calibration {source}: no such file")
    if path.suffix == ".safetensors" and source != BUILTIN:
        return _read_token_ids(path, samples, sequence_length, vocab_size)
    wanted = samples * sequence_length
    text = "\n".join(_documents(source, wanted * CHARACTERS_PER_TOKEN))
    ids = _tokenize(text, tokenizer_folder)
    count = min(samples, len(ids) // sequence_length)
    if count == 0:
        raise SourceError(
            f"--calibration {source}: {len(ids)} tokens do not fill one sequence of {sequence_length}; "
            "give more text or a smaller --sequence-length"
        )
    input_ids = torch.tensor(ids[: count * sequence_length]).view(count, sequence_length)
    described = "built-in public-domain text" if source == BUILTIN else f"file {path.name}"
    return Calibration(_checked_ids(input_ids, vocab_size, source), described, _dataset_of(path))


def builtin_text() -> str:
    """The text that comes with the package."""
    return files(__package__).joinpath(BUILTIN_FILE).read_text(encoding="utf-8")


def _documents(source: str, characters: int) -> Iterator[str]:
    """Documents until `characters` have been seen: enough for the tokens that are wanted."""
    if source == BUILTIN:
        yield builtin_text()
        return
    path = Path(source)
    seen = 0
    for document in _READERS.get(path.suffix.lower(), _read_text)(path):
        yield document
        seen += len(document)
        if seen >= characters:
            return


def _read_text(path: Path) -> Iterator[str]:
    try:
        yield path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SourceError(
            f"{path}: is not UTF-8 text ({error.reason} at byte {error.start}); "
            "give .txt, .jsonl, .json, .parquet or .safetensors"
        ) from error


def _read_json(path: Path) -> Iterator[str]:
    text = next(_read_text(path))
    if text.lstrip().startswith("["):
        try:
            records = json.loads(text)
        except ValueError as error:
            raise SourceError(f"{path}: is not valid JSON ({error})") from error
        numbered: Iterable[tuple[int, Any]] = enumerate(records, start=1)
    else:
        numbered = ((n, _json_line(path, n, line)) for n, line in enumerate(text.split("\n"), 1) if line.strip())
    for number, record in numbered:
        yield _record_text(record, f"{path}: record {number}")


def _json_line(path: Path, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise SourceError(f"{path}: line {number} is not valid JSON ({error})") from error


def _read_parquet(path: Path) -> Iterator[str]:
    try:
        from pyarrow import ArrowInvalid, parquet
    except ImportError:
        raise UsageError(f"{path}: reading Parquet needs pyarrow: pip install 'bitnest-format[parquet]'") from None
    try:
        for batch in parquet.ParquetFile(path).iter_batches():
            for number, record in enumerate(batch.to_pylist(), start=1):
                yield _record_text(record, f"{path}: record {number}")
    except (ArrowInvalid, OSError) as error:
        raise SourceError(f"{path}: is not a readable Parquet file ({error})") from error


_READERS = {".jsonl": _read_json, ".json": _read_json, ".parquet": _read_parquet}


def _record_text(record: Any, place: str) -> str:
    if isinstance(record, str):
        return record
    if isinstance(record, dict):
        for field in TEXT_FIELDS:
            if isinstance(record.get(field), str):
                return str(record[field])
        for field in ("messages", "conversations"):
            turns = record.get(field)
            if isinstance(turns, list):
                texts = [turn.get("content", turn.get("value")) for turn in turns if isinstance(turn, dict)]
                return "\n".join(text for text in texts if isinstance(text, str))
    found = ", ".join(map(str, record)) if isinstance(record, dict) else type(record).__name__
    raise SourceError(f"{place} has no text: found {found}, expected one of {', '.join(TEXT_FIELDS)}, or messages")


def _read_token_ids(path: Path, samples: int, sequence_length: int, vocab_size: int) -> Calibration:
    try:
        with safe_open(path, framework="pt") as file:
            ids = file.get_tensor(TOKENS_NAME)
    except (SafetensorError, OSError) as error:
        raise SourceError(f"{path}: holds no readable tensor {TOKENS_NAME} ({error})") from error
    if ids.dim() != 2 or ids.is_floating_point() or ids.shape[1] < sequence_length:
        raise SourceError(
            f"{path}: {TOKENS_NAME} is {ids.dtype} {list(ids.shape)}, expected integers [N, T] with T >= "
            f"{sequence_length}"
        )
    ids = ids[:samples, :sequence_length].long().contiguous()
    return Calibration(_checked_ids(ids, vocab_size, str(path)), f"token ids from {path.name}", _dataset_of(path))


def _dataset_of(path: Path) -> str | None:
    """The Hub dataset whose snapshot in the Hub's cache a file lies in: `datasets--owner--name/snapshots/...`."""
    for folder, inner in zip(path.parts, path.parts[1:], strict=False):
        match = re.fullmatch(r"datasets--([^/]+?)--([^/]+)", folder)
        if match and inner == "snapshots":
            return f"{match[1]}/{match[2]}"
    return None


def _checked_ids(ids: Tensor, vocab_size: int, source: str) -> Tensor:
    if ids.numel() == 0 or int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        found = f"{int(ids.min())}..{int(ids.max())}" if ids.numel() else "none"
        raise SourceError(f"--calibration {source}: token ids {found}, expected 0..{vocab_size - 1}")
    return ids


def _tokenize(text: str, folder: Path) -> list[int]:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise SourceError(
            "the source has no usable tokenizer, so text cannot calibrate it "
            f"({str(error).partition(chr(10))[0]}). Add the tokenizer files, give token ids "
            "(--calibration FILE.safetensors with input_ids), or use --base rtn --refinement closed"
        ) from error
    # One long text is meant here; the tokenizer's warning about its model's window does not apply.
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return [int(token) for token in ids]
