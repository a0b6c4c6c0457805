"""The model card of a checkpoint: `README.md` as the Hub shows it, written from the manifest. No files, no network.

The card has two parts that are ours: some keys of the YAML front matter, and the text between two markers. All else
belongs to the user and survives the next push: text outside the markers, and keys that are not in `OUR_KEYS`.
Everything that comes out of a checkpoint is treated as hostile text: it can neither close a marker nor add a key,
a link or a tag of HTML.
"""

from __future__ import annotations

import html
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import yaml

from bitnest_format.errors import BitnestError
from bitnest_format.manifest import Manifest

if TYPE_CHECKING:
    from bitnest_format.report import Sizes

CARD_FILE = "README.md"
EVALUATION_FILE = "evaluation.json"
BEGIN = "<!-- bitnest-format:begin -->"
END = "<!-- bitnest-format:end -->"

OUR_KEYS = ("base_model", "base_model_relation", "library_name", "pipeline_tag", "license", "tags", "datasets")
RELATIONS = ("quantized", "finetune", "adapter", "merge")
LIBRARY = "bitnest-format"
PAPER = "2610.02800"
# The identifiers that the Hub knows; any other licence is written as `other` with its name.
_LICENSES = """
afl-3.0 agpl-3.0 apache-2.0 apple-amlr apple-ascl artistic-2.0 bigcode-openrail-m bigscience-bloom-rail-1.0
bigscience-openrail-m bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear bsl-1.0 c-uda cc cc-by-2.0 cc-by-2.5
cc-by-3.0 cc-by-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0
cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cc-by-nd-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc0-1.0 cdla-permissive-1.0
cdla-permissive-2.0 cdla-sharing-1.0 creativeml-openrail-m deepfloyd-if-license ecl-2.0 epl-1.0 epl-2.0 etalab-2.0
eupl-1.1 eupl-1.2 fair-noncommercial-research-license gemma gfdl gpl gpl-2.0 gpl-3.0 grok2-community h-research
intel-research isc lgpl lgpl-2.1 lgpl-3.0 lgpl-lr llama2 llama3 llama3.1 llama3.2 llama3.3 llama4 lppl-1.3c mit
mpl-2.0 ms-pl ncsa odbl odc-by ofl-1.1 openmdw-1.0 openrail openrail++ osl-3.0 other pddl postgresql unknown
unlicense wtfpl zlib
"""
LICENSES = frozenset(_LICENSES.split())

_REPO_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_LIST_KEYS = ("tags", "datasets", "metrics")
_TEXT_KEYS = ("library_name", "pipeline_tag", "license_name", "license_link", "base_model_relation", "new_version")
_FIGURES = ("code", "chat")


