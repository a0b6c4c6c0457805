"""The nested KV cache: every entry is stored once, as base and refinement codes, and read at either precision.

The target always reads KV8, both planes. A draft reads KV8 while the text is short, and KV4, the base plane alone,
beyond a length that can be set; the newest entries can stay at KV8 for it (arXiv 2610.02800, section 3.4 and appendix
A.2). Drafts append entries of their own; verification writes the same positions again, and `truncate` drops the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bitnest_format.errors import UsageError
from bitnest_format.kernels.reference_attention import kv_decode, kv_encode

FIRST_CAPACITY = 256
# Capacities are multiples of this, so that every head's entries start aligned alike.
CAPACITY_STEP = 64


# Drafts switch to KV4 beyond this many entries where entries are decoded at every read. Measured with SmolLM2-135M on
# one core of an EPYC, milliseconds of a draft step apart from its weights, KV8 and KV4: 14 and 6 at 512 entries, 70 and
# 35 at 2048, 293 and 154 at 8000. Where views are kept as float32 both cost the same (6 at 2048), so nothing is gained.
SWITCH_LENGTH = 2048
# Drafted tokens accepted there at 1000 entries: 0.51 on KV8; on KV4 with the newest 0, 32, 128 and 512 entries at KV8
# 0.40, 0.47, 0.51 and 0.52 (some 250 drafts each).
RECENT = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSettings:
    """How drafts read the cache; lengths in tokens.

    Up to `draft_switch_length` entries drafts read KV8; beyond it they read KV4, except for the `recent` newest
    entries. None is the measured default: `SWITCH_LENGTH` where a cache decodes entries at every read (under
    `unpack="call"`), never where it keeps them decoded.
    """

    draft_switch_length: int | None = None
    recent: int = RECENT

    def __post_init__(self) -> None:
        for name in ("draft_switch_length", "recent"):
            value = getattr(self, name)
            if value is None and name == "draft_switch_length":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise UsageError(f"kv.{name} is {value!r}, expected a whole number of tokens, 0 or more")

    def draft_fine_from(self, length: int, *, keep_decoded: bool) -> int:
        """The first of `length` entries that a draft reads at KV8; all before it are read at KV4."""
        switch = self.draft_switch_length
        if switch is None:
            switch = length if keep_decoded else SWITCH_LENGTH
        return 0 if length <= switch else max(0, length - self.recent)


class KvCache:
    """Planes and scales of all layers, for one sequence. Not thread-safe.

    `planes`: uint8 `[layers, 2 planes, 2 (keys, values), K, capacity, D / 2]`; `scale`: float32
    `[layers, 2, K, capacity]`. `length` entries are valid. With `keep_decoded` each view is also kept as float32 once
    it has been read (4 bytes an element and view), otherwise it is decoded at every read.
    """

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        max_positions: int,
        keep_decoded: bool = True,
        device: torch.device | str = "cpu",
        capacity: int = FIRST_CAPACITY,
    ):
        self.layers, self.kv_heads, self.head_dim = layers, kv_heads, head_dim
        self.max_positions = max_positions
        self.keep_decoded = keep_decoded
        self.device = torch.device(device)
        self.length = 0
        self.capacity = 0
        self.planes = self.scale = torch.empty(0)
        self._views: dict[bool, list[Tensor]] = {}
        self._decoded: dict[bool, list[int]] = {}
        self.reserve(min(capacity, max_positions))

    def reserve(self, entries: int) -> None:
        """Make room for `entries`, at least doubling; what is stored is kept."""
        if entries <= self.capacity:
            return
        wanted = min(max(entries, 2 * self.capacity), max(entries, self.max_positions))
        capacity = -(-wanted // CAPACITY_STEP) * CAPACITY_STEP
        old = self.capacity
        shape = (self.layers, 2, self.kv_heads, capacity)
        planes = torch.empty(self.layers, 2, *shape[1:], self.head_dim // 2, dtype=torch.uint8, device=self.device)
        scale = torch.empty(shape, dtype=torch.float32, device=self.device)
        if old:
            planes[..., :old, :] = self.planes
            scale[..., :old] = self.scale
        self.planes, self.scale, self.capacity = planes, scale, capacity
        self._views, self._decoded = {}, {}

    def append(self, layer: int, keys: Tensor, values: Tensor, position: int) -> None:
        """Quantize and store entries from `position` on, over whatever stood there.

        `keys`, `values`: float32 `[M, K, D]`. Room for them must have been reserved.
        """
        planes, scale = kv_encode(torch.stack((keys, values)).transpose(1, 2))
        stop = position + keys.shape[0]
        self.planes[layer, ..., position:stop, :] = planes
        self.scale[layer, ..., position:stop] = scale
        for decoded in self._decoded.values():
            decoded[layer] = min(decoded[layer], position)

    def read(self, layer: int, stop: int, fine_from: int) -> tuple[Tensor, Tensor]:
        """Keys and values of entries `0 .. stop - 1`, float32 `[K, stop, D]` each, valid until the next `append`.

        Entries from `fine_from` on come at KV8, older ones at KV4.
        """
        if fine_from <= 0:
            both = self._read(layer, 0, stop, fine=True)
        elif fine_from >= stop:
            both = self._read(layer, 0, stop, fine=False)
        else:
            old = self._read(layer, 0, fine_from, fine=False)
            both = torch.cat((old, self._read(layer, fine_from, stop, fine=True)), dim=2)
        return both[0], both[1]

    def truncate(self, length: int) -> None:
        """Forget every entry from `length` on."""
        self.length = length
        for decoded in self._decoded.values():
            decoded[:] = [min(count, length) for count in decoded]

    def entry_bytes(self, *, fine: bool) -> int:
        """Bytes that one view of one entry takes in the planes and scales of a layer, keys and values."""
        return 2 * self.kv_heads * (self.head_dim // 2 * (2 if fine else 1) + 4)

    def memory_bytes(self) -> int:
        """Bytes held: planes, scales, and the views kept as float32."""
        views = sum(view.nbytes for kept in self._views.values() for view in kept)
        return self.planes.nbytes + self.scale.nbytes + views

    def check(self) -> None:
        """Raise `AssertionError` where the cache contradicts itself; for tests, after any operation."""
        assert 0 <= self.length <= self.capacity, f"length {self.length} of capacity {self.capacity}"
        scale = self.scale[..., : self.length]
        assert bool((torch.isfinite(scale) & (scale > 0)).all()), "a stored scale is not finite and positive"
        for fine, counts in self._decoded.items():
            for layer, count in enumerate(counts):
                assert count <= self.capacity, f"layer {layer}: {count} decoded entries"
                fresh = self._decode(layer, 0, count, fine)
                kept = self._views[fine][layer][:, :, :count]
                assert torch.equal(kept, fresh), f"layer {layer}: the view kept differs from the planes"

    def _read(self, layer: int, start: int, stop: int, *, fine: bool) -> Tensor:
        if not self.keep_decoded:
            return self._decode(layer, start, stop, fine)
        if fine not in self._views:
            shape = (2, self.kv_heads, self.capacity, self.head_dim)
            self._views[fine] = [
                torch.empty(shape, dtype=torch.float32, device=self.device) for _ in range(self.layers)
            ]
            self._decoded[fine] = [0] * self.layers
        view, done = self._views[fine][layer], self._decoded[fine][layer]
        if done < stop:
            view[:, :, done:stop] = self._decode(layer, done, stop, fine)
            self._decoded[fine][layer] = stop
        return view[:, :, start:stop]

    def _decode(self, layer: int, start: int, stop: int, fine: bool) -> Tensor:
        planes, scale = self.planes[layer, ..., start:stop, :], self.scale[layer, ..., start:stop]
        return kv_decode(planes, scale, fine=fine)
