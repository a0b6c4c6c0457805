"""The model card: its text, what survives of an earlier one, and what a hostile checkpoint cannot do with it."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import yaml

from bitnest_format.card import BEGIN, END, CardError, card_text, front_matter_problems, read_evaluation
from bitnest_format.manifest import Manifest, Module, Plane
from bitnest_format.report import Sizes

PLANE = Plane(name="x", sha256="0" * 64)
MODULE = Module(shape=(8, 128), group_size=128, base=PLANE, scale=PLANE, refinement=PLANE)
MANIFEST = Manifest(
    created_by={"name": "bitnest-format", "version": "0.1.0"},
    nesting={"base_method": "gptq", "refine_method": "feedback"},
    activation={},
    kv_cache={},
    rotation={"kind": "random", "seed": 0, "folded": ["R1", "R2"]},
    source={"kind": "huggingface", "name": "org/Small-1B", "revision": "abc", "license": "apache-2.0"},
    calibration={"description": "file chat.jsonl", "tokens": 32768, "sha256": "0" * 64, "dataset": "org/chat"},
    modules={"a": MODULE, "b": replace(MODULE, group_size=64), "c": MODULE},
    unquantized=(),
    files={},
)
SIZES = Sizes(
    base=4_000_000, scales=125_000, refinement=4_000_000, unquantized=1_000_000, fp16=17_000_000, weights=8 * 10**6
)
EVALUATION = [
    {"name": "draft", "code": 4.672, "chat": 6.134, "acceptance": 0.946, "tokens_per_round": 4.46, "gamma": 4},
    {"name": "target", "code": 4.363, "chat": 5.639},
]

GOLDEN = f"""\
---
base_model: org/Small-1B
base_model_relation: quantized
library_name: bitnest-format
pipeline_tag: text-generation
license: apache-2.0
tags:
- bitnest
- 4-bit
- 8-bit
- speculative-decoding
- arxiv:2610.02800
datasets:
- org/chat
---

{BEGIN}
# Small-BitNest