class CardError(BitnestError):
    """A card that cannot be written: an evaluation or an earlier card that is not what it should be."""


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
    """YAML as the Hub means it: `no` is Norwegian, `on` a word, and a date stays the text it was."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":bool", ":timestamp"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"(?:true|True|false|False)$"), list("tTfF"))


def card_text(
    manifest: Manifest,
    config: Mapping[str, Any],
    sizes: Sizes,
    evaluation: Sequence[Mapping[str, Any]] | None = None,
    previous: str | None = None,
    *,
    repo_id: str,
) -> str:
    """The text of `README.md`.

    config: the checkpoint's `config.json`. sizes: as `report.inspect_checkpoint` finds them, in bytes.
    evaluation: what `read_evaluation` returns. previous: the card so far, whose own text and keys are kept.
    repo_id: where the checkpoint will lie, for the lines that load it.

    Raises `CardError` where the earlier card cannot be read or the new one would break the Hub's rules.
    """
    kept, before, after = _split(previous) if previous else ({}, "\n", "\n")
    data = _front_matter(manifest, kept)
    problems = front_matter_problems(data)
    if problems:
        raise CardError(f"{CARD_FILE}: " + "; ".join(problems))
    front = yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=1000)
    body = _body(manifest, config, sizes, evaluation, repo_id)
    return f"---\n{front}---\n{before}{BEGIN}\n{body}\n{END}{after}"


def export_card(
    manifest: Manifest,
    *,
    title: str,
    format_name: str,
    view: str,
    origin: tuple[str | None, str | None] = (None, None),
    notes: Sequence[str] = (),
) -> str:
    """The `README.md` of a view that was exported to another format.

    title: its heading. format_name: as `bitnest-format export --format` names it. origin: repository id and commit of
    the nested checkpoint, where it came from the Hub. notes: what the export had to say.
    """
    name = manifest.source.get("name")
    data: dict[str, Any] = {"base_model": name, "base_model_relation": "quantized"} if _is_repo_id(name) else {}
    data |= {"library_name": "transformers", "pipeline_tag": "text-generation"}
    data |= _license(manifest.source.get("license"), {})
    bits = "4-bit" if view == "draft" else "8-bit"
    data["tags"] = [bits, format_name.partition("-w")[0].removesuffix("-v2"), "bitnest", f"arxiv:{PAPER}"]
    front = yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=1000)
    return f"---\n{front}---\n\n{_export_body(manifest, title, format_name, view, bits, origin, notes)}\n"


def _export_body(
    manifest: Manifest,
    title: str,
    format_name: str,
    view: str,
    bits: str,
    origin: tuple[str | None, str | None],
    notes: Sequence[str],
) -> str:
    repo_id, revision = origin
    name = manifest.source.get("name")
    of = f" of [{_plain(name)}](https://huggingface.co/{name})" if _is_repo_id(name) else ""
    nested = f"[{_plain(repo_id)}](https://huggingface.co/{repo_id})" if _is_repo_id(repo_id) else "a local folder"
    groups = sorted({module.group_size for module in manifest.modules.values()})
    rotation = manifest.rotation
    rows = [
        ("exported from", nested + (f" at {_plain(revision)}" if revision else "")),
        ("view", f"{view}, {bits} weights"),
        ("format", _plain(format_name)),
        ("group sizes", ", ".join(map(str, groups))),
        ("rotation", _plain(f"{rotation['kind']}, folded into the weights") if rotation else "none"),
    ]
    lines = [
        f"# {_plain(title)}\n",
        f"The {view} view of a nested 4/8-bit checkpoint{of}, exported by `bitnest-format`.",
        f"It is an ordinary {bits} model; the nested checkpoint holds both views and decodes speculatively from them",
        f"([BitNest](https://arxiv.org/abs/{PAPER})).\n",
        "| | |\n|---|---|",
        *(f"| {label} | {value} |" for label, value in rows),
        "",
    ]
    if rotation:
        lines.append("- Weights are rotated: the model is the same function, but adapters of the source do not fit it.")
    lines += [f"- {_plain(note)}." for note in notes]
    lines.append("- Quantization changes what a model writes. The limits and the licence of the source model apply.")
    return "\n".join(lines)


def read_evaluation(data: Any) -> list[dict[str, Any]]:
    """The rows of an `evaluation.json`: what `benchmarks/evaluation.py evaluate --json` writes.

    A list of objects: `name` (`draft`, `target`, `source` or another), perplexities `code` and `chat`, and for the
    draft, where it was measured, `acceptance`, `tokens_per_round` and `gamma`. Raises `CardError` naming the place.
    """
    if not isinstance(data, list) or not data:
        raise CardError(f"{EVALUATION_FILE}: expected a list of rows, as benchmarks/evaluation.py writes it")
    for number, row in enumerate(data, start=1):
        if not isinstance(row, dict) or not isinstance(row.get("name"), str):
            raise CardError(f"{EVALUATION_FILE}: row {number}: expected an object with a name")
        optional = [key for key in ("acceptance", "tokens_per_round", "gamma") if row.get(key) is not None]
        for key in (*_FIGURES, *optional):
            if not _is_figure(row.get(key)):
                raise CardError(f"{EVALUATION_FILE}: row {number}: {key} is {row.get(key)!r:.80}, expected a number")
    return data


def front_matter_problems(data: Mapping[str, Any]) -> list[str]:
    """Every way in which a card's front matter breaks what the Hub asks for; an empty list means that it is good.

    The Hub checks a card only over the network and after the upload; this looks at the keys that it rejects.
    Keys that are not known here are let through.
    """
    problems = []
    for key in _TEXT_KEYS:
        if key in data and not _is_word(data[key]):
            problems.append(f"{key} is {data[key]!r:.80}, expected a text")
    for key in _LIST_KEYS:
        if key in data and not (isinstance(data[key], list) and all(map(_is_word, data[key]))):
            problems.append(f"{key} is {data[key]!r:.80}, expected a list of texts")
    for key in ("language", "base_model", "license"):
        if key in data and not _words(data[key]):
            problems.append(f"{key} is {data[key]!r:.80}, expected a text or a list of texts")
    for name in _words(data.get("base_model")):
        if not _is_repo_id(name):
            problems.append(f"base_model is {name!r:.80}, expected owner/name")
    for name in _words(data.get("license")):
        if name not in LICENSES:
            problems.append(f"license is {name!r:.80}, which is none of the Hub's; write other, and its license_name")
    relation = data.get("base_model_relation")
    if _is_word(relation) and relation not in RELATIONS:
        problems.append(f"base_model_relation is {relation!r:.80}, expected one of {', '.join(RELATIONS)}")
    index = data.get("model-index")
    if "model-index" in data and not (isinstance(index, list) and all(map(_is_result, index))):
        problems.append("model-index is not a list of objects with a name and a list of results")
    return problems


def _is_figure(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _is_word(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _words(value: Any) -> list[str]:
    """A text or a list of texts as a list; nothing where it is neither, or empty."""
    listed = value if isinstance(value, list) else [value]
    return listed if listed and all(map(_is_word, listed)) else []


def _is_result(entry: Any) -> bool:
    return isinstance(entry, dict) and _is_word(entry.get("name")) and isinstance(entry.get("results"), list)


def _is_repo_id(value: Any) -> bool:
    return isinstance(value, str) and _REPO_ID.fullmatch(value) is not None


# --- the earlier card ---------------------------------------------------------------------------------------


def _split(card: str) -> tuple[dict[str, Any], str, str]:
    """The keys of a card, its text before our part, and the text after it."""
    card = card.removeprefix("\ufeff").replace("\r\n", "\n")
    keys: dict[str, Any] = {}
    match = re.match(r"---[ \t]*\n(.*?)^---[ \t]*(?:\n|\Z)", card, re.DOTALL | re.MULTILINE)
    if match:
        keys = _parse(match[1])
        card = card[match.end() :]
    counts = (card.count(BEGIN), card.count(END))
    if counts == (0, 0):
        return keys, "\n", f"\n\n{card.strip()}\n" if card.strip() else "\n"
    before, _, rest = card.partition(BEGIN)
    _, found, after = rest.partition(END)
    if counts != (1, 1) or not found:
        raise CardError(
            f"{CARD_FILE}: holds {BEGIN} {counts[0]} times and {END} {counts[1]} times, expected one pair in this "
            "order. Restore the markers, or remove both with the text between them."
        )
    return keys, before, after


def _parse(front: str) -> dict[str, Any]:
    try:
        data = yaml.load(front, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 2}: " if mark is not None else ""
        raise CardError(f"{CARD_FILE}: {where}its front matter is not valid YAML. Mend it and push again.") from None
    if data is None:
        return {}
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise CardError(f"{CARD_FILE}: its front matter is not a list of keys and values. Mend it and push again.")
    return data


# --- front matter -------------------------------------------------------------------------------------------


def _front_matter(manifest: Manifest, kept: Mapping[str, Any]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    name = manifest.source.get("name")
    if _is_repo_id(name):
        data |= {"base_model": name, "base_model_relation": "quantized"}
    else:
        data |= {key: kept[key] for key in ("base_model", "base_model_relation") if key in kept}
    data |= {"library_name": LIBRARY, "pipeline_tag": "text-generation"}
    data |= _license(manifest.source.get("license"), kept)
    nested = "target" in manifest.views
    tags = ["bitnest", "4-bit", *(("8-bit", "speculative-decoding") if nested else ()), f"arxiv:{PAPER}"]
    data["tags"] = _union(tags, kept.get("tags"))
    datasets = _union(_datasets(manifest), kept.get("datasets"))
    if datasets:
        data["datasets"] = datasets
    return data | {key: value for key, value in kept.items() if key not in OUR_KEYS and key not in data}


def _license(name: Any, kept: Mapping[str, Any]) -> dict[str, Any]:
    """The source's licence; the user's own where the source states none, and his `license_name` beside `other`."""
    if not _is_word(name):
        return {"license": kept["license"]} if "license" in kept else {}
    word = str(name).strip().lower()
    if word == "other" or word not in LICENSES:
        clean = re.sub(r"[^a-z0-9.+]+", "-", word).strip("-")[:80]
        stated = {"license_name": clean} if clean and clean != "other" else {}
        return {"license": "other"} | stated | {k: kept[k] for k in ("license_name", "license_link") if k in kept}
    return {"license": word}


def _datasets(manifest: Manifest) -> list[str]:
    dataset = str((manifest.calibration or {}).get("dataset"))
    return [dataset] if _is_repo_id(dataset) else []


def _union(ours: Sequence[str], theirs: Any) -> list[Any]:
    """Ours, then the user's that are not among them; what is no list is kept for the check to complain about."""
    if theirs is None:
        return list(ours)
    return [*ours, *(entry for entry in (theirs if isinstance(theirs, list) else [theirs]) if entry not in ours)]


