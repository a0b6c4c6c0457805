"""What the machine says about free memory, and what is chosen by it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bitnest_format.runtime import memory
from bitnest_format.runtime.generate import NestedModel


def test_meminfo(tmp_path: Path) -> None:
    path = tmp_path / "meminfo"
    assert memory._meminfo(path) is None
    path.write_text("MemTotal: 9 kB\nMemAvailable:    1024 kB\n", encoding="utf-8")
    assert memory._meminfo(path) == 1 << 20


@pytest.mark.parametrize(("limit", "free"), [("max", None), ("1000", 400), ("500", 0)])
def test_cgroup(limit: str, free: int | None, tmp_path: Path) -> None:
    assert memory._cgroup(tmp_path) is None
    (tmp_path / "memory.max").write_text(f"{limit}\n", encoding="utf-8")
    (tmp_path / "memory.current").write_text("600\n", encoding="utf-8")
    assert memory._cgroup(tmp_path) == free


def test_available_bytes_of_this_machine() -> None:
    assert memory.available_bytes(torch.device("cpu")) > 0


def test_auto_unpacks_at_load_where_half_of_the_memory_holds_it(
    tmp_path: Path, tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_checkpoint(tmp_path / "model")
    needed = NestedModel.open(folder, unpack="load").decoder.unpacked_bytes()
    for available, expected in ((2 * needed, "load"), (2 * needed - 1, "call")):
        monkeypatch.setattr("bitnest_format.runtime.model.available_bytes", lambda device, size=available: size)
        decoder = NestedModel.open(folder).decoder
        assert decoder.unpack == expected
        assert decoder.new_cache().keep_decoded == (expected == "load")
        # What was promised is what is kept.
        linears = [part for linear in decoder._linears() for part in linear.parts]
        codes = sum(codes.nbytes for part in linears for codes in (part.draft, part.target) if codes is not None)
        assert codes == (needed - 4 * 320 * 256 if expected == "load" else 0)
