"""Fixtures that several test modules share: tiny random models and nested checkpoints made of them."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import settings
from safetensors.torch import save_file
from torch import Tensor

from bitnest_format import nesting, packing
from bitnest_format.architecture import Architecture, read_architecture
from bitnest_format.checkpoint import (
    BASE_SUFFIX,
    REFINEMENT_SUFFIX,
    SCALE_SUFFIX,
    Checkpoint,
    CheckpointWriter,
    View,
    checkpoint_config,
)
from bitnest_format.manifest import Manifest, Module, Plane
from bitnest_format.runtime.device import DeviceChoice, choose_device
from bitnest_format.runtime.model import Decoder
from bitnest_format.shards import pending_tensor, tensor_sha256

# A loaded machine must not fail a test: time is measured by benchmarks alone.
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")

TinyModel = tuple[dict[str, Any], dict[str, Tensor]]

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
GELU = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "pad_token_id": 0}
# Fields that a model needs beyond those of Llama.
FIELDS: dict[str, dict[str, Any]] = {
    "phi3": {"pad_token_id": 0},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "decoder_sparse_step": 1},
    "gemma": GELU,
    "gemma2": {**GELU, "sliding_window": 16, "query_pre_attn_scalar": 100, "attn_logit_softcapping": 5.0},
    "gemma3_text": {
        **GELU,
        "sliding_window": 16,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 100,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
}


@pytest.fixture(autouse=True)
def automatic_device_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with a GPU, models that are opened without a device still run by the reference."""
    if torch.cuda.is_available():

        def choose(requested: str | torch.device) -> DeviceChoice:
            return choose_device("cpu" if requested == "auto" else requested)

        monkeypatch.setattr("bitnest_format.runtime.generate.choose_device", choose)


@pytest.fixture
def tiny_model() -> Callable[..., TinyModel]:
    """`(model_type="llama", tied=False, seed=0, **config_changes)` -> its config and bfloat16 tensors by name."""
    return make_tiny_model


@pytest.fixture
def tiny_checkpoint() -> Callable[..., Path]:
    """`(folder, model_type="llama", tied=False, seed=0, group_size=None, ...)` -> `folder`, made and filled.

    Round-to-nearest base, closed-form refinement, no rotation. `group_size=-1` is one group per row. Further
    keywords: `scale_type` (a torch dtype), `draft_only`, `shard_bytes`, `nested_head` (a head that is a module, for
    untied models), and any field of the config.
    """
    return write_tiny_checkpoint


class ExactCache:
    """In place of a nested KV cache, for one pass: entries as they are, as transformers and vLLM keep them."""

    def __init__(self) -> None:
        self.entries: dict[int, tuple[Tensor, Tensor]] = {}

    def reserve(self, entries: int) -> None:
        pass

    def append(self, layer: int, keys: Tensor, values: Tensor, position: int) -> None:
        self.entries[layer] = keys.transpose(0, 1), values.transpose(0, 1)

    def read(self, layer: int, stop: int, fine_from: int) -> tuple[Tensor, Tensor]:
        return self.entries[layer]


@pytest.fixture
def runtime_logits() -> Callable[..., Tensor]:
    """`(folder, ids, view)` -> what our own runtime computes but for the rounding of cache entries, `[T, V]`."""
    return compute_runtime_logits


@torch.inference_mode()
def compute_runtime_logits(folder: Path, ids: Tensor, view: View) -> Tensor:
    decoder = Decoder(Checkpoint(folder, view), (view,))
    return decoder.logits(decoder.forward(ids, 0, ExactCache(), view), view)  # type: ignore[arg-type]


def make_tiny_model(model_type: str = "llama", tied: bool = False, seed: int = 0, **config_changes: Any) -> TinyModel:
    """A random model small enough for unit tests; every value is exact in bfloat16."""
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[model_type]],
        "model_type": model_type,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "vocab_size": 320,
        "max_position_embeddings": 512,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
        **FIELDS.get(model_type, {}),
        **config_changes,
    }
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: _random_tensor(name, shape, generator).to(torch.bfloat16)
        for name, shape in read_architecture(config).tensors().items()
    }
    return config, tensors


@pytest.fixture
def in_transformers() -> Callable[..., torch.nn.Module]:
    """`(config, tensors)` -> transformers' model in float32, given every tensor by the name that checkpoints use."""
    return load_into_transformers


def load_into_transformers(config: dict[str, Any], tensors: dict[str, Tensor]) -> torch.nn.Module:
    """A model whose weights are exactly `tensors`; fails where one is missing or left over."""
    from transformers import AutoConfig, AutoModelForCausalLM

    dropped = ("model_type", "architectures", "quantization_config", "torch_dtype")
    fields = {key: value for key, value in config.items() if key not in dropped}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(config["model_type"], **fields), dtype=torch.float32, attn_implementation="eager"
    )
    state = _transformers_names({name: tensor.float() for name, tensor in tensors.items()})
    if config["model_type"] == "phi3":
        state = fuse_phi3(state)
    if config["tie_word_embeddings"]:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    return model.eval()