# --- the text -----------------------------------------------------------------------------------------------


def _body(
    manifest: Manifest,
    config: Mapping[str, Any],
    sizes: Sizes,
    evaluation: Sequence[Mapping[str, Any]] | None,
    repo_id: str,
) -> str:
    blocks = [f"# {_plain(repo_id.rpartition('/')[2])}", _summary(manifest), _loading(manifest, repo_id)]
    blocks.append(_sizes(manifest, sizes))
    if evaluation:
        blocks.append(_measured(evaluation))
    blocks += [_making(manifest, config), _limits(manifest)]
    return "\n\n".join(blocks)


def _summary(manifest: Manifest) -> str:
    name = manifest.source.get("name")
    of = f" of [{_plain(name)}](https://huggingface.co/{name})" if _is_repo_id(name) else ""
    paper = f"[BitNest](https://arxiv.org/abs/{PAPER})"
    if "target" not in manifest.views:
        return (
            f"A draft-only checkpoint{of} in the format of {paper}: 4-bit weights without the refinement plane that\n"
            "would make them a W8 model (the *target*). It writes text of 4-bit quality, and has no target to decode\n"
            "speculatively for."
        )
    return (
        f"A nested 4/8-bit checkpoint{of}. Each weight is stored once, as two 4-bit planes: the base\n"
        "plane alone is a W4 model (the *draft*), base plus refinement plane is a W8 model (the *target*). The draft\n"
        "of speculative decoding costs no extra memory, and greedy output is, token for token, the target's own.\n"
        f"The construction is {paper}'s."
    )


