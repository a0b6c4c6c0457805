"""A `tokenizer.json` from the vocabulary, merges and settings that a GGUF file keeps in its metadata.

Two kinds exist among the covered models. *Byte-level* BPE (`tokenizer.ggml.model` = gpt2: Llama 3, Qwen, SmolLM)
stores its merges; how text is split before merging is only named (`tokenizer.ggml.pre`), so the names are looked up
here. *SentencePiece* BPE (llama: Llama 2, Mistral) stores scores instead of merges: of all neighbours the pair whose
joint token scores highest is merged first, so ordering every possible pair by that score gives the merges.

The result is written, read back and tried before it counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from bitnest_format.shards import write_json

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
SPECIAL_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
SPACE = "\u2581"

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
LLAMA3_SPLIT = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
QWEN2_SPLIT = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"
TEKKEN_SPLIT = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# How text is cut before merging, by `tokenizer.ggml.pre`. None is GPT-2's own rule, DIGITS the same after every digit
# has been set apart.
DIGITS = "digits"
SPLITS: Mapping[str, str | None] = {
    **dict.fromkeys(("gpt-2", "gpt2", "jina-es", "jina-de", "phi-2", "olmo"), None),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral"), LLAMA3_SPLIT),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2"), QWEN2_SPLIT),
    "tekken": TEKKEN_SPLIT,
}
# Vocabularies whose words are looked up whole before they are merged, and that start with BOS unless told otherwise.
WHOLE_WORDS = (LLAMA3_SPLIT, TEKKEN_SPLIT)
COMPOSED = ("qwen2",)

PROBES = ("Hello, world! 12 + 34 = 46", "if x > 0:\n    return {'a': [1, 2]}\n", "Größe 漢字 🙂 naïve")


def write_tokenizer(metadata: Mapping[str, Any], folder: Path) -> tuple[list[str], list[str]]:
    """Write `tokenizer.json` and `tokenizer_config.json` into `folder`.

    Returns the names written and remarks for the user. Where the metadata hold no tokenizer that can be rebuilt,
    nothing is written and a remark says why.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or kind not in ("gpt2", "llama"):
        found = "no vocabulary" if not tokens else f"a tokenizer of the kind {kind!r}"
        return [], [f"its metadata hold {found}, so no tokenizer was written; generating from text will need one"]
    notes = [
        f"tokenizer.ggml.{key}_token_id is {metadata[f'tokenizer.ggml.{key}_token_id']}, beyond the {len(tokens)} "
        "tokens; ignored"
        for name, key in SPECIAL_TOKENS.items()
        if f"tokenizer.ggml.{key}_token_id" in metadata and name not in _special_ids(metadata)
    ]
    try:
        tokenizer = _byte_level(metadata, notes) if kind == "gpt2" else _sentencepiece(metadata)
        _add_tokens(tokenizer, metadata)
        if _adds_bos(metadata):
            _prepend_bos(tokenizer, metadata)
        failure = _first_failure(tokenizer, metadata)
    except (ValueError, TypeError, IndexError, KeyError) as error:
        failure = str(error)
    except Exception as error:  # the tokenizers library raises bare exceptions
        if type(error) is not Exception:
            raise
        failure = str(error)
    if failure:
        return [], [f"its tokenizer could not be rebuilt ({failure}); none was written, generating from text needs one"]
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", _config(metadata))
    return ["tokenizer.json", "tokenizer_config.json"], notes


def _byte_level(metadata: Mapping[str, Any], notes: list[str]) -> Tokenizer:
    name = metadata.get("tokenizer.ggml.pre")
    split = _split(metadata)
    if name not in SPLITS:
        notes.append(
            f"tokenizer.ggml.pre is {'missing' if name is None else f'{name!r}, which is not known here'}; text is "
            "split as GPT-2 does, and token ids may differ from the original tokenizer's"
        )
    merges = [_pair(merge) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=_vocabulary(metadata), merges=merges, ignore_merges=split in WHOLE_WORDS))
    if name in COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    if split is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif split == DIGITS:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(split), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _split(metadata: Mapping[str, Any]) -> str | None:
    return SPLITS.get(str(metadata.get("tokenizer.ggml.pre")))


