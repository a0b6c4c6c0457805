"""Two views of one transformers model: a second tree of modules over the parameters of the first."""

from __future__ import annotations

import copy
from functools import partial
from types import MethodType
from typing import Any

from torch import nn

from bitnest_format.checkpoint import View
from bitnest_format.runtime.hf_linear import NestedLinear

SHARED = ("_parameters", "_buffers")


def draft_view(model: Any, gamma: int) -> Any:
    """A model that computes with the base planes of `model` and holds no tensor of its own.

    Moving either to a device moves both. Its generation settings are a copy, set to draft `gamma` tokens a round. Hooks
    that accelerate has put on `model` (several devices, offloading) are on the draft as well.
    """
    draft: Any = twin(model, "draft")
    draft.generation_config = copy.deepcopy(model.generation_config)
    draft.generation_config.update(
        num_assistant_tokens=gamma, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
    )
    return draft


def twin(module: nn.Module, view: View) -> nn.Module:
    """A copy of a tree of modules whose nested layers are of `view`, with the very parameters and buffers of the tree.

    Not their tensors but the dictionaries that hold them are shared, so a tensor that is replaced in one tree, as by
    `.to()`, is replaced in both.
    """
    double = type(module).__new__(type(module))
    state = double.__dict__
    for name, value in module.__dict__.items():
        if name == "_modules":
            value = {child: None if part is None else twin(part, view) for child, part in value.items()}
        elif isinstance(value, dict) and name not in SHARED:
            value = value.copy()
        state[name] = _rebound(value, module, double)
    if isinstance(double, NestedLinear):
        double.view = view
    return double


def _rebound(value: Any, owner: nn.Module, heir: nn.Module) -> Any:
    """A method, or a function with its first argument given, that was bound to `owner`, for `heir`; else the value.

    accelerate replaces the `forward` of a module by such a function: left as it is, the heir would run its owner.
    """
    if isinstance(value, MethodType) and value.__self__ is owner:
        return MethodType(value.__func__, heir)
    if isinstance(value, partial) and value.args and value.args[0] is owner:
        bound = partial(value.func, heir, *value.args[1:], **value.keywords)
        bound.__dict__.update(value.__dict__)
        return bound
    return value