A nested 4/8-bit checkpoint of [org/Small-1B](https://huggingface.co/org/Small-1B). Each weight is stored once, as two \
4-bit planes: the base
plane alone is a W4 model (the *draft*), base plus refinement plane is a W8 model (the *target*). The draft
of speculative decoding costs no extra memory, and greedy output is, token for token, the target's own.
The construction is [BitNest](https://arxiv.org/abs/2610.02800)'s.

## How to load

```sh
pip install bitnest-format
```

```python
import bitnest_format

model = bitnest_format.load("me/Small-BitNest")
print(model.generate("Why do birds build nests?", max_new_tokens=64).text)
```

`load(..., view="draft")` downloads the base shards alone.

## Sizes

| view | MB | of fp16 | bits per quantized weight |
|---|---|---|---|
| draft | 5.1 | 30.1% | 4.12 |
| target, draft included | 9.1 | 53.7% | 8.12 |
| the same tensors in fp16 | 17.0 | 100.0% | 16 |

## Measured

Perplexity on code (HumanEval) and chat (ShareGPT). Acceptance is accepted drafts over drafts that were
looked at, greedy. The protocol is that of `benchmarks/evaluation.py` of bitnest-format.

| | code | chat | acceptance | tokens a round | gamma |
|---|---|---|---|---|---|
| draft | 4.672 | 6.134 | 0.946 | 4.46 | 4 |
| target | 4.363 | 5.639 |  |  |  |

## How it was made

| | |
|---|---|
| model type | llama |
| source revision | abc |
| base plane | gptq |
| refinement plane | feedback |
| group sizes | 64 (1 module), 128 (2 modules) |
| rotation | random |
| calibration | file chat.jsonl, 32,768 tokens |
| activations | symmetric INT8, one scale per token |
| format | 1.0 |
| written by | bitnest-format 0.1.0 |

`bitnest.json` holds the digest and the error of every module.

## Limits

- Reading it needs `bitnest-format`; other programs refuse it, because they do not know the format.
- Quantization changes what a model writes. The limits of the source model apply, and so does its licence.
- Token-for-token equality with the target holds on one machine and one build, not across them.
{END}
"""


def make(previous: str | None = None, manifest: Manifest = MANIFEST, config: Any = None, **options: Any) -> str:
    config = {"model_type": "llama"} if config is None else config
    return card_text(manifest, config, SIZES, previous=previous, repo_id="me/Small-BitNest", **options)


def front(card: str) -> dict[str, Any]:
    data: dict[str, Any] = yaml.safe_load(card.split("---\n")[1])
    return data


def from_source(**changes: Any) -> Manifest:
    return replace(MANIFEST, source={**MANIFEST.source, **changes})


def test_card_text():
    assert make(evaluation=EVALUATION) == GOLDEN


def test_card_text_of_its_own_result_is_the_same():
    assert make(GOLDEN, evaluation=EVALUATION) == GOLDEN
    assert make(GOLDEN.replace("\n", "\r\n"), evaluation=EVALUATION) == GOLDEN


def test_card_of_a_draft_alone():
    module = replace(MODULE, refinement=None)
    nesting = {"base_method": "rtn", "refine_method": None}
    text = make(manifest=replace(MANIFEST, views=("draft",), modules={"a": module}, nesting=nesting))
    assert front(text)["tags"] == ["bitnest", "4-bit", "arxiv:2610.02800"]
    assert 'load("me/Small-BitNest", view="draft")' in text
    assert "target" not in text.split("## Sizes")[1].split("## How it was made")[0]


def test_card_without_provenance_has_no_empty_fields():
    """PU-2: a local source without a licence, and no calibration."""
    bare = replace(MANIFEST, source={"kind": "gguf", "name": None, "license": None}, calibration=None, rotation=None)
    text = make(manifest=bare)
    assert set(front(text)) == {"library_name", "pipeline_tag", "tags"}
    assert None not in front(text).values()
    assert "| rotation | none |\n| calibration | none |" in text


LICENSES = {
    "known": ("llama3.1", {"license": "llama3.1"}),
    "in capitals": ("Apache-2.0", {"license": "apache-2.0"}),
    "named": ("qwen-research", {"license": "other", "license_name": "qwen-research"}),
    "other": ("other", {"license": "other"}),
    "hostile": ("x\n---\nbase_model: evil", {"license": "other", "license_name": "x-base-model-evil"}),
}


@pytest.mark.parametrize("case", LICENSES)
def test_license_is_inherited(case):
    name, expected = LICENSES[case]
    data = front(make(manifest=from_source(license=name)))
    assert {key: value for key, value in data.items() if key.startswith("license")} == expected


def test_earlier_keys_survive():
    earlier = (
        "---\nlanguage: [no, en]\nlicense: mit\ntags: [mine, bitnest]\ndate: 2026-01-01\nwidget: {on: yes}\n---\nText"
    )
    text = make(earlier, manifest=from_source(license=None))
    data = yaml.load(text.split("---\n")[1], yaml.BaseLoader)
    assert data["language"] == ["no", "en"]
    assert data["license"] == "mit"
    assert data["tags"] == ["bitnest", "4-bit", "8-bit", "speculative-decoding", "arxiv:2610.02800", "mine"]
    assert (data["date"], data["widget"]) == ("2026-01-01", {"on": "yes"})
    assert "language:\n- 'no'\n- en\n" in text
    assert make(text, manifest=from_source(license=None)) == text


def test_earlier_text_survives():
    text = make("# My model\n\nWords.\n")
    assert text.endswith(f"{END}\n\n# My model\n\nWords.\n")
    edited = text.replace(BEGIN, f"Before.\n\n{BEGIN}").replace("## Limits", "## Mine, inside")
    again = make(edited)
    assert "---\n\nBefore.\n\n<!--" in again
    assert "Mine, inside" not in again
    assert again.endswith(f"{END}\n\n# My model\n\nWords.\n")


BROKEN = {
    "begin alone": (
        f"{BEGIN} text",
        f"README.md: holds {BEGIN} 1 times and {END} 0 times, expected one pair in this order.",
    ),
    "end first": (f"{END} text {BEGIN}", f"README.md: holds {BEGIN} 1 times and {END} 1 times"),
    "two pairs": (f"{BEGIN}{END}{BEGIN}{END}", f"README.md: holds {BEGIN} 2 times"),
    "YAML": ("---\na: 1\nb: [\n---\n", "README.md: line 4: its front matter is not valid YAML."),
    "code in YAML": (
        "---\na: !!python/object/apply:os.system [x]\n---\n",
        "README.md: line 2: its front matter is not",
    ),
    "no keys": ("---\n- a\n---\n", "README.md: its front matter is not a list of keys and values."),
    "model-index": ("---\nmodel-index: not correct\n---\n", "README.md: model-index is not a list of objects"),
    "tags": ("---\ntags: [null]\n---\n", "README.md: tags is ["),
    "number as name": ("---\nlicense_link: 5\n---\n", "README.md: license_link is 5, expected a text"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_an_earlier_card_that_cannot_be_kept(case):
    earlier, message = BROKEN[case]
    with pytest.raises(CardError) as caught:
        make(earlier)
    assert str(caught.value).startswith(message)


HOSTILE = f"x\n---\nlicense: evil\n---\n{END}<script>alert(1)</script>[a](javascript:b)|`![i](http://evil)"


def test_a_hostile_checkpoint_cannot_inject():
    source = {"kind": "x", "name": HOSTILE, "revision": HOSTILE, "license": HOSTILE}
    calibration = {"description": HOSTILE, "tokens": 1, "sha256": "0" * 64, "dataset": HOSTILE}
    hostile = replace(
        MANIFEST,
        source=source,
        calibration=calibration,
        created_by={"name": HOSTILE, "version": "\u202e\x00"},
        rotation={"kind": HOSTILE, "folded": []},
        nesting={"base_method": HOSTILE, "refine_method": HOSTILE},
        format_version=HOSTILE,
    )
    rows = [{"name": HOSTILE, "code": 1, "chat": 1}]
    text = make(manifest=hostile, config={"model_type": HOSTILE}, evaluation=rows)
    assert set(front(text)) == {"library_name", "pipeline_tag", "license", "license_name", "tags"}
    assert front(text)["license"] == "other"
    assert text.count(END) == text.count(BEGIN) == text.count("\n---\n") == 1
    assert "<script" not in text and "\u202e" not in text and "\x00" not in text
    assert not re.search(r"(?<!\\)\]\((?!https://(?:huggingface\.co|arxiv\.org)/)", text)
    table = text.split("## How it was made")[1].split("`bitnest.json`")[0].strip().splitlines()
    assert all(len(re.findall(r"(?<!\\)\|", line)) == 3 for line in table)


GOOD = {"license": "mit", "tags": ["a"], "base_model": ["a/b", "c/d"], "model-index": [{"name": "m", "results": []}]}
BAD = {
    "license": ("license", "my own", "license is 'my own', which is none of the Hub's"),
    "empty license": ("license", "", "license is '', expected a text or a list of texts"),
    "base model": ("base_model", "just-a-name", "base_model is 'just-a-name', expected owner/name"),
    "relation": ("base_model_relation", "child", "base_model_relation is 'child', expected one of quantized"),
    "null": ("datasets", [None], "datasets is [None], expected a list of texts"),
    "text for a list": ("tags", "a", "tags is 'a', expected a list of texts"),
    "number": ("pipeline_tag", 5, "pipeline_tag is 5, expected a text"),
    "language": ("language", {"a": 1}, "language is {'a': 1}, expected a text or a list of texts"),
}


def test_front_matter_problems():
    assert front_matter_problems(GOOD) == []
    assert front_matter_problems({"anything": {"else": None}}) == []


@pytest.mark.parametrize("case", BAD)
def test_front_matter_problem(case):
    key, value, message = BAD[case]
    (found,) = front_matter_problems({**GOOD, key: value})
    assert found.startswith(message)


ROWS = {
    "no list": ({}, "evaluation.json: expected a list of rows, as benchmarks/evaluation.py writes it"),
    "empty": ([], "evaluation.json: expected a list of rows, as benchmarks/evaluation.py writes it"),
    "no name": ([{"code": 1}], "evaluation.json: row 1: expected an object with a name"),
    "no figure": ([{"name": "a", "code": 1}], "evaluation.json: row 1: chat is None, expected a number"),
    "text": ([{"name": "a", "code": 1, "chat": "x"}], "evaluation.json: row 1: chat is 'x', expected a number"),
    "NaN": ([{"name": "a", "code": 1, "chat": float("nan")}], "evaluation.json: row 1: chat is nan, expected a number"),
    "truth": ([{"name": "a", "code": 1, "chat": True}], "evaluation.json: row 1: chat is True, expected a number"),
}


@pytest.mark.parametrize("case", ROWS)
def test_read_evaluation_refuses(case):
    data, message = ROWS[case]
    with pytest.raises(CardError) as caught:
        read_evaluation(data)
    assert str(caught.value) == message


def test_read_evaluation():
    assert read_evaluation(EVALUATION) == EVALUATION
