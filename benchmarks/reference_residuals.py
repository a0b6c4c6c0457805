"""How far weights lie from the base plane that was made of them, and from one that was made of others.

`convert --reference` refuses a reference whose weights lie farther from the given base planes than
`LARGEST_RESIDUAL`. This measures the distances that the bound has to part: base planes of the right weights, by several
methods and group sizes, and the same base planes beside wrong references of the same shapes.

python benchmarks/reference_residuals.py SOURCE [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from frontier import machine

from bitnest_format.architecture import read_architecture
from bitnest_format.checkpoint import Checkpoint
from bitnest_format.converters.base import GivenBase
from bitnest_format.converters.folded_source import FoldedSource
from bitnest_format.converters.given_base import LARGEST_RESIDUAL, relative_residual
from bitnest_format.converters.options import ConvertOptions
from bitnest_format.converters.pipeline import convert
from bitnest_format.converters.rotation import make_rotation
from bitnest_format.converters.sources import open_source

# As published 4-bit models are made: nothing is rotated, and neither bound nor sweeps follow.
METHODS: dict[str, dict[str, Any]] = {
    "GPTQ, groups of 32": {"group_size": 32},
    "GPTQ, groups of 64": {"group_size": 64},
    "GPTQ, one group a row": {"group_size": -1},
    "GPTQ, one group a row, largest value": {"group_size": -1, "scale_search": "max"},
    "rounded, groups of 64": {"group_size": 64, "base": "rtn"},
    "rounded, one group a row, largest value": {"group_size": -1, "base": "rtn", "scale_search": "max"},
}
PLAIN = {"rotation": "none", "refinement": "closed", "base_bound": None, "base_sweeps": 0}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="folder or GGUF file of the model")
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args(arguments)
    source = open_source(options.source)
    architecture = read_architecture(source.config, source.tensors)
    rotation = make_rotation("random", None, 0, architecture)
    folded = FoldedSource(source, architecture, rotation)
    layers = [
        {name: source.read(name).float() for name in architecture.layer_tensors(layer)}
        for layer in range(architecture.layers)
    ]
    references = {
        "right": layers,
        "rotated": [folded.fold_layer(*numbered) for numbered in enumerate(layers)],
        "the next layer's": [
            dict(zip(tensors, others.values(), strict=True))
            for tensors, others in zip(layers, [*layers[1:], layers[0]], strict=True)
        ],
    }
    rows = []
    print("| base plane | reference | smallest | median | largest |\n|---|---|---|---|---|")
    for method, changes in METHODS.items():
        bases = _bases(options.source, changes)
        for reference, weights in references.items():
            joined = {name: tensor for layer in weights for name, tensor in layer.items()}
            found = torch.tensor([relative_residual(joined[f"{name}.weight"], base) for name, base in bases.items()])
            figures = {"min": float(found.min()), "median": float(found.median()), "max": float(found.max())}
            rows.append({"base": method, "reference": reference, **figures})
            print(
                f"| {method} | {reference} | {' | '.join(f'{value:.3f}' for value in figures.values())} |", flush=True
            )
    if options.json:
        document = {"machine": machine(), "bound": LARGEST_RESIDUAL, "rows": rows}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    right = max(row["max"] for row in rows if row["reference"] == "right")
    wrong = min(row["min"] for row in rows if row["reference"] != "right")
    if not right <= LARGEST_RESIDUAL < wrong:
        sys.exit(
            f"{LARGEST_RESIDUAL} does not part right references, up to {right:.3f}, from wrong ones, {wrong:.3f} on"
        )


def _bases(source: Path, changes: Mapping[str, Any]) -> dict[str, GivenBase]:
    """The base planes that a method makes of the source, by module."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "nested"
        convert(open_source(source), output, ConvertOptions(**PLAIN, **changes))
        checkpoint = Checkpoint(output, "draft")
        weights = {name: checkpoint.weight(name) for name in checkpoint.manifest.modules}
        return {name: GivenBase(codes=weight.base_codes(), scale=weight.scale) for name, weight in weights.items()}


if __name__ == "__main__":
    main()
