"""What follows attention in a layer: one MLP, or a mixture of experts.

A mixture gives every token to the few experts that its router likes best. Which ones, and the order in which their
outputs are added, is decided row by row, so that a token's numbers do not depend on the tokens beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bitnest_format.kernels.reference import DECODE_ROWS, gelu_mul, lm_head, silu_mul
from bitnest_format.kernels.reference_linear import View
from bitnest_format.runtime.linear import StackedLinear


@dataclass(frozen=True, slots=True)
class Mlp:
    """`down(silu(gate(x)) * up(x))`, or with GELU in place of SiLU; `inputs` stacks gate and up."""

    inputs: StackedLinear
    output: StackedLinear
    gelu: bool = False

    def __call__(self, x: Tensor, view: View) -> Tensor:
        """float32 `[M, H]` -> float32 `[M, H]`."""
        gate_up = self.inputs(x, view)
        return self.output(gelu_mul(gate_up) if self.gelu else silu_mul(gate_up), view)

    def linears(self) -> Iterator[StackedLinear]:
        yield from (self.inputs, self.output)

    def bytes_read(self, view: View) -> int:
        """Bytes that a token reads of the stored planes."""
        return sum(linear.plane_bytes[view] for linear in self.linears())


@dataclass(frozen=True, slots=True)
class Mixture:
    """The sum over a token's `active` best experts of expert output times router weight.

    `router`: `[E, H]`, not quantized; weights are its softmax over all experts, divided by their sum over the chosen
    ones where `normalized`.
    """

    router: Tensor
    experts: Sequence[Mlp]
    active: int
    normalized: bool

    def __call__(self, x: Tensor, view: View) -> Tensor:
        """float32 `[M, H]` -> float32 `[M, H]`."""
        weights, chosen = self._route(lm_head(x, self.router))
        total = torch.zeros_like(x)
        # Every row adds its experts in the order of their numbers.
        for number in chosen.unique().tolist():
            rows, places = torch.where(chosen == number)
            total[rows] += self.experts[number](x[rows], view) * weights[rows, places, None]
        return total

    def _route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and numbers of the chosen experts, both `[M, active]`, of router outputs `[M, E]`."""
        if logits.shape[0] > DECODE_ROWS:
            return self._weigh(logits)
        rows = [self._weigh(row) for row in logits.unbind(0)]
        return torch.stack([weights for weights, _ in rows]), torch.stack([chosen for _, chosen in rows])

    def _weigh(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = logits.softmax(dim=-1).topk(self.active, dim=-1)
        return (weights / weights.sum(dim=-1, keepdim=True) if self.normalized else weights), chosen

    def linears(self) -> Iterator[StackedLinear]:
        for expert in self.experts:
            yield from expert.linears()

    def bytes_read(self, view: View) -> int:
        """Bytes that a token reads of the stored planes: the router, and as many experts as it takes."""
        planes = sum(expert.bytes_read(view) for expert in self.experts)
        return self.router.nbytes + planes * self.active // len(self.experts)
