"""Text from a nested checkpoint: `NestedModel.open(folder).generate(prompt)`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from bitnest_format.architecture import language_config
from bitnest_format.checkpoint import CONFIG_FILE, Checkpoint
from bitnest_format.errors import CheckpointError, GenerationError, UnsupportedModelError, UsageError
from bitnest_format.kernels.ops import triton_ops
from bitnest_format.kernels.reference import DECODE_ROWS
from bitnest_format.kernels.reference_linear import View
from bitnest_format.runtime.adaptive import CANDIDATES, FixedGamma, GammaChooser, GammaPolicy
from bitnest_format.runtime.device import CPU, DeviceChoice, choose_device, warn_once
from bitnest_format.runtime.gpu_decoder import GpuDecoder
from bitnest_format.runtime.gpu_limits import INSTEAD, gpu_obstacles
from bitnest_format.runtime.gpu_loop import GpuLoop
from bitnest_format.runtime.gpu_reader import GpuReader
from bitnest_format.runtime.kv_cache import KvSettings
from bitnest_format.runtime.model import PREFILL_ROWS, Decoder, Unpack
from bitnest_format.runtime.sampling import SamplingSettings, decider
from bitnest_format.runtime.speculative import Counters, SpeculativeLoop
from bitnest_format.runtime.text_reader import Reader, Score, TextReader, score
from bitnest_format.runtime.tokenizer import GrowingText, Message, Tokenizer
from bitnest_format.shards import read_json

GENERATION_CONFIG_FILE = "generation_config.json"
DEFAULT_GAMMA = 4
MAX_GAMMA = DECODE_ROWS - 1

OpenView = Literal["nested", "target", "draft"]
FinishReason = Literal["eos", "stop", "length"]
Gamma = int | Literal["auto"]
Prompt = str | Sequence[int] | Sequence[Message]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationStats:
    """How a run went.

    `acceptance`: accepted drafts / drafted tokens, None where nothing was drafted. `accepted_lengths[i]`: rounds that
    accepted i drafts. `tokens_per_round`: committed tokens / rounds; the first token comes from the prompt's pass and
    belongs to no round. `bytes_per_token`: bytes of planes, scales, head and cache that the rounds must read, by
    `SpeculativeLoop.bytes_of_pass`, per token they committed. `seconds`: wall time; on the CPU of `prefill`, `draft`
    and `verify` (accepting included), on a GPU of `setup` (compiling and capturing what texts before did not need),
    `prefill` and `rounds`. `tokens_per_second` is over `draft` and `verify`, or over `rounds`. On a GPU the last round
    counts whole, with what it committed past the end of the text.
    """

    device: str
    prompt_tokens: int
    new_tokens: int
    gamma: Gamma
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
    base shards alone. `device_choice`: where it decodes, and why not on a GPU. Not thread-safe. Memory: see `Decoder`;
    on a GPU the planes as stored, and the buffers of the last text.
    """

    def __init__(
        self, checkpoint: Checkpoint, decoder: Decoder | GpuDecoder, view: OpenView, choice: DeviceChoice | None = None
    ):
        self.checkpoint = checkpoint
        self.decoder = decoder
        self.view: OpenView = view
        self.device_choice = DeviceChoice(decoder.device) if choice is None else choice
        self.end_ids = _end_ids(checkpoint)
        self._tokenizer: Tokenizer | None = None
        self._round_seconds: dict[KvSettings, dict[int, float]] = {}
        self._readers: dict[View, Reader] = {}

    @classmethod
    def open(
        cls, folder: Path, *, view: OpenView = "nested", unpack: Unpack = "auto", device: torch.device | str = "auto"
    ) -> NestedModel:
        """Read a checkpoint folder.

        `device`: `"auto"` is a GPU where one can be used; `"cpu"`, `"cuda"`, or one GPU, as `"cuda:1"`. Where a GPU was
        asked for, or is there, but cannot be used, a `DeviceWarning` says why and decoding goes to the CPU. `unpack`
        matters on the CPU only; a GPU reads the planes as they are stored.

        Raises `CheckpointError`, `FileFormatError`, `UnsupportedVersionError` or `UnsupportedModelError` saying what
        is missing, broken or unknown, or, where a GPU was named, what its kernels cannot take; `GenerationError` where
        the model does not fit into the GPU's memory; `UsageError` for an unknown view, unpack mode or device.
        """
        _one_of("view", view, ("nested", "target", "draft"))
        _one_of("unpack", unpack, ("auto", "load", "call"))
        choice = choose_device(device)
        checkpoint = Checkpoint(Path(folder), "draft" if view == "draft" else "target")
        if choice.device != CPU:
            choice = _without_obstacles(choice, checkpoint, named=str(device) != "auto")
        warn_once(choice)
        views: tuple[View, ...] = ("draft", "target") if view == "nested" else (view,)
        decoder: Decoder | GpuDecoder
        with torch.inference_mode():
            if choice.device == CPU:
                decoder = Decoder(checkpoint, views, unpack, CPU)
            else:
                decoder = GpuDecoder(checkpoint, view, choice.device, triton_ops())
        return cls(checkpoint, decoder, view, choice)

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
        if isinstance(self.decoder, GpuDecoder):
            return self.decoder.logits(prompt, view)
        ids = torch.tensor(prompt, device=self.decoder.device)
        cache = self.decoder.new_cache()
        pieces = []
        for first in range(0, len(prompt), PREFILL_ROWS):
            hidden = self.decoder.forward(ids[first : first + PREFILL_ROWS], first, cache, view)
            pieces.append(self.decoder.logits(hidden, view))
        return torch.cat(pieces)

    def score(self, context: Sequence[int], continuation: Sequence[int], view: View | None = None) -> Score:
        """How likely a view finds that `continuation` follows `context`; both are token ids, at least one each.

        Together they may be one token longer than the model's context. `view`: by default the target, or the draft
        where that alone was opened. What a context has in common with that of the call before is not computed again;
        no result depends on that. Keeps one cache for each view.

        Raises `GenerationError` for an empty or too long text or an id outside the vocabulary.
        """
        view = view or ("draft" if self.view == "draft" else "target")
        self._check_view(view)
        context, continuation = self._check_ids(context, room=0), list(continuation)
        self._check_ids([*context, *continuation[:-1]], room=0)
        self._check_ids(continuation[-1:], room=0)
        if view not in self._readers:
            decoder = self.decoder
            self._readers[view] = (
                GpuReader(decoder, view) if isinstance(decoder, GpuDecoder) else TextReader(decoder, view)
            )
        return score(self._readers[view].logits(context, continuation), continuation)

    def generate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 256,
        gamma: Gamma | None = None,
        view: OpenView | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        stop: Sequence[str] = (),
        end_ids: Collection[int] = (),
        stream: Callable[[str], None] | None = None,
        chat: bool | None = None,
        kv: KvSettings | None = None,
    ) -> Generation:
        """Continue one prompt.

        `prompt`: a text, token ids, or chat messages (`{"role": ..., "content": ...}`). A text is wrapped into the
        chat template where the checkpoint has one, unless `chat` says otherwise. `gamma`: drafted tokens a round,
        0..15; the checkpoint's suggestion by default; 0 where `view` is not `"nested"`. `"auto"` chooses round by round
        what has paid best of late, and measures first what rounds cost: some twenty rounds of work, on a GPU once for
        its buffers. `view`: any that was opened. `temperature` 0 is greedy and then `"nested"` gives the text of
        `"target"` token for token; above 0 it samples from the same distribution, and a `seed` repeats a text on the
        same device where gamma is fixed. `stop`: strings before which the text ends. `end_ids`: tokens that end it,
        beside those of the checkpoint. `stream` receives the text piece by piece as it becomes certain. It never grows
        past the model's context.

        Raises `GenerationError` for a prompt that cannot be served (empty, a batch, too long, no tokenizer, no memory)
        and `UsageError` for an option out of range.
        """
        view = self._check_options(view or self.view, gamma, max_new_tokens, stop)
        gamma = self._gamma(gamma, view)
        settings = _sampling_settings(temperature, top_k, top_p, seed)
        kv = kv or KvSettings()
        ids = self._check_ids(self._prompt_ids(prompt, chat), room=1)
        limit = min(max_new_tokens, self.decoder.architecture.max_positions - len(ids))
        text = GrowingText(self.tokenizer, stop) if stop or stream is not None or self._has_tokenizer() else None
        decider_view: View = "draft" if view == "draft" else "target"
        entries = len(ids) + limit
        guard = self.decoder.explained(entries) if isinstance(self.decoder, GpuDecoder) else nullcontext()
        with guard:
            loop = self._loop(settings, kv, decider_view, entries)
            ends = self.end_ids.union(end_ids)
            tokens, reason = self._run(loop, ids, lambda: self._policy(gamma, loop, kv), limit, ends, text, stream)
        return Generation(
            text=None if text is None else text.text,
            token_ids=tuple(tokens),
            finish_reason=reason,
            stats=_stats(loop, self.decoder.device, gamma, len(ids), len(tokens)),
        )

    def _loop(self, settings: SamplingSettings, kv: KvSettings, view: View, entries: int) -> SpeculativeLoop | GpuLoop:
        if isinstance(self.decoder, GpuDecoder):
            return self.decoder.loop(settings, kv, view, entries)
        return SpeculativeLoop(self.decoder, decider(settings), kv, view)

    def _policy(self, gamma: Gamma, loop: SpeculativeLoop | GpuLoop, kv: KvSettings) -> GammaPolicy:
        """What chooses the gamma of each round; `loop` has run the prompt."""
        if gamma != "auto":
            return FixedGamma(gamma)
        if isinstance(loop, GpuLoop):
            return GammaChooser(loop.round_seconds(CANDIDATES))
        if kv not in self._round_seconds:
            self._round_seconds[kv] = loop.round_seconds(CANDIDATES)
        return GammaChooser(self._round_seconds[kv])

    def _run(
        self,
        loop: SpeculativeLoop | GpuLoop,
        prompt: list[int],
        policy_of: Callable[[], GammaPolicy],
        limit: int,
        ends: Collection[int],
        text: GrowingText | None,
        stream: Callable[[str], None] | None,
    ) -> tuple[list[int], FinishReason]:
        """Rounds until something ends the text; every committed token is looked at in order."""
        tokens: list[int] = []
        policy: GammaPolicy | None = None
        block = [loop.start(prompt)]
        while True:
            for token in block:
                tokens.append(token)
                reason = _finished(token, len(tokens), limit, ends, text)
                if reason is not None:
                    break
            if text is not None and stream is not None:
                piece = text.fresh(final=reason is not None)
                if piece:
                    stream(piece)
            if reason is not None:
                kept = text.kept if text is not None and text.kept is not None else len(tokens)
                return tokens[:kept], reason
            # Not before the first token is out: this may have something to measure.
            policy = policy or policy_of()
            block = loop.block(block[-1], policy, limit - len(tokens))

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

    def _check_options(self, view: OpenView, gamma: Gamma | None, max_new_tokens: int, stop: Sequence[str]) -> OpenView:
        _one_of("view", view, ("nested", "target", "draft"))
        for needed in ("draft", "target") if view == "nested" else (view,):
            self._check_view(needed)
        _whole("max_new_tokens", max_new_tokens, 1, None)
        if gamma is not None and gamma != "auto":
            _whole("gamma", gamma, 0, MAX_GAMMA, " or 'auto'")
            if gamma and view != "nested":
                raise UsageError(f"gamma is {gamma} but the {view} view alone drafts nothing; use the nested view")
        if isinstance(stop, str) or not all(isinstance(text, str) and text for text in stop):
            raise UsageError(f"stop is {stop!r}, expected a list of strings, none of them empty")
        return view

    def _check_view(self, view: str) -> None:
        if view not in self.decoder.views:
            raise UsageError(f"the {view} view was not opened (view={self.view!r}); open the checkpoint as 'nested'")

    def _gamma(self, gamma: Gamma | None, view: OpenView) -> Gamma:
        if view != "nested":
            return 0
        if gamma is not None:
            return gamma
        suggested = self.checkpoint.manifest.speculation.get("gamma", DEFAULT_GAMMA)
        return min(int(suggested), MAX_GAMMA)