def fuse_phi3(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a Phi-3 model as its checkpoints hold them."""
    fused = dict(tensors)
    for name in tensors:
        for first, others, whole in (
            ("q_proj", ("k_proj", "v_proj"), "qkv_proj"),
            ("gate_proj", ("up_proj",), "gate_up_proj"),
        ):
            if name.endswith(f".{first}.weight"):
                parts = [fused.pop(name.replace(first, part)) for part in (first, *others)]
                fused[name.replace(first, whole)] = torch.cat(parts)
    return fused


def _transformers_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts stacked, as transformers' own modules hold them."""
    state: dict[str, Tensor] = {}
    experts: dict[str, dict[int, dict[str, Tensor]]] = {}
    for name, tensor in tensors.items():
        place, _, rest = name.replace(".block_sparse_moe.", ".mlp.").partition(".experts.")
        if rest:
            number, linear, _ = rest.split(".")
            experts.setdefault(f"{place}.experts", {}).setdefault(int(number), {})[linear] = tensor
        else:
            state[place] = tensor
    for place, numbered in experts.items():
        parts = [numbered[number] for number in range(len(numbered))]
        gate, up, down = ("w1", "w3", "w2") if "w1" in parts[0] else ("gate_proj", "up_proj", "down_proj")
        state[f"{place}.gate_up_proj"] = torch.stack([torch.cat((part[gate], part[up])) for part in parts])
        state[f"{place}.down_proj"] = torch.stack([part[down] for part in parts])
    return state


def _random_tensor(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if name.endswith("norm.weight"):
        return 0.5 + 1.5 * torch.rand(shape, generator=generator)
    values = torch.randn(shape, generator=generator)
    if name.endswith(".bias"):
        return 2 * values
    return values if name.startswith("model.embed_tokens") else values / shape[-1] ** 0.5


def write_tiny_checkpoint(
    folder: Path,
    *,
    model_type: str = "llama",
    tied: bool = False,
    seed: int = 0,
    group_size: int | None = None,
    scale_type: torch.dtype | None = None,
    draft_only: bool = False,
    shard_bytes: int = 5_000_000_000,
    nested_head: bool = False,
    side_files: Sequence[str] = (),
    **config_changes: Any,
) -> Path:
    """Write a nested checkpoint of `make_tiny_model` with the same arguments; returns `folder`.

    `side_files` lie in the folder already.
    """
    config, tensors = make_tiny_model(model_type, tied, seed, **config_changes)
    architecture = read_architecture(config)
    folder.mkdir(parents=True, exist_ok=True)
    writer = CheckpointWriter(folder, shard_bytes=shard_bytes)
    modules: dict[str, Module] = {}
    for name in dict(architecture.modules(nested_head=nested_head)):
        weight = tensors.pop(f"{name}.weight").float()
        bias = tensors.pop(f"{name}.bias", None)
        modules[name] = _add_module(writer, name, weight, bias, group_size, scale_type, draft_only)
    for name, tensor in tensors.items():
        writer.base[name] = pending_tensor(tensor)
    manifest = Manifest(
        created_by={"name": "bitnest-format tests", "version": "1"},
        views=("draft",) if draft_only else ("draft", "target"),
        nesting={
            "base_bits": 4,
            "refinement_bits": 4,
            "group_size": 128 if group_size is None else group_size,
            "base_method": "rtn",
            "base_bound": None,
            "refine_method": None if draft_only else "closed",
        },
        activation={"bits": 8, "granularity": "token", "symmetric": True},
        kv_cache={"base_bits": 4, "refinement_bits": 4, "granularity": "token_head"},
        speculation={"gamma": 4},
        rotation=None,
        source={"kind": "random", "name": _model_name(architecture, seed), "license": "apache-2.0"},
        modules=modules,
        unquantized=tuple(name for name in writer.base if not name.endswith((BASE_SUFFIX, SCALE_SUFFIX))),
        files={},
    )
    writer.finish(manifest, checkpoint_config(config), side_files)
    return folder


def _add_module(
    writer: CheckpointWriter,
    name: str,
    weight: Tensor,
    bias: Tensor | None,
    group_size: int | None,
    scale_type: torch.dtype | None,
    draft_only: bool,
) -> Module:
    inputs = weight.shape[1]
    if group_size is None:
        group_size = next(size for size in (128, 64, 32) if inputs % size == 0)
    size = inputs if group_size == -1 else group_size
    largest = nesting.group_max_abs(weight, size)
    dtype = scale_type or nesting.stored_scale_type(largest)
    scale = nesting.round_scale(largest / nesting.BASE_MAX, dtype)
    base = nesting.encode_base(weight, scale)
    refinement = nesting.encode_refinement(weight, base, scale)
    stored = {BASE_SUFFIX: packing.pack(base), SCALE_SUFFIX: scale.to(dtype)}
    planes = {suffix: Plane(name=f"{name}.{suffix}", sha256=tensor_sha256(t)) for suffix, t in stored.items()}
    writer.base |= {f"{name}.{suffix}": pending_tensor(tensor) for suffix, tensor in stored.items()}
    if bias is not None:
        writer.base[f"{name}.bias"] = pending_tensor(bias)
    words = packing.pack(refinement)
    refinement_name = f"{name}.{REFINEMENT_SUFFIX}"
    if not draft_only:
        writer.refinement[refinement_name] = pending_tensor(words)
    draft = nesting.draft_weight(base, scale)
    target = nesting.target_weight(base, refinement, scale)
    return Module(
        shape=(weight.shape[0], inputs),
        group_size=size,
        base=planes[BASE_SUFFIX],
        scale=planes[SCALE_SUFFIX],
        refinement=None if draft_only else Plane(name=refinement_name, sha256=tensor_sha256(words)),
        bias=None if bias is None else f"{name}.bias",
        saturation=None if draft_only else nesting.saturation(weight, base, scale),
        draft_error=float((draft - weight).norm() / weight.norm()),
        target_error=None if draft_only else float((target - weight).norm() / weight.norm()),
    )


def _model_name(architecture: Architecture, seed: int) -> str:
    digest = hashlib.sha256(repr((architecture, seed)).encode("utf-8")).hexdigest()
    return f"tests/{architecture.model_type}-{digest[:8]}"


CHAT_TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"


@pytest.fixture(scope="session")
def write_tokenizer() -> Callable[[Path], None]:
    """`(folder)`: put a byte-level tokenizer of 257 tokens with a chat template into the folder."""
    return put_tokenizer


def put_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel as ByteLevelDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel

    bytes_to_ids = {char: number for number, char in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocab={**bytes_to_ids, "<end>": 256}, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


@pytest.fixture(scope="session")
def write_source() -> Callable[..., Path]:
    """`(folder, model_type="llama", tied=False, seed=0, **config_changes)` -> `folder`, made: a model with a tokenizer,
    as Hugging Face's folders hold one."""
    return put_source


def put_source(folder: Path, *arguments: Any, **keywords: Any) -> Path:
    folder.mkdir(parents=True)
    config, tensors = make_tiny_model(*arguments, **keywords)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    put_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def documented_inputs() -> Callable[[Path, list[str]], None]:
    """`(folder, names)`: make the inputs that a page of the documentation is given, under the names it uses."""
    return put_documented_inputs


# Small enough that a conversion with its default settings takes seconds.
DOCUMENTED_MODEL = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "num_hidden_layers": 1,
    "eos_token_id": None,
}


def put_documented_checkpoint(folder: Path) -> None:
    folder.mkdir()
    put_tokenizer(folder)
    side_files = [file.name for file in folder.iterdir()]
    write_tiny_checkpoint(folder, side_files=side_files, **DOCUMENTED_MODEL)


def put_documented_gguf(file: Path) -> None:
    writer = load_helper("gguf_writer")
    model = make_tiny_model(**DOCUMENTED_MODEL)
    writer.write_gguf(file, model, kind=writer.Type.F16, tokens=writer.byte_tokens())


def put_documented_inputs(folder: Path, names: list[str]) -> None:
    makers: dict[str, Callable[[Path], object]] = {
        "SmolLM2-135M-Instruct": lambda place: put_source(place, **DOCUMENTED_MODEL),
        "examples": lambda place: place.symlink_to(Path(__file__).parents[1] / "examples"),
        "SmolLM2-135M-Instruct.F16.gguf": put_documented_gguf,
        "SmolLM2-BitNest": put_documented_checkpoint,
    }
    for name in names:
        makers[name](folder / name)


def load_helper(name: str) -> ModuleType:
    """`tests/<name>.py`. The tests are no package, so that their folders hide nobody's; helpers are loaded by path."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture(scope="session")
def helper() -> Callable[[str], ModuleType]:
    """`(name)` -> the module `tests/<name>.py`."""
    return load_helper


@pytest.fixture
def hub_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A running `HubServer` (see hub_server.py), with the client of this process pointed at it and nothing else.

    The client has an empty cache at `tmp_path / "hub"` and no token.
    """
    import huggingface_hub
    from huggingface_hub import constants

    with load_helper("hub_server").HubServer() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        template = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
        huggingface_hub.close_session()
        yield server
        huggingface_hub.close_session()
