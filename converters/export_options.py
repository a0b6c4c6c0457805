"""The choices of an export, checked once, before anything is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import torch

from bitnest_format.checkpoint import DEFAULT_SHARD_BYTES, View
from bitnest_format.converters.export_formats import FORMATS, Activations
from bitnest_format.errors import UsageError

PLAIN_TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """What to write.

    format: a name of `FORMATS`. view: None takes the format's first.
    dtype: of dequantized weights, for `hf` alone; None is the type that the checkpoint's config names.
    activations: `int8` tells readers to quantize activations per token, as nested decoding does; compressed-tensors
        alone has a word for it.
    shard_bytes: the largest shard.

    Raises `UsageError` where these contradict each other.
    """

    format: str
    view: View | None = None
    dtype: str | None = None
    activations: Activations = "none"
    shard_bytes: int = DEFAULT_SHARD_BYTES

    def __post_init__(self) -> None:
        for name, allowed in (("format", FORMATS), ("activations", get_args(Activations))):
            if getattr(self, name) not in allowed:
                raise UsageError(f"--{name} is {getattr(self, name)!r}, expected one of {', '.join(allowed)}")
        chosen = FORMATS[self.format]
        if self.view is not None and self.view not in chosen.views:
            raise UsageError(f"--view {self.view}: {self.format} holds the {chosen.views[0]} view alone")
        if self.dtype is not None and not chosen.plain:
            raise UsageError(
                f"--dtype {self.dtype}: {self.format} keeps codes and scales; hf alone has a choice of types"
            )
        if self.dtype is not None and self.dtype not in PLAIN_TYPES:
            raise UsageError(f"--dtype is {self.dtype!r}, expected one of {', '.join(PLAIN_TYPES)}")
        if self.activations != "none" and not chosen.activations:
            able = ", ".join(name for name, known in FORMATS.items() if known.activations)
            raise UsageError(f"--activations {self.activations}: {self.format} has no word for it. Use one of {able}.")
        if self.shard_bytes < 1:
            raise UsageError(f"--max-shard-size is {self.shard_bytes}, expected at least 1")

    @property
    def chosen_view(self) -> View:
        return self.view or FORMATS[self.format].views[0]
