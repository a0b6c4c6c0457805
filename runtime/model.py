"""One forward pass of a nested decoder: token ids in, logits out, by either view."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from bitnest_format.architecture import Architecture
from bitnest_format.checkpoint import CONFIG_FILE, Checkpoint
from bitnest_format.errors import CheckpointError, GenerationError
from bitnest_format.families import ATTENTION_INPUTS, ATTENTION_OUTPUT
from bitnest_format.kernels.reference import DECODE_ROWS, apply_rope, lm_head, rms_norm, soft_cap
from bitnest_format.kernels.reference_attention import attention
from bitnest_format.kernels.reference_linear import View, code_type
from bitnest_format.manifest import MANIFEST_FILE
from bitnest_format.runtime.kv_cache import KvCache
from bitnest_format.runtime.linear import StackedLinear
from bitnest_format.runtime.memory import available_bytes
from bitnest_format.runtime.mlp import Mixture, Mlp
from bitnest_format.runtime.rope import RopeTable
from bitnest_format.runtime.threads import worthwhile_threads

Unpack = Literal["auto", "load", "call"]

# Tokens of a prompt that are computed together.
PREFILL_ROWS = 256
# The share of available memory that unpacked weights may take under `unpack="auto"`.
UNPACKED_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Layer:
    """The parameters of one decoder layer.

    `head_norm`: gains of query and key heads `[Q + K, D]`, or None. `post_attention_norm`, `post_mlp_norm`: gains of
    norms of what is added to the stream, or None. `rope`: the tables of its positions.
    """

    input_norm: Tensor
    attention_inputs: StackedLinear
    head_norm: Tensor | None
    attention_output: StackedLinear
    mlp_norm: Tensor
    mlp: Mlp | Mixture
    post_attention_norm: Tensor | None
    post_mlp_norm: Tensor | None
    rope: RopeTable
    window: int | None


class Decoder:
    """The layers of one checkpoint, ready to run. Holds no state of any text: that is a `KvCache`.

    `views`: those that will be asked for. `unpack`: `"load"` unpacks once, to one code a byte for each view (four bytes
    on processors without exact byte products and on GPUs), and keeps cache entries decoded: fast, but both views of
    LLaMA-2-7B take 12.1 GiB (48.3 GiB). `"call"` keeps what is stored, half a byte a weight and plane (6.4 GiB with
    scales), and unpacks at every call. `"auto"` takes the first where its codes and its float32 head fit into half of
    the memory now available. Both give the same bits.

    Raises `CheckpointError` or `FileFormatError` for a broken checkpoint, `UnsupportedModelError` for a model outside
    what can be run.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        views: tuple[View, ...],
        unpack: Unpack = "auto",
        device: torch.device | str = "cpu",
    ):
        self.architecture = checkpoint.architecture()
        self.views = views
        self.device = torch.device(device)
        self._checkpoint = checkpoint
        self.nested_head = has_nested_head(checkpoint, self.architecture)
        self.unpack: Literal["load", "call"] = _choose_unpack(unpack, self.unpacked_bytes(), self.device)
        local = self.architecture.local_rope
        self.rope = RopeTable(self.architecture, self.device)
        self.local_rope = RopeTable(replace(self.architecture, rope=local), self.device) if local else self.rope
        self.head, self.head_bytes = self._load_head()
        names = self.architecture
        head = self.head if names.tied_embeddings else None
        self.embedding = head if isinstance(head, Tensor) else self._tensor(names.embedding)
        self.final_norm = self._gain(names.final_norm)
        self.layers = [self._load_layer(layer) for layer in range(names.layers)]
        self.view_bytes = {view: self._view_bytes(view) for view in views}
        self.product_bytes = max(linear.product_bytes for linear in self._linears())

    def unpacked_bytes(self) -> int:
        """Bytes of the codes and the float32 head that `unpack="load"` keeps; a nested head is codes too."""
        modules = self.architecture.modules(nested_head=self.nested_head)
        codes = code_type(self.device).itemsize * len(self.views) * sum(math.prod(shape) for _, shape in modules)
        return codes if self.nested_head else codes + 4 * math.prod(self.architecture.head_shape)

    def threads(self, rows: int) -> int:
        """CPU threads that a pass of `rows` rows is worth."""
        return worthwhile_threads(self.product_bytes * max(1, min(rows, PREFILL_ROWS) // DECODE_ROWS))

    def new_cache(self) -> KvCache:
        """An empty cache that fits this model."""
        architecture = self.architecture
        return KvCache(
            layers=architecture.layers,
            kv_heads=architecture.kv_heads,
            head_dim=architecture.head_dim,
            max_positions=architecture.max_positions,
            keep_decoded=self.unpack == "load",
            device=self.device,
        )

    def forward(self, ids: Tensor, position: int, cache: KvCache, view: View, fine_from: int = 0) -> Tensor:
        """The final hidden states of `ids` `[M]` at positions `position .. position + M - 1`: float32 `[M, H]`.

        Entries before `position` must be in the cache; those of `ids` are written to it, over what stood there.
        `cache.length` is left to the caller. Cache entries from `fine_from` on are read at KV8, older ones at KV4. Up
        to 16 rows are computed independently of each other, bit for bit.
        """
        size = self.architecture
        rows, stop = ids.shape[0], position + ids.shape[0]
        cache.reserve(stop)
        stream = self.embedding[ids].float()
        if size.embedding_factor != 1:
            stream = stream * size.embedding_factor
        turned_heads = size.heads + size.kv_heads
        for number, layer in enumerate(self.layers):
            normed = rms_norm(stream, layer.input_norm, size.norm_epsilon)
            heads = layer.attention_inputs(normed, view).view(rows, -1, size.head_dim)
            turned = heads[:, :turned_heads]
            if layer.head_norm is not None:
                turned = rms_norm(turned, layer.head_norm, size.norm_epsilon)
            turned = _rotated(turned, *layer.rope.rows(position, rows))
            cache.append(number, turned[:, size.heads :], heads[:, turned_heads:], position)
            keys, values = cache.read(number, stop, fine_from)
            attended = attention(
                turned[:, : size.heads],
                keys,
                values,
                position,
                layer.window,
                factor=size.attention_factor,
                cap=size.attention_cap,
            )
            added = layer.attention_output(attended.view(rows, -1), view)
            stream = stream + _normed(added, layer.post_attention_norm, size.norm_epsilon)
            normed = rms_norm(stream, layer.mlp_norm, size.norm_epsilon)
            stream = stream + _normed(layer.mlp(normed, view), layer.post_mlp_norm, size.norm_epsilon)
        return rms_norm(stream, self.final_norm, size.norm_epsilon)

    def logits(self, hidden: Tensor, view: View) -> Tensor:
        """float32 `[M, H]` final hidden states -> float32 `[M, V]`; `view` says which of a nested head's is used.

        Raises `GenerationError` where one is NaN.
        """
        logits = lm_head(hidden, self.head) if isinstance(self.head, Tensor) else self.head(hidden, view)
        if self.architecture.logit_cap is not None:
            logits = soft_cap(logits, self.architecture.logit_cap)
        if bool(logits.isnan().any()):
            raise not_a_number(self._checkpoint)
        return logits

    def prefill(self, ids: Tensor, cache: KvCache, view: View) -> Tensor:
        """Run a whole prompt `[T]` into an empty cache, in pieces; the last token's logits `[V]`."""
        hidden = torch.empty(0)
        for first in range(0, ids.shape[0], PREFILL_ROWS):
            piece = ids[first : first + PREFILL_ROWS]
            hidden = self.forward(piece, first, cache, view)
            cache.length = first + piece.shape[0]
        return self.logits(hidden[-1:], view)[0]

    def _load_head(self) -> tuple[Tensor | StackedLinear, dict[View, int]]:
        """The head, and the bytes that a pass of each view reads of it as stored."""
        architecture = self.architecture
        if self.nested_head:
            head = self._stacked({architecture.head_module: architecture.head_shape})
            return head, head.plane_bytes
        stored = self._tensor(architecture.embedding if architecture.tied_embeddings else architecture.head)
        weight = stored.float() if self.unpack == "load" else stored
        return weight, dict.fromkeys(self.views, stored.nbytes)

    def _load_layer(self, number: int) -> Layer:
        architecture = self.architecture
        prefix = architecture.layer_prefix(number)
        input_norm, mlp_norm = architecture.norm_names(number)
        post_attention, post_mlp = [*map(self._gain, architecture.post_norm_names(number))] or (None, None)
        return Layer(
            input_norm=self._gain(input_norm),
            attention_inputs=self._linear(prefix, ATTENTION_INPUTS),
            head_norm=self._head_norm(number),
            attention_output=self._linear(prefix, (ATTENTION_OUTPUT,)),
            mlp_norm=self._gain(mlp_norm),
            mlp=self._load_mlp(number),
            post_attention_norm=post_attention,
            post_mlp_norm=post_mlp,
            rope=self.rope if architecture.sliding_windows[number] is None else self.local_rope,
            window=architecture.sliding_windows[number],
        )

    def _load_mlp(self, number: int) -> Mlp | Mixture:
        architecture = self.architecture
        prefix = architecture.layer_prefix(number)
        mlps = [
            Mlp(self._linear(prefix, inputs), self._linear(prefix, (output,)), architecture.family.gelu)
            for inputs, output in architecture.mlps(number)
        ]
        experts = architecture.experts
        if experts is None or not architecture.is_mixture(number):
            return mlps[0]
        return Mixture(
            router=self._tensor(f"{prefix}{experts.router}.weight"),
            experts=mlps,
            active=experts.active,
            normalized=experts.normalized,
        )

    def _gain(self, name: str) -> Tensor:
        """A norm's gains, float32."""
        return self._tensor(name).float() + self.architecture.family.norm_offset

    def _head_norm(self, number: int) -> Tensor | None:
        names = self.architecture.head_norm_names(number)
        if not names:
            return None
        query, key = map(self._gain, names)
        return torch.cat((query.expand(self.architecture.heads, -1), key.expand(self.architecture.kv_heads, -1)))

    def _linear(self, prefix: str, linears: tuple[str, ...]) -> StackedLinear:
        return self._stacked({f"{prefix}{linear}": self.architecture.linear_shape(linear) for linear in linears})

    def _stacked(self, shapes: Mapping[str, tuple[int, int]]) -> StackedLinear:
        """Linear layers that read the same input, by name, with the shapes that config.json gives them."""
        for name, expected in shapes.items():
            if name not in self._checkpoint.manifest.modules:
                self._tensor(f"{name}.weight")
            else:
                check_module(self._checkpoint, name, expected)
        return StackedLinear(self._checkpoint, list(shapes), views=self.views, unpack=self.unpack, device=self.device)

    def _tensor(self, name: str) -> Tensor:
        return checked_tensor(self._checkpoint, name, self.architecture.tensors()[name]).to(self.device)

    def _view_bytes(self, view: View) -> int:
        attention = (linear for layer in self.layers for linear in (layer.attention_inputs, layer.attention_output))
        return sum(linear.plane_bytes[view] for linear in attention) + sum(
            layer.mlp.bytes_read(view) for layer in self.layers
        )

    def _linears(self) -> Iterator[StackedLinear]:
        for layer in self.layers:
            yield from (layer.attention_inputs, layer.attention_output, *layer.mlp.linears())


def _normed(added: Tensor, gain: Tensor | None, epsilon: float) -> Tensor:
    return added if gain is None else rms_norm(added, gain, epsilon)


def _rotated(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary embedding of the first elements of each head, as many as the tables cover; the rest passes through."""
    size = 2 * cosine.shape[-1]
    if size == heads.shape[-1]:
        return apply_rope(heads, cosine, sine)
    return torch.cat((apply_rope(heads[..., :size], cosine, sine), heads[..., size:]), dim=-1)


def has_nested_head(checkpoint: Checkpoint, architecture: Architecture) -> bool:
    """Whether the manifest lists the head. Raises `CheckpointError` where the config ties it to the embedding."""
    nested = architecture.head_module in checkpoint.manifest.modules
    if nested and architecture.tied_embeddings:
        raise CheckpointError(
            f"{CONFIG_FILE}: tie_word_embeddings is true, but {MANIFEST_FILE} lists the module "
            f"{architecture.head_module}; set it to false"
        )
    return nested


def check_module(checkpoint: Checkpoint, name: str, expected: tuple[int, int]) -> None:
    """Raise `CheckpointError` where a module's shape is not the one that config.json gives it."""
    found = checkpoint.module(name).shape
    if found != expected:
        raise CheckpointError(f"{name}: is {found[0]} x {found[1]}, config.json makes it {expected[0]} x {expected[1]}")


def checked_tensor(checkpoint: Checkpoint, name: str, expected: tuple[int, ...]) -> Tensor:
    """A stored tensor. Raises `CheckpointError` where its shape is not the one that config.json gives it."""
    tensor = checkpoint.tensor(name)
    if tuple(tensor.shape) != expected:
        raise CheckpointError(f"{name}: has shape {list(tensor.shape)}, config.json makes it {list(expected)}")
    return tensor


def not_a_number(checkpoint: Checkpoint) -> GenerationError:
    """What to raise once a logit was NaN."""
    return GenerationError(
        f"{checkpoint.folder.name}: the model's output is not a number. "
        "Look for broken tensors with 'bitnest-format validate --deep'."
    )


def _choose_unpack(unpack: Unpack, needed: int, device: torch.device) -> Literal["load", "call"]:
    if unpack != "auto":
        return unpack
    return "load" if needed <= UNPACKED_SHARE * available_bytes(device) else "call"
