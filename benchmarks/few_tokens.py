"""What error feedback gains or loses when few tokens have reached a matrix, as happens to experts of a mixture.

A random matrix is quantized with Hessians of more and more tokens, as they are and `shrunk`, and the error of its
outputs is compared with that of rounding, on the distribution that the tokens were drawn from: normal, with eigenvalues
that fall as `1 / i ** steepness`.

python benchmarks/few_tokens.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from frontier import machine
from torch import Tensor

from bitnest_format import nesting
from bitnest_format.converters.float_parts import FEWEST_TOKENS_PER_INPUT
from bitnest_format.converters.hessian import HessianSum, shrunk
from bitnest_format.converters.options import ConvertOptions
from bitnest_format.converters.orthogonal import random_orthogonal
from bitnest_format.converters.quantize import Together, quantize_together

OUTPUTS, INPUTS, GROUP = 256, 1024, 64
STEEPNESS = (0.0, 0.5, 1.0, 2.0)
TOKENS_PER_INPUT = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1, 4)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args(arguments)
    generator = torch.Generator().manual_seed(options.seed)
    weight = torch.randn(OUTPUTS, INPUTS, generator=generator)
    basis = random_orthogonal(INPUTS, generator).float()
    rows = []
    print("| steepness | tokens an input | draft, plain | shrunk | target, plain | shrunk |\n|---|---|---|---|---|---|")
    for steepness in STEEPNESS:
        spectrum = torch.arange(1, INPUTS + 1) ** -steepness
        root = (spectrum / spectrum.mean()).sqrt()[:, None] * basis
        rounded = _errors(weight, None, root)
        for share in TOKENS_PER_INPUT:
            tokens = round(share * INPUTS)
            total = HessianSum(INPUTS)
            total.add(torch.randn(tokens, INPUTS, generator=generator) @ root)
            hessian = total.mean()
            row = {"steepness": steepness, "tokens_per_input": share}
            errors = {"plain": _errors(weight, hessian, root), "shrunk": _errors(weight, shrunk(hessian, tokens), root)}
            for place, view in enumerate(("draft", "target")):
                row |= {f"{view}, {kind}": found[place] / rounded[place] for kind, found in errors.items()}
            rows.append(row)
            print(
                f"| {steepness} | {share:.3g} | {' | '.join(f'{x:.2f}' for x in list(row.values())[2:])} |", flush=True
            )
    if options.json:
        document = {"machine": machine(), "bound": FEWEST_TOKENS_PER_INPUT, "rows": rows}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _errors(weight: Tensor, hessian: Tensor | None, root: Tensor) -> tuple[float, float]:
    """Norms of what the draft's and the target's outputs are off, in the mean over the distribution."""
    matrix = Together({"matrix": weight}, hessian, GROUP)
    ((found, _),) = quantize_together([matrix], ConvertOptions())
    codes = found["matrix"]
    assert codes.refinement is not None
    draft = nesting.draft_weight(codes.base, codes.scale)
    target = nesting.target_weight(codes.base, codes.refinement, codes.scale)
    return float(((weight - draft) @ root.T).norm()), float(((weight - target) @ root.T).norm())


if __name__ == "__main__":
    main()