def _loading(manifest: Manifest, repo_id: str) -> str:
    view = "" if "target" in manifest.views else ', view="draft"'
    lines = [
        "## How to load\n",
        "```sh\npip install bitnest-format\n```\n",
        "```python",
        "import bitnest_format",
        "",
        f'model = bitnest_format.load("{repo_id}"{view})',
        'print(model.generate("Why do birds build nests?", max_new_tokens=64).text)',
        "```",
    ]
    if "target" in manifest.views:
        lines.append('\n`load(..., view="draft")` downloads the base shards alone.')
    return "\n".join(lines)


def _sizes(manifest: Manifest, sizes: Sizes) -> str:
    rows = [("draft", sizes.draft, f"{sizes.draft_bits:.2f}")]
    if "target" in manifest.views:
        rows.append(("target, draft included", sizes.target, f"{sizes.target_bits:.2f}"))
    lines = ["## Sizes\n", "| view | MB | of fp16 | bits per quantized weight |", "|---|---|---|---|"]
    lines += [f"| {view} | {size / 1e6:,.1f} | {size / sizes.fp16:.1%} | {bits} |" for view, size, bits in rows]
    lines.append(f"| the same tensors in fp16 | {sizes.fp16 / 1e6:,.1f} | 100.0% | 16 |")
    return "\n".join(lines)


