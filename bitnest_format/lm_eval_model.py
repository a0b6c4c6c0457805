"""The model type `bitnest` of lm-evaluation-harness: a nested checkpoint, evaluated on this project's own runtime.

Log-likelihoods are the target's (the draft's for `view="draft"`); generated text is the view's own, by speculative
decoding for `view="nested"`. How contexts and continuations are told apart, how long texts are cut into windows and
answers at stop strings, is as in the harness's own `hf` model, so that numbers of both can stand side by side.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import maybe_truncate, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from bitnest_format import __version__
from bitnest_format.api import load
from bitnest_format.errors import GenerationError, UsageError
from bitnest_format.runtime.speculative import Counters

if TYPE_CHECKING:
    from bitnest_format.runtime.generate import Gamma, OpenView
    from bitnest_format.runtime.model import Unpack

log = logging.getLogger(__name__)

DEFAULT_MAX_GEN_TOKS = 256
# What the harness's command gives where `--device` is left out, on machines without a GPU too.
DEVICE_LEFT_OUT = "cuda:0"
# What a task may ask of a generation. Whatever else would change the text is refused rather than left out.
SAMPLING = ("temperature", "top_k", "top_p")
WITHOUT_EFFECT = {
    "do_sample": None,
    "use_cache": None,
    "num_beams": 1,
    "repetition_penalty": 1.0,
    "num_return_sequences": 1,
}

Tokens = list[int]
ScoreRequest = tuple[tuple[str, str] | None, Tokens, Tokens]


@register_model("bitnest")
class BitnestLM(TemplateLM):  # type: ignore[misc]  # lm_eval is not followed
    """A nested checkpoint as a model of the harness.

    `pretrained`: a folder or a Hub repository id; `revision`, `device`, `unpack`: see `bitnest_format.load`. `view`:
    `"nested"` scores by the target and writes speculatively with `gamma` drafts a round (the text is the target's),
    `"target"` and `"draft"` do both by that view. `max_length`: tokens of context, at most and by default the model's
    own. `max_gen_toks`: new tokens where a task does not say. `prefix_token_id`: what stands before a text without a
    context, by default the tokenizer's begin-of-text token or else its end-of-text token. `add_bos_token`: whether
    texts begin with it, by default as the tokenizer has it. `enable_thinking`, `chat_template_args`: arguments of the
    chat template. `think_end_token`: a string up to which an answer is dropped. `seed`: of the first sampled text; each
    further one has the next. `batch_size`: texts are computed one by one, whatever it is; what they begin with alike
    is computed once.

    Raises what `bitnest_format.load` raises, and `UsageError` for an argument out of range.
    """

    def __init__(
        self,
        pretrained: str,
        *,
        view: OpenView = "nested",
        revision: str | None = None,
        device: str | None = None,
        unpack: Unpack = "auto",
        gamma: Gamma | None = None,
        max_length: int | None = None,
        max_gen_toks: int = DEFAULT_MAX_GEN_TOKS,
        prefix_token_id: int | None = None,
        add_bos_token: bool | None = None,
        enable_thinking: bool | None = None,
        chat_template_args: Mapping[str, Any] | None = None,
        think_end_token: str | None = None,
        seed: int = 0,
        batch_size: int | str | None = 1,
        max_batch_size: int | None = None,
    ):
        super().__init__()
        if str(batch_size) not in ("1", "None") and not str(batch_size).startswith("auto"):
            log.warning("batch_size is %s; texts are computed one by one, with the same results", batch_size)
        self.pretrained, self.revision, self.view = pretrained, revision, view
        device = "auto" if device in (None, DEVICE_LEFT_OUT) else device
        self.model = load(pretrained, view=view, revision=revision, device=device, unpack=unpack)
        self._device = self.model.device_choice.device
        self.gamma = gamma
        self.tokenizer = self.model.tokenizer.pretrained
        self.max_length = _max_length(max_length, self.model.decoder.architecture.max_positions)
        self.max_gen_toks = max_gen_toks
        self._prefix_token_id = prefix_token_id
        self.add_bos_token = add_bos_token
        self.chat_template_args = dict(chat_template_args or {})
        if enable_thinking is not None:
            self.chat_template_args["enable_thinking"] = enable_thinking
        self.think_end_token = think_end_token
        self.seed = seed
        self.counters = Counters()
        self._special_ids = {
            token.content: number for number, token in self.tokenizer.added_tokens_decoder.items() if token.special
        }

    @property
    def batch_size(self) -> int:
        """1: texts are computed one by one."""
        return 1

    @property
    def eot_token_id(self) -> int:
        """The tokenizer's end-of-text token."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without a context."""
        if self._prefix_token_id is not None:
            return self._prefix_token_id
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else int(begin)

    @property
    def tokenizer_name(self) -> str:
        """Names the harness's cache of requests."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> Tokens:
        """Token ids of a text; nothing is put in front of one that begins with the prefix token already."""
        special = self.add_bos_token if add_special_tokens is None else add_special_tokens
        if add_special_tokens is None and string.startswith(self.tokenizer.decode([self.prefix_token_id])):
            special = False
        options = {} if special is None else {"add_special_tokens": special}
        return [int(token) for token in self.tokenizer(string, verbose=False, **options)["input_ids"]]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation. Raises `GenerationError` where there is no template or it refuses it."""
        return self.model.tokenizer.chat_text(
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
            **self.chat_template_args,
        )

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Of whole texts, each after the prefix token, in windows of `max_length` that score every token once."""
        windows: list[ScoreRequest] = []
        owners: list[int] = []
        texts = [request.args[0] for request in requests]
        for number, text in enumerate(texts):
            rolling = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for window in map(make_disjoint_window, rolling):
                windows.append((None, *window))
                owners.append(number)
        totals = [0.0] * len(texts)
        for number, (logprob, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            totals[number] += logprob
        for text, total in zip(texts, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return totals

    def _loglikelihood_tokens(
        self, requests: Sequence[ScoreRequest], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """(log-probability, would greedy decoding write it) of each continuation, in the order of the requests."""
        found: dict[int, tuple[float, bool]] = {}
        # Next to each other what begins alike: the model reads that once.
        order = sorted(range(len(requests)), key=lambda number: requests[number][1])
        for number in tqdm(order, disable=disable_tqdm, desc="Running loglikelihood requests"):
            text, context, continuation = requests[number]
            found[number] = self._score(context, continuation)
            if text is not None:
                self.cache_hook.add_partial("loglikelihood", text, found[number])
        return [found[number] for number in range(len(requests))]

    def _score(self, context: Tokens, continuation: Tokens) -> tuple[float, bool]:
        if not continuation:
            return 0.0, True
        if len(continuation) > self.max_length:
            raise GenerationError(
                f"{self.pretrained}: a continuation has {len(continuation)} tokens, max_length is {self.max_length}. "
                "Score it as a rolling log-likelihood, or raise max_length."
            )
        excess = len(context) + len(continuation) - self.max_length - 1
        if excess > 0:
            log.warning("a context of %d tokens is cut by %d from the left", len(context), excess)
            context = context[excess:]
        score = self.model.score(context, continuation)
        return score.logprob, score.greedy

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The text that follows each context, up to a stop string or the end-of-text token."""
        answers = []
        for request in tqdm(requests, disable=disable_tqdm, desc="Running generate_until requests"):
            context, options = request.args[:2]
            answers.append(self._generate(context, options))
            self.cache_hook.add_partial("generate_until", (context, options), answers[-1])
        if self.counters.drafted:
            log.info("%s", self._speculation())
        return answers

    def _generate(self, context: str, options: Mapping[str, Any]) -> str:
        settings = dict(normalize_gen_kwargs(dict(options), self.max_gen_toks))
        stops = [stop for stop in settings.pop("until") if stop]
        limit = settings.pop("max_gen_toks")
        sampling = _sampling(settings)
        if not 0 < limit < self.max_length:
            raise UsageError(f"max_gen_toks is {limit}, expected 1 to {self.max_length - 1}: less than max_length")
        ids, limit = maybe_truncate(self.tok_encode(context) or [self.prefix_token_id], limit, self.max_length)
        if sampling:
            sampling["seed"], self.seed = self.seed, self.seed + 1
        answer = self.model.generate(
            ids,
            max_new_tokens=limit,
            gamma=self.gamma,
            # Special tokens are no part of the text, so they stop it as tokens.
            stop=[stop for stop in stops if stop not in self._special_ids],
            end_ids=[self.eot_token_id, *(self._special_ids[stop] for stop in stops if stop in self._special_ids)],
            **sampling,
        )
        self.counters.rounds += answer.stats.rounds
        self.counters.drafted += answer.stats.drafted
        self.counters.accepted += answer.stats.accepted
        assert answer.text is not None
        return str(postprocess_generated_text(answer.text, stops, self.think_end_token))

    def get_model_info(self) -> dict[str, Any]:
        """For the results: what was evaluated, by what, and what speculation did."""
        manifest = self.model.checkpoint.manifest
        return {
            "model_view": self.view,
            "model_revision": self.revision,
            "model_device": str(self._device),
            "model_source": dict(manifest.source),
            "bitnest_format_version": __version__,
            **self._speculation(),
        }

    def _speculation(self) -> dict[str, float]:
        """Accepted drafts over all drafted tokens, and committed tokens a round, of every text so far."""
        counters = self.counters
        if not counters.drafted:
            return {}
        return {
            "acceptance": counters.accepted / counters.drafted,
            "tokens_per_round": 1 + counters.accepted / counters.rounds,
        }


def _max_length(wanted: int | None, most: int) -> int:
    if wanted is None:
        return most
    if not 1 < wanted <= most:
        raise UsageError(f"max_length is {wanted}, expected 2 to {most}, the model's own context")
    return wanted


def _sampling(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `NestedModel.generate` that a task's settings come to; none where they say greedy.

    Raises `UsageError` naming every setting that the runtime does not have.
    """
    unknown = [
        f"{name}={value!r}"
        for name, value in settings.items()
        if name not in SAMPLING and (name not in WITHOUT_EFFECT or WITHOUT_EFFECT[name] not in (None, value))
    ]
    if unknown:
        raise UsageError(
            f"generation settings {', '.join(unknown)}: the runtime knows do_sample, {', '.join(SAMPLING)}, until and "
            "max_gen_toks. Leave them out, or evaluate with --model hf."
        )
    if not settings.get("temperature", 0.0):
        return {}
    top_k = settings.get("top_k")
    return {
        "temperature": float(settings["temperature"]),
        # 0 and -1 are how other runtimes say all of them.
        "top_k": int(top_k) if top_k is not None and int(top_k) > 0 else None,
        "top_p": settings.get("top_p"),
    }