def _finished(
    token: int, count: int, limit: int, ends: Collection[int], text: GrowingText | None
) -> FinishReason | None:
    stopped = text.add(token) if text is not None else False
    if stopped:
        return "stop"
    if token in ends:
        return "eos"
    return "length" if count == limit else None


def _end_ids(checkpoint: Checkpoint) -> frozenset[int]:
    """Every token that ends a text: those of config.json and generation_config.json, one id or a list in each.

    In config.json that is the language model's own where it is nested, and the whole model's.
    """
    sources: list[tuple[str, Any]] = [
        (CONFIG_FILE, checkpoint.config),
        (CONFIG_FILE, language_config(checkpoint.config)),
    ]
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


def _stats(
    loop: SpeculativeLoop | GpuLoop, device: torch.device, gamma: Gamma, prompt_tokens: int, new_tokens: int
) -> GenerationStats:
    counters: Counters = loop.counters
    committed = counters.accepted + counters.rounds
    seconds = sum(spent for name, spent in counters.seconds.items() if name not in ("setup", "prefill"))
    return GenerationStats(
        device=str(device),
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
        cache_bytes=loop.cache_bytes(),
    )


def _sampling_settings(temperature: float, top_k: int | None, top_p: float | None, seed: int) -> SamplingSettings:
    if not 0 <= temperature < float("inf"):
        raise UsageError(f"temperature is {temperature}, expected 0 (greedy) or a positive number")
    if top_k is not None:
        _whole("top_k", top_k, 1, None)
    if top_p is not None and not 0 < top_p <= 1:
        raise UsageError(f"top_p is {top_p}, expected a number above 0 and at most 1")
    return SamplingSettings(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)


def _whole(name: str, value: object, least: int, most: int | None, otherwise: str = "") -> None:
    fits = isinstance(value, int) and not isinstance(value, bool) and value >= least
    if not fits or (most is not None and isinstance(value, int) and value > most):
        allowed = f"{least} or more" if most is None else f"{least} to {most}"
        raise UsageError(f"{name} is {value!r}, expected a whole number, {allowed}{otherwise}")


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(f"{name} is {value!r}, expected one of {', '.join(allowed)}")


def _without_obstacles(choice: DeviceChoice, checkpoint: Checkpoint, *, named: bool) -> DeviceChoice:
    """The CPU, with the reasons, where the GPU kernels cannot run a checkpoint.

    Raises `UnsupportedModelError` where the GPU was named.
    """
    obstacles = gpu_obstacles(checkpoint.architecture(), checkpoint)
    if not obstacles:
        return choice
    if named:
        raise UnsupportedModelError(obstacles)
    return DeviceChoice(CPU, "; ".join(obstacle.removesuffix(f". {INSTEAD}") for obstacle in obstacles))