def _measured(evaluation: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        "## Measured\n",
        "Perplexity on code (HumanEval) and chat (ShareGPT). Acceptance is accepted drafts over drafts that were",
        "looked at, greedy. The protocol is that of `benchmarks/evaluation.py` of bitnest-format.\n",
        "| | code | chat | acceptance | tokens a round | gamma |",
        "|---|---|---|---|---|---|",
    ]
    for row in evaluation:
        optional = {"acceptance": "{:.3f}", "tokens_per_round": "{:.2f}", "gamma": "{}"}
        cells = [form.format(row[key]) if row.get(key) is not None else "" for key, form in optional.items()]
        lines.append(f"| {_plain(row['name'])} | {row['code']:.3f} | {row['chat']:.3f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _making(manifest: Manifest, config: Mapping[str, Any]) -> str:
    nesting, source = manifest.nesting, manifest.source
    reference = source.get("reference") or {}
    groups = Counter(module.group_size for module in manifest.modules.values())
    listed = ", ".join(f"{size} ({count} module{'s' * (count > 1)})" for size, count in sorted(groups.items()))
    rotation, calibration = manifest.rotation, manifest.calibration
    rows = [
        ("model type", config.get("model_type")),
        ("source revision", source.get("revision")),
        ("source kind", source.get("kind") if nesting.get("base_method") == "given" else None),
        ("reference", " ".join(str(reference[key]) for key in ("name", "revision") if reference.get(key))),
        ("base plane", nesting.get("base_method")),
        ("refinement plane", nesting.get("refine_method")),
        ("group sizes", listed),
        ("rotation", rotation["kind"] if rotation else "none"),
        ("calibration", f"{calibration['description']}, {calibration['tokens']:,} tokens" if calibration else "none"),
        ("activations", "symmetric INT8, one scale per token"),
        ("format", manifest.format_version),
        ("written by", " ".join(str(manifest.created_by.get(key, "")) for key in ("name", "version")).strip()),
    ]
    lines = ["## How it was made\n", "| | |", "|---|---|"]
    lines += [f"| {label} | {_plain(value)} |" for label, value in rows if value]
    return "\n".join(lines) + "\n\n`bitnest.json` holds the digest and the error of every module."


def _limits(manifest: Manifest) -> str:
    lines = [
        "## Limits\n",
        "- Reading it needs `bitnest-format`; other programs refuse it, because they do not know the format.",
        "- Quantization changes what a model writes. The limits of the source model apply, and so does its licence.",
    ]
    if "target" in manifest.views:
        lines.append("- Token-for-token equality with the target holds on one machine and one build, not across them.")
    return "\n".join(lines)


def _plain(value: Any) -> str:
    """One line of a checkpoint's text as Markdown that means nothing but itself; cut at 200 characters."""
    text = "".join(character if character.isprintable() else " " for character in str(value))[:200]
    return re.sub(r"([\\`*_{}\[\]|~@$:])", r"\\\1", html.escape(text, quote=False))