def _sentencepiece(metadata: Mapping[str, Any]) -> Tokenizer:
    vocabulary = _vocabulary(metadata)
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=merges_from_scores(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]),
            unk_token=metadata["tokenizer.ggml.tokens"][unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    replace = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replace] if prefix else [replace])
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def merges_from_scores(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """Every pair of tokens that joins to a token, the best-scored result first; ties in the order of the vocabulary."""
    ids = {token: index for index, token in enumerate(tokens)}
    pairs = [
        (-scores[index], index, ids[token[:cut]], ids[token[cut:]])
        for token, index in ids.items()
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]
    return [(tokens[left], tokens[right]) for _, _, left, right in sorted(pairs)]


def _vocabulary(metadata: Mapping[str, Any]) -> dict[str, int]:
    """Token to id; of tokens that stand twice the first keeps its name."""
    vocabulary: dict[str, int] = {}
    for index, token in enumerate(metadata["tokenizer.ggml.tokens"]):
        vocabulary.setdefault(token, index)
    return vocabulary


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if not left or not right or " " in right:
        raise ValueError(f"the merge {merge!r} is not a pair of tokens")
    return left, right


def _add_tokens(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> None:
    """Tokens that are matched whole in text: control tokens are special, user-defined ones are not."""
    tokens = metadata["tokenizer.ggml.tokens"]
    kinds = metadata.get("tokenizer.ggml.token_type", [])
    special = {index for index, kind in enumerate(kinds) if kind in (CONTROL, UNKNOWN)}
    special |= set(_special_ids(metadata).values())
    for index, token in enumerate(tokens):
        if index in special and token:
            tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif index < len(kinds) and kinds[index] == USER_DEFINED and token:
            tokenizer.add_tokens([AddedToken(token, normalized=False, special=False)])


def _special_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    """The ids of the special tokens that are named and exist, by the name Hugging Face gives them."""
    count = len(metadata["tokenizer.ggml.tokens"])
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in SPECIAL_TOKENS.items()}
    return {name: index for name, index in ids.items() if isinstance(index, int) and 0 <= index < count}


def _adds_bos(metadata: Mapping[str, Any]) -> bool:
    default = metadata["tokenizer.ggml.model"] == "llama" or _split(metadata) in WHOLE_WORDS
    return bool(metadata.get("tokenizer.ggml.add_bos_token", default)) and "bos_token" in _special_ids(metadata)


def _prepend_bos(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> None:
    index = _special_ids(metadata)["bos_token"]
    bos = metadata["tokenizer.ggml.tokens"][index]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[bos, "$A"], pair=[bos, "$A", f"{bos}:1", "$B:1"], special_tokens=[(bos, index)]
    )


def _first_failure(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> str:
    """Why the tokenizer, as it would be read back, is not the one described; '' where it is."""
    again = Tokenizer.from_str(tokenizer.to_str())
    tokens = metadata["tokenizer.ggml.tokens"]
    if again.get_vocab_size() > len(tokens):
        return f"it has {again.get_vocab_size()} tokens instead of {len(tokens)}"
    for name, index in _special_ids(metadata).items():
        if again.token_to_id(tokens[index]) != tokens.index(tokens[index]):
            return f"its {name} is not token {index}"
    for probe in PROBES:
        ids = again.encode(probe, add_special_tokens=False).ids
        if again.decode(ids, skip_special_tokens=False) != probe and not _lacks_bytes(again, probe):
            return f"{probe!r} does not survive encoding and decoding"
    return ""


def _lacks_bytes(tokenizer: Tokenizer, probe: str) -> bool:
    """Whether the vocabulary itself cannot write the probe: a character, or a byte of it, has no token."""
    vocabulary = tokenizer.get_vocab()
    if tokenizer.model.byte_fallback:
        pieces = {SPACE if character == " " else character for character in probe}
        return any(p not in vocabulary and any(f"<0x{b:02X}>" not in vocabulary for b in p.encode()) for p in pieces)
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(probe)
    return any(character not in vocabulary for piece, _ in split for character in piece)


def _config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{name: tokens[index] for name, index in _special_ids(metadata).items()},
        "add_bos_token": _adds_bos(metadata),
        "clean_up_tokenization_spaces": False,
    }
    context = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    if isinstance(context, int):
        config["model_max_length"] = context
    template = _chat_template(metadata)
    if template:
        config["chat_template"] = template
    return config


def _chat_template(metadata: Mapping[str, Any]) -> str | list[dict[str, str]] | None:
    """One template, or a list of named ones where the file has several."""
    main = "tokenizer.chat_template"
    named = {
        key.removeprefix(f"{main}."): value
        for key, value in metadata.items()
        if key.startswith(f"{main}.") and isinstance(value, str)
    }
    default = metadata.get(main)
    if not named:
        return default if isinstance(default, str) else None
    if isinstance(default, str):
        named = {"default": default, **named}
    return [{"name": name, "template": template} for name, template in named.items()]
