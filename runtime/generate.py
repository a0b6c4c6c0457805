"""Text from a nested checkpoint: `NestedModel.open(folder).generate(prompt)`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from bitnest_format.checkpoint import CONFIG_FILE, Checkpoint
from bitnest_format.errors import CheckpointError, GenerationError, UsageError
from bitnest_format.kernels.reference import DECODE_ROWS
from bitnest_format.kernels.reference_linear import View
from bitnest_format.runtime.kv_cache import KvSettings
from bitnest_format.runtime.model import PREFILL_ROWS, Decoder, Unpack
from bitnest_format.runtime.sampling import SamplingSettings, decider
from bitnest_format.runtime.speculative import Counters, SpeculativeLoop
from bitnest_format.runtime.tokenizer import GrowingText, Message, Tokenizer
from bitnest_format.shards import read_json

GENERATION_CONFIG_FILE = "generation_config.json"
DEFAULT_GAMMA = 4
MAX_GAMMA = DECODE_ROWS - 1

OpenView = Literal["nested", "target", "draft"]
FinishReason = Literal["eos", "stop", "length"]
Prompt = str | Sequence[int] | Sequence[Message]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationStats:
    """How a run went.

    `acceptance`: accepted drafts / drafted tokens, None where nothing was drafted. `accepted_lengths[i]`: rounds that
    accepted i drafts. `tokens_per_round`: committed tokens / rounds; the first token comes from the prompt's pass and
    belongs to no round. `bytes_per_token`: bytes of planes, scales, head and cache that the rounds must read, by
    `SpeculativeLoop.bytes_of_pass`, per token they committed. `seconds`: wall time of `prefill`, `draft` and `verify`
    (accepting included), `tokens_per_second` over the last two.
    """

    prompt_tokens: int
    new_tokens: int
    gamma: int
    rounds: int
    drafted: int
    accepted: int
    acceptance: float | None
    accepted_lengths: tuple[int, ...]
    tokens_per_round: float | None
    bytes_per_token: float | None
    tokens_per_second: float | None
    seconds: Mapping[str, float]
    cache_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {**fields, "accepted_lengths": list(self.accepted_lengths), "seconds": dict(self.seconds)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What was generated.

    `token_ids`: the new tokens; an end-of-text token that ended them is the last. `text`: their text without special
    tokens, None where the checkpoint has no tokenizer. After a stop string, `text` ends right before it and
    `token_ids` are the tokens that lie wholly inside `text`. `finish_reason`: `"eos"`, `"stop"`, or `"length"` (the
    asked-for length or the end of the context).
    """

    text: str | None
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stats: GenerationStats


