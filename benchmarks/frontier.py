"""The choices of the construction against each other: what each costs the target and brings the draft.

Converts one model with many options and evaluates each result by the protocol of `evaluation.py`, beside two
baselines: the source, and plain W8A8 of the same rotated weights with the same groups. The defaults of
`ConvertOptions` come from this table.

    python benchmarks/evaluation.py extract --out tokens.json --calibration-out calibration.safetensors
    python benchmarks/frontier.py --source MODEL --tokens tokens.json --calibration calibration.safetensors
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
from evaluation import Tokens, acceptance, fake_quant_model, load_views, perplexity, plain_w8, read_tokens, rotated

from bitnest_format.architecture import read_architecture
from bitnest_format.converters.options import ConvertOptions
from bitnest_format.converters.pipeline import convert
from bitnest_format.converters.rotation import make_rotation
from bitnest_format.converters.sources import open_source

PAPER: dict[str, Any] = {"base_bound": None, "base_sweeps": 0, "refinement": "closed"}
PLAIN: dict[str, Any] = {"base_sweeps": 0, "refinement_sweeps": 0}

# Every variant is the defaults with these changes; groups of 64 throughout unless it says otherwise.
VARIANTS: dict[str, dict[str, Any]] = {
    "paper": PAPER,
    "paper, feedback": {**PLAIN, "base_bound": None},
    "bound 2/3": {**PLAIN, "base_bound": 2 / 3},
    "bound 0.8": {**PLAIN, "base_bound": 0.8},
    "bound 0.8, closed": {**PLAIN, "base_bound": 0.8, "refinement": "closed"},
    "bound 0.8, max scale": {**PLAIN, "base_bound": 0.8, "scale_search": "max"},
    "bound 0.8, groups of 32": {**PLAIN, "base_bound": 0.8, "group_size": 32},
    "rtn, closed": {**PAPER, "base": "rtn"},
    "paper, no rotation": {**PAPER, "rotation": "none"},
    "sweeps 0/3, no bound": {"base_bound": None, "base_sweeps": 0, "refinement_sweeps": 3},
    "sweeps 1/3, no bound": {"base_bound": None, "base_sweeps": 1, "refinement_sweeps": 3},
    "sweeps 3/3, no bound": {"base_bound": None, "base_sweeps": 3, "refinement_sweeps": 3},
    "sweeps 0/3, bound 0.8": {"base_bound": 0.8, "base_sweeps": 0, "refinement_sweeps": 3},
    "sweeps 3/3, bound 0.7": {"base_bound": 0.7, "base_sweeps": 3, "refinement_sweeps": 3},
    "sweeps 3/3, bound 0.9": {"base_bound": 0.9, "base_sweeps": 3, "refinement_sweeps": 3},
    "sweeps 3/3, bound 1.0": {"base_bound": 1.0, "base_sweeps": 3, "refinement_sweeps": 3},
    "sweeps 8/8, bound 0.8": {"base_bound": 0.8, "base_sweeps": 8, "refinement_sweeps": 8},
    "sweeps 3/3, bound 0.8, damping 0.05": {"damping": 0.05},
    "sweeps 3/3, bound 0.8, damping 0.2": {"damping": 0.2},
    "sweeps 3/3, bound 0.8, max scale": {"scale_search": "max"},
    "sweeps 3/3, bound 0.8, hadamard": {"rotation": "hadamard"},
    "sweeps 3/3, bound 0.8, seed 1": {"seed": 1},
    "defaults": {},
    "defaults, default groups": {"group_size": None},
    "defaults, built-in text": {"calibration": "builtin"},
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True, help="folder or GGUF file of the model")
    parser.add_argument("--tokens", type=Path, required=True, help="file made by evaluation.py extract")
    parser.add_argument("--calibration", type=Path, required=True, help="token ids made by evaluation.py extract")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", help="names of variants, separated by semicolons; default: all")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no variant after this long")
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args(arguments)
    names = [name.strip() for name in options.only.split(";")] if options.only else list(VARIANTS)
    unknown = [name for name in names if name not in VARIANTS]
    if unknown:
        sys.exit(f"unknown variants: {', '.join(unknown)}; known: {'; '.join(VARIANTS)}")
    began = time.perf_counter()
    tokens = read_tokens(options.tokens)
    rows = baselines(options.source, tokens, options.device)
    print(table_row(rows[0]), table_row(rows[1]), sep="\n", flush=True)
    for name in names:
        if time.perf_counter() - began > options.seconds:
            print(f"out of time before {name}", flush=True)
            break
        changes = {"group_size": 64, "calibration": str(options.calibration), **VARIANTS[name]}
        rows.append(variant(name, changes, options.source, tokens, options.device))
        print(table_row(rows[-1]), flush=True)
        if options.json:
            options.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n", encoding="utf-8")
    print("\n" + table(rows))
    print(json.dumps(machine()))


def baselines(source: Path, tokens: Tokens, device: str) -> list[dict[str, Any]]:
    """The unquantized source, and plain W8A8 (rotated, groups of 64) with the source as its draft."""
    opened = open_source(source)
    config = dict(opened.config)
    weights = {name: opened.read(name).float() for name in opened.tensors}
    rotation = make_rotation("random", None, 0, read_architecture(config))
    assert rotation is not None
    turned = rotated(config, weights, rotation)
    full = fake_quant_model(config, turned, device, activation_bits=None)
    plain = full.with_linears(plain_w8(turned, 64))
    drafted = acceptance(full, plain, tokens.prefixes)
    return [
        {"name": "source", "target_code": perplexity(full, tokens.code), "target_chat": perplexity(full, tokens.chat)},
        {
            "name": "plain W8A8 (draft: the source)",
            "target_code": perplexity(plain, tokens.code),
            "target_chat": perplexity(plain, tokens.chat),
            "acceptance": drafted.acceptance,
            "agreement": drafted.agreement,
            "tokens_per_round": drafted.tokens_per_round,
        },
    ]


def variant(name: str, changes: dict[str, Any], source: Path, tokens: Tokens, device: str) -> dict[str, Any]:
    """Convert with these options and evaluate the result."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "checkpoint"
        result = convert(open_source(source), output, ConvertOptions(device=device, **changes))
        draft, target = load_views(output, device)
    drafted = acceptance(draft, target, tokens.prefixes)
    learned = result.to_dict()["learned_rotation"]
    return {
        "name": name,
        "draft_code": perplexity(draft, tokens.code),
        "draft_chat": perplexity(draft, tokens.chat),
        "target_code": perplexity(target, tokens.code),
        "target_chat": perplexity(target, tokens.chat),
        "saturation": result.to_dict()["mean_saturation"],
        "acceptance": drafted.acceptance,
        "agreement": drafted.agreement,
        "tokens_per_round": drafted.tokens_per_round,
        "convert_seconds": round(result.seconds, 1),
        **({"learned_rotation": learned} if learned else {}),
    }


COLUMNS = {
    "draft_code": ("draft code", ".3f"),
    "draft_chat": ("draft chat", ".3f"),
    "target_code": ("target code", ".4f"),
    "target_chat": ("target chat", ".4f"),
    "saturation": ("clipped qr", ".3f"),
    "acceptance": ("acceptance", ".4f"),
    "agreement": ("agreement", ".4f"),
    "tokens_per_round": ("tokens/round", ".3f"),
    "convert_seconds": ("convert s", ".0f"),
}


def table_row(row: dict[str, Any]) -> str:
    cells = (format(row[key], style) if key in row else "" for key, (_, style) in COLUMNS.items())
    return f"| {row['name']} | {' | '.join(cells)} |"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """All rows as a Markdown table."""
    head = f"| | {' | '.join(title for title, _ in COLUMNS.values())} |"
    return "\n".join([head, "|---" * (len(COLUMNS) + 1) + "|", *map(table_row, rows)])


def machine() -> dict[str, str]:
    """What the figures were measured on."""
    cuda = torch.cuda.is_available()
    return {
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    main()
