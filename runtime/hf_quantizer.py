"""Nested checkpoints as a quantization method of transformers.

transformers asks a quantizer before it looks for files, before it fills the model, and after. The first moment names
the index of the view that is wanted, so that no other file is fetched or read. The second reads manifest and headers,
refuses what is wrong with them, and puts nested layers where the manifest lists modules; transformers then fills them
like any others, since parameters and tensors have the same names. The third looks for forbidden pairs of codes.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from transformers.utils import cached_file
from transformers.utils.quantization_config import QuantizationConfigMixin

from bitnest_format import packing
from bitnest_format.checkpoint import DRAFT_INDEX, QUANT_METHOD, TARGET_INDEX, Checkpoint, View, forbidden_pair
from bitnest_format.errors import CheckpointError, UsageError
from bitnest_format.manifest import MANIFEST_FILE
from bitnest_format.runtime.hf_layers import put_nested_layers
from bitnest_format.runtime.hf_linear import NestedLinear
from bitnest_format.runtime.hf_views import draft_view
from bitnest_format.spec import FORMAT_VERSION

INDEXES: dict[View, str] = {"draft": DRAFT_INDEX, "target": TARGET_INDEX}
DEFAULT_GAMMA = 4


class BitnestConfig(QuantizationConfigMixin):  # type: ignore[misc]  # transformers is untyped
    """The block `quantization_config` of a nested checkpoint, and the view that is to be loaded.

    Raises `UsageError` for a view that does not exist.
    """

    def __init__(self, format_version: str = FORMAT_VERSION, view: View = "target", **_: Any):
        if view not in INDEXES:
            raise UsageError(f"view is {view!r}, expected 'target' or 'draft'")
        self.quant_method = QUANT_METHOD
        self.format_version = format_version
        self.view: View = view

    def to_dict(self) -> dict[str, Any]:
        """The block as it stands in `config.json`, with `view` where that is the draft."""
        block = {"quant_method": QUANT_METHOD, "format_version": self.format_version, "manifest": MANIFEST_FILE}
        return block if self.view == "target" else {**block, "view": self.view}


class BitnestQuantizer(HfQuantizer):  # type: ignore[misc]  # transformers is untyped
    """Loads one view of a nested checkpoint into a transformers model, and refuses to save or to train it."""

    requires_calibration = True
    is_trainable = False

    def __init__(self, quantization_config: BitnestConfig, **options: Any):
        super().__init__(quantization_config, **options)
        self.view: View = quantization_config.view
        self.gamma = DEFAULT_GAMMA
        self._checkpoint: Checkpoint | None = None
        self._types: dict[str, torch.dtype] = {}

    def update_attn_implementation(self, config: Any) -> Any:
        """Name the index of the view. Of the hooks that transformers calls before it resolves files, the one it has.

        transformers 5.16 calls `update_tp_plan` there, later versions this.
        """
        config.transformers_weights = INDEXES[self.view]
        # Otherwise transformers takes the type of the first stored tensor, which may be a scale.
        if config.dtype is None:
            config.dtype = torch.float32
        return config

    update_tp_plan = update_attn_implementation

    def _process_model_before_weight_loading(self, model: Any, checkpoint_files: list[str] | None, **_: Any) -> None:
        if checkpoint_files is None:
            raise UsageError(
                "state_dict: a nested model is loaded from a folder or a repository, give its name instead"
            )
        if getattr(model.config, "distributed_config", None) is not None:
            raise UsageError("tp_plan: nested layers are not split over processes; give a device_map instead")
        folder = Path(checkpoint_files[0]).parent
        fetch_manifest(folder)
        self._checkpoint = Checkpoint(folder, self.view)
        self.gamma = int(self._checkpoint.manifest.speculation.get("gamma", DEFAULT_GAMMA))
        put_nested_layers(model, self._checkpoint)
        # transformers 5.16 takes sdpa, which cannot bound attention's scores, and leaves them unbounded.
        capped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
        if capped is not None and model.config._attn_implementation == "sdpa":
            model.set_attn_implementation("eager")
        self._types = {name: tensor.dtype for name, tensor in model.state_dict().items()}

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> None:
        for name, tensor in model.named_parameters():
            # transformers 5.16 leaves tensors that it renames, as in a model without head, in the type on disk.
            if tensor.dtype != self._types[name]:
                tensor.data = tensor.data.to(self._types[name])
        assert self._checkpoint is not None
        for name, module in model.named_modules():
            if isinstance(module, NestedLinear):
                module.requires_grad_(False)
                known = name in self._checkpoint.manifest.modules
                _check_codes(name if known else f"{model.base_model_prefix}.{name}", module, self._checkpoint)
        self._checkpoint = None  # which holds its shards open
        model.draft_view = partial(draft_view, model, self.gamma)

    def is_serializable(self) -> bool:
        """Never: raises `UsageError` that says how to get a copy."""
        raise UsageError(
            "save_pretrained: a loaded model does not know all that a nested checkpoint holds. Copy the folder it came "
            "from (of a Hub repository: 'bitnest-format pull ID --out FOLDER'), or write one view of it with "
            "'bitnest-format export SOURCE FOLDER --format hf'."
        )


def register() -> None:
    """Make the method known to transformers; calling it again changes nothing."""
    if QUANT_METHOD not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        register_quantization_config(QUANT_METHOD)(BitnestConfig)
        register_quantizer(QUANT_METHOD)(BitnestQuantizer)


def draft_config(path_or_repo_id: str | Path, **options: Any) -> Any:
    """The config of a nested checkpoint with its draft view chosen, for `from_pretrained(..., config=...)`.

    `options` are those of `AutoConfig.from_pretrained`. Raises `UsageError` where the model is no nested checkpoint.
    """
    config = AutoConfig.from_pretrained(path_or_repo_id, **options)
    block = getattr(config, "quantization_config", None)
    if not isinstance(block, dict) or block.get("quant_method") != QUANT_METHOD:
        raise UsageError(
            f"{path_or_repo_id}: config.json does not name {QUANT_METHOD!r}, so it is no nested checkpoint"
        )
    config.quantization_config = {**block, "view": "draft"}
    return config


def fetch_manifest(folder: Path) -> None:
    """Have the manifest beside weights that transformers took from the Hub: of the same commit, in the same cache.

    Does nothing for other folders. Raises `CheckpointError` where it cannot be had.
    """
    parts = folder.parts
    if (folder / MANIFEST_FILE).is_file() or "snapshots" not in parts:
        return
    place = len(parts) - 1 - parts[::-1].index("snapshots")
    if not parts[place - 1].startswith("models--"):
        return
    repo_id = parts[place - 1].removeprefix("models--").replace("--", "/")
    name = "/".join((*parts[place + 2 :], MANIFEST_FILE))
    try:
        cached_file(repo_id, name, revision=parts[place + 1], cache_dir=str(Path(*parts[: place - 1])))
    except OSError as error:
        raise CheckpointError(
            f"{repo_id}: {name} cannot be had, so it is no nested checkpoint, or its push did not come to its end. "
            "Where access needs a token, log in ('hf auth login', or HF_TOKEN): the argument token does not reach here."
        ) from error


def _check_codes(name: str, module: NestedLinear, checkpoint: Checkpoint) -> None:
    """Raise `CheckpointError` where a code pair is forbidden; what was offloaded is read from the checkpoint."""
    base, refinement = module.weight_packed, module.weight_refinement
    if base.is_meta:
        checkpoint.weight(name)
    elif refinement is not None and packing.any_forbidden_pair(base, refinement):
        raise forbidden_pair(name)