class NestedModel:
    """A checkpoint opened for generating.

    `view="nested"` holds both views and decodes speculatively, `"target"` and `"draft"` hold one; a draft needs the
    base shards alone. Not thread-safe. Memory: see `Decoder`.
    """

    def __init__(self, checkpoint: Checkpoint, decoder: Decoder, view: OpenView):
        self.checkpoint = checkpoint
        self.decoder = decoder
        self.view: OpenView = view
        self.end_ids = _end_ids(checkpoint)
        self._tokenizer: Tokenizer | None = None

    @classmethod
    def open(
        cls, folder: Path, *, view: OpenView = "nested", unpack: Unpack = "auto", device: torch.device | str = "cpu"
    ) -> NestedModel:
        """Read a checkpoint folder.

        Raises `CheckpointError`, `FileFormatError`, `UnsupportedVersionError` or `UnsupportedModelError` saying what
        is missing, broken or unknown, `UsageError` for an unknown view, unpack mode or device.
        """
        _one_of("view", view, ("nested", "target", "draft"))
        _one_of("unpack", unpack, ("auto", "load", "call"))
        checkpoint = Checkpoint(Path(folder), "draft" if view == "draft" else "target")
        views: tuple[View, ...] = ("draft", "target") if view == "nested" else (view,)
        with torch.inference_mode():
            return cls(checkpoint, Decoder(checkpoint, views, unpack, _device(device)), view)

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer. Raises `GenerationError` naming what is missing or broken."""
        if self._tokenizer is None:
            self._tokenizer = Tokenizer(self.checkpoint.folder)
        return self._tokenizer

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int], view: View = "target") -> Tensor:
        """Teacher-forced logits of every position: float32 `[T, V]`, through INT8 activations and the KV8 cache.

        Raises `GenerationError` for an empty or too long text or an id outside the vocabulary.
        """
        self._check_view(view)
        prompt = self._check_ids(token_ids, room=0)
        ids = torch.tensor(prompt, device=self.decoder.device)
        cache = self.decoder.new_cache()
        pieces = []
        for first in range(0, len(prompt), PREFILL_ROWS):
            hidden = self.decoder.forward(ids[first : first + PREFILL_ROWS], first, cache, view)
            pieces.append(self.decoder.logits(hidden, view))
        return torch.cat(pieces)

    def generate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 256,
        gamma: int | None = None,
        view: OpenView | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        stop: Sequence[str] = (),
        stream: Callable[[str], None] | None = None,
        chat: bool | None = None,
        kv: KvSettings | None = None,
    ) -> Generation:
        """Continue one prompt.

        `prompt`: a text, token ids, or chat messages (`{"role": ..., "content": ...}`). A text is wrapped into the
        chat template where the checkpoint has one, unless `chat` says otherwise. `gamma`: drafted tokens a round,
        0..15; the checkpoint's suggestion by default; 0 where `view` is not `"nested"`. `view`: any that was opened.
        `temperature` 0 is greedy and then `"nested"` gives the text of `"target"` token for token; above 0 it samples
        from the same distribution. `stop`: strings before which the text ends. `stream` receives the text piece by
        piece as it becomes certain. The text never grows past the model's context.

        Raises `GenerationError` for a prompt that cannot be served (empty, a batch, too long, no tokenizer) and
        `UsageError` for an option out of range.
        """
        view = self._check_options(view or self.view, gamma, max_new_tokens, stop)
        gamma = self._gamma(gamma, view)
        settings = _sampling_settings(temperature, top_k, top_p, seed)
        ids = self._check_ids(self._prompt_ids(prompt, chat), room=1)
        limit = min(max_new_tokens, self.decoder.architecture.max_positions - len(ids))
        text = GrowingText(self.tokenizer, stop) if stop or stream is not None or self._has_tokenizer() else None
        loop = SpeculativeLoop(
            self.decoder, decider(settings), kv or KvSettings(), "draft" if view == "draft" else "target"
        )
        tokens, reason = self._run(loop, ids, gamma, limit, text, stream)
        return Generation(
            text=None if text is None else text.text,
            token_ids=tuple(tokens),
            finish_reason=reason,
            stats=_stats(loop, gamma, len(ids), len(tokens)),
        )

    def _run(
        self,
        loop: SpeculativeLoop,
        prompt: list[int],
        gamma: int,
        limit: int,
        text: GrowingText | None,
        stream: Callable[[str], None] | None,
    ) -> tuple[list[int], FinishReason]:
        """Rounds until something ends the text; every committed token is looked at in order."""
        tokens: list[int] = []
        block = [loop.start(prompt)]
        while True:
            for token in block:
                tokens.append(token)
                reason = self._finished(token, len(tokens), limit, text)
                if reason is not None:
                    break
            if text is not None and stream is not None:
                piece = text.fresh(final=reason is not None)
                if piece:
                    stream(piece)
            if reason is not None:
                kept = text.kept if text is not None and text.kept is not None else len(tokens)
                return tokens[:kept], reason
            # A round may commit one token more than it drafts; none may lie past the limit.
            block = loop.round(block[-1], min(gamma, limit - len(tokens) - 1))

    def _finished(self, token: int, count: int, limit: int, text: GrowingText | None) -> FinishReason | None:
        stopped = text.add(token) if text is not None else False
        if stopped:
            return "stop"
        if token in self.end_ids:
            return "eos"
        return "length" if count == limit else None

    def _has_tokenizer(self) -> bool:
        try:
            return self.tokenizer is not None
        except GenerationError:
            return False

    def _prompt_ids(self, prompt: Any, chat: bool | None) -> list[int]:
        if isinstance(prompt, str):
            if chat is None:
                chat = self.tokenizer.has_chat_template
            if chat:
                return self.tokenizer.encode_chat([{"role": "user", "content": prompt}])
            return self.tokenizer.encode(prompt)
        entries = prompt.tolist() if isinstance(prompt, Tensor) else list(prompt)
        if any(isinstance(entry, str | list | tuple | Tensor) for entry in entries):
            raise GenerationError(
                f"the prompt is a batch of {len(entries)}; one prompt at a time can be decoded. Call generate for each."
            )
        if entries and all(isinstance(entry, Mapping) for entry in entries):
            return self.tokenizer.encode_chat(entries)
        return entries

    def _check_ids(self, ids: Sequence[int], room: int) -> list[int]:
        vocabulary, context = self.decoder.architecture.vocab_size, self.decoder.architecture.max_positions
        if not ids:
            raise GenerationError("the prompt is empty: at least one token is needed")
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocabulary:
                raise GenerationError(f"the prompt holds {token!r}, expected token ids of 0 to {vocabulary - 1}")
        if len(ids) + room > context:
            raise GenerationError(
                f"the prompt has {len(ids)} tokens, the model's context holds {context}"
                + (", the first new one included" if room else "")
                + ". Shorten it."
            )
        return list(ids)

    def _check_options(self, view: OpenView, gamma: int | None, max_new_tokens: int, stop: Sequence[str]) -> OpenView:
        _one_of("view", view, ("nested", "target", "draft"))
        for needed in ("draft", "target") if view == "nested" else (view,):
            self._check_view(needed)
        _whole("max_new_tokens", max_new_tokens, 1, None)
        if gamma is not None:
            _whole("gamma", gamma, 0, MAX_GAMMA)
            if gamma and view != "nested":
                raise UsageError(f"gamma is {gamma} but the {view} view alone drafts nothing; use the nested view")
        if isinstance(stop, str) or not all(isinstance(text, str) and text for text in stop):
            raise UsageError(f"stop is {stop!r}, expected a list of strings, none of them empty")
        return view

    def _check_view(self, view: str) -> None:
        if view not in self.decoder.views:
            raise UsageError(f"the {view} view was not opened (view={self.view!r}); open the checkpoint as 'nested'")

    def _gamma(self, gamma: int | None, view: OpenView) -> int:
        if view != "nested":
            return 0
        if gamma is not None:
            return gamma
        suggested = self.checkpoint.manifest.speculation.get("gamma", DEFAULT_GAMMA)
        return min(int(suggested), MAX_GAMMA)


def _end_ids(checkpoint: Checkpoint) -> frozenset[int]:
    """Every token that ends a text: those of config.json and generation_config.json, one id or a list in each."""
    sources: list[tuple[str, Any]] = [(CONFIG_FILE, checkpoint.config)]
    path = checkpoint.folder / GENERATION_CONFIG_FILE
    if path.is_file():
        sources.append((GENERATION_CONFIG_FILE, read_json(path)))
    ids: set[int] = set()
    for name, document in sources:
        found = document.get("eos_token_id") if isinstance(document, Mapping) else None
        entries = found if isinstance(found, list) else [found]
        for entry in entries:
            if entry is None:
                continue
            if isinstance(entry, bool) or not isinstance(entry, int):
                raise CheckpointError(f"{name}: eos_token_id is {found!r}, expected a token id or a list of them")
            ids.add(entry)
    return frozenset(ids)


def _stats(loop: SpeculativeLoop, gamma: int, prompt_tokens: int, new_tokens: int) -> GenerationStats:
    counters: Counters = loop.counters
    committed = counters.accepted + counters.rounds
    seconds = counters.seconds["draft"] + counters.seconds["verify"]
    return GenerationStats(
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        gamma=gamma,
        rounds=counters.rounds,
        drafted=counters.drafted,
        accepted=counters.accepted,
        acceptance=counters.accepted / counters.drafted if counters.drafted else None,
        accepted_lengths=tuple(counters.histogram),
        tokens_per_round=committed / counters.rounds if counters.rounds else None,
        bytes_per_token=counters.bytes_read / committed if counters.rounds else None,
        tokens_per_second=committed / seconds if seconds else None,
        seconds=dict(counters.seconds),
        cache_bytes=loop.cache.memory_bytes(),
    )


def _sampling_settings(temperature: float, top_k: int | None, top_p: float | None, seed: int) -> SamplingSettings:
    if not 0 <= temperature < float("inf"):
        raise UsageError(f"temperature is {temperature}, expected 0 (greedy) or a positive number")
    if top_k is not None:
        _whole("top_k", top_k, 1, None)
    if top_p is not None and not 0 < top_p <= 1:
        raise UsageError(f"top_p is {top_p}, expected a number above 0 and at most 1")
    return SamplingSettings(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)


def _whole(name: str, value: object, least: int, most: int | None) -> None:
    fits = isinstance(value, int) and not isinstance(value, bool) and value >= least
    if not fits or (most is not None and isinstance(value, int) and value > most):
        allowed = f"{least} or more" if most is None else f"{least} to {most}"
        raise UsageError(f"{name} is {value!r}, expected a whole number, {allowed}")


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(f"{name} is {value!r}, expected one of {', '.join(allowed)}")


def _device(device: torch.device | str) -> torch.device:
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise UsageError(f"device is {device!r}, expected 'cpu' or 'cuda'") from error
    if found.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("device is 'cuda', but torch finds no GPU on this machine; use 'cpu'")
    return found
