"""Checkpoints with a known text, and a tokenizer of single characters."""

from __future__ import annotations

import json
import math
import string
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file, save_file

from bitnest_format.checkpoint import Checkpoint
from bitnest_format.kernels.ops import plain_ops
from bitnest_format.runtime.generate import NestedModel, OpenView
from bitnest_format.runtime.gpu_decoder import GpuDecoder
from bitnest_format.runtime.model import Decoder
from bitnest_format.runtime.text_reader import Score

CODE_ZERO = -0x77777778  # eight nibbles of 8, as int32


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is allocated but not written holds NaN, or 0xA5 in every byte of an integer."""
    allocate = torch.empty

    def empty(*args: object, **options: object) -> torch.Tensor:
        tensor = allocate(*args, **options)
        if tensor.is_floating_point():
            return tensor.fill_(float("nan"))
        tensor.view(torch.uint8).fill_(0xA5) if tensor.numel() and tensor.dim() else None
        return tensor

    monkeypatch.setattr(torch, "empty", empty)


@pytest.fixture
def edit_shard() -> Callable[..., None]:
    """`(folder, family, edit)`: pass the tensors of the `base` or `refinement` shard to `edit`, then store them."""
    return _edit_shard


def _edit_shard(folder: Path, family: str, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    (path,) = folder.glob(f"bitnest-{family}-*.safetensors")
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.fixture
def chain_checkpoint(tmp_path: Path, tiny_checkpoint: Callable[..., Path]) -> Callable[..., Path]:
    """`(text, **config_changes)`: a checkpoint that continues each character of `text` with the next one.

    Its layers add nothing to the residual stream; the head answers token `text[i]` with `text[i + 1]`, and the last
    one with itself. Characters must be distinct. Token ids are those of `toy_tokenizer`, which is put beside it.
    """

    def make(text: str, **config_changes: object) -> Path:
        assert len(set(text)) == len(text)
        folder = tiny_checkpoint(tmp_path / f"chain-{len(list(tmp_path.iterdir()))}", **config_changes)
        ids = toy_ids(text)

        def edit(tensors: dict[str, torch.Tensor]) -> None:
            for name, tensor in tensors.items():
                if name.endswith(("o_proj.weight_packed", "down_proj.weight_packed")):
                    tensor.fill_(CODE_ZERO)
            generator = torch.Generator().manual_seed(1)
            rows = torch.randint(0, 2, (320, 256), generator=generator).float() * 2 - 1
            tensors["model.embed_tokens.weight"] = rows
            tensors["model.norm.weight"] = torch.ones(256)
            head = torch.zeros(320, 256)
            for place, token in enumerate(ids):
                head[ids[min(place + 1, len(ids) - 1)]] += rows[token]
            tensors["lm_head.weight"] = head

        def edit_refinement(tensors: dict[str, torch.Tensor]) -> None:
            for name, tensor in tensors.items():
                if name.endswith(("o_proj.weight_refinement", "down_proj.weight_refinement")):
                    tensor.fill_(CODE_ZERO)

        _edit_shard(folder, "base", edit)
        _edit_shard(folder, "refinement", edit_refinement)
        write_toy_tokenizer(folder)
        return folder

    return make


@pytest.fixture
def toy_tokenizer() -> Callable[..., None]:
    """`(folder, template=None, bos=False)`: put a tokenizer of single characters into a folder."""
    return write_toy_tokenizer


@pytest.fixture
def toy_ids_of() -> Callable[[str], list[int]]:
    """The toy tokenizer's ids of a text."""
    return toy_ids


CHARACTERS = string.ascii_letters + string.digits + string.punctuation + " "
FIRST_CHARACTER = 3


def toy_ids(text: str) -> list[int]:
    return [FIRST_CHARACTER + CHARACTERS.index(character) for character in text]


def write_toy_tokenizer(
    folder: Path, template: str | None = None, bos: bool = False, pieces: Sequence[str] = ()
) -> None:
    """`pieces`: longer tokens, which get the ids after the characters; only decoding knows them."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocabulary |= {character: FIRST_CHARACTER + place for place, character in enumerate(CHARACTERS)}
    vocabulary |= {piece: FIRST_CHARACTER + len(CHARACTERS) + place for place, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "clean_up_tokenization_spaces": False,
    }
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


@pytest.fixture
def token_by_token() -> Callable[..., Score]:
    """`(model, context, continuation, view)`: a continuation's score, each of its tokens in a pass of its own."""
    return score_token_by_token


@torch.inference_mode()
def score_token_by_token(
    model: NestedModel, context: list[int], continuation: list[int], view: Literal["draft", "target"]
) -> Score:
    decoder = model.decoder
    assert isinstance(decoder, Decoder)
    cache = decoder.new_cache()
    rows = [decoder.prefill(torch.tensor(context), cache, view)]
    for place, token in enumerate(continuation[:-1], len(context)):
        rows.append(decoder.logits(decoder.forward(torch.tensor([token]), place, cache, view), view)[0])
    pairs = list(zip(rows, continuation, strict=True))
    logprob = math.fsum(float(row.double().log_softmax(0)[token]) for row, token in pairs)
    return Score(logprob, all(int(row.argmax()) == token for row, token in pairs))


@pytest.fixture
def engine_model() -> Callable[..., NestedModel]:
    """`(folder, view="nested")`: a checkpoint opened as on a GPU, with plain kernels on the CPU."""
    return open_engine_model


def open_engine_model(folder: Path, view: OpenView = "nested") -> NestedModel:
    checkpoint = Checkpoint(folder, "draft" if view == "draft" else "target")
    return NestedModel(checkpoint, GpuDecoder(checkpoint, view, torch.device("cpu"), plain_ops()), view)


@pytest.fixture(params=["decoder", "engine"])
def open_model(request: pytest.FixtureRequest) -> Callable[..., NestedModel]:
    """`(folder, view="nested")`: a checkpoint opened for both ways of decoding, in turns."""
    return NestedModel.open if request.param == "decoder" else open_engine_model
