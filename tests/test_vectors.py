"""The published vectors: reproducible, and met by the reference kernels too."""

from __future__ import annotations

import importlib.util
import json
import struct
from pathlib import Path

import pytest
import torch

from bitnest_format.kernels.reference import quantize_activation
from bitnest_format.kernels.reference_attention import kv_decode, kv_encode

VECTORS = Path(__file__).resolve().parents[1] / "spec" / "vectors"
ACTIVATION = json.loads((VECTORS / "activation.json").read_text(encoding="utf-8"))["cases"]
KV = json.loads((VECTORS / "kv.json").read_text(encoding="utf-8"))["cases"]


def floats(patterns):
    return torch.tensor([struct.unpack(">f", bytes.fromhex(p))[0] for p in patterns], dtype=torch.float32)


def bit_patterns(tensor):
    return [struct.pack(">f", value).hex() for value in tensor.flatten().tolist()]


def generator(name):
    spec = importlib.util.spec_from_file_location(name, VECTORS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their own module up.
    import sys

    sys.modules[name] = module
    spec.loader.exec_module(module)
    del sys.modules[name]
    return module


def test_arithmetic_vectors_are_those_of_the_generator():
    made = generator("generate_arithmetic")
    for build in (made.packing, made.composing, made.refinement, made.kv, made.activation):
        assert made.dump(build()) == (VECTORS / f"{build.__name__}.json").read_text(encoding="utf-8")


def test_checkpoint_vectors_are_those_of_the_generator():
    made = generator("generate_checkpoints")
    for folder, cases in (("valid", made.valid_cases()), ("invalid", made.invalid_cases())):
        for case in cases:
            root = VECTORS / folder / case.name
            stored = {
                path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()
            }
            assert case.make() == stored, case.name


@pytest.mark.parametrize("case", ACTIVATION, ids=lambda case: case["description"])
def test_activation_codes(case):
    codes, scale = quantize_activation(floats(case["input"]["row"]).unsqueeze(0))
    assert codes.dtype == torch.int8
    assert codes.flatten().tolist() == case["expected"]["codes"]
    assert bool(torch.isfinite(scale).all()) and bool((scale > 0).all())
    if case["expected"]["scale"] is not None:
        assert bit_patterns(scale) == [case["expected"]["scale"]["bits"]]


@pytest.mark.parametrize(
    "case", [case for case in KV if len(case["input"]["vector"]) % 2 == 0], ids=lambda case: case["description"]
)
def test_kv_cache_entries(case):
    """Heads have even sizes, since rotary embedding takes pairs; the vectors of odd length are for `nesting`."""
    planes, scale = kv_encode(floats(case["input"]["vector"]).unsqueeze(0))
    draft, target = (kv_decode(planes, scale, fine=fine) for fine in (False, True))
    if case["expected"]["scale"] is None:
        assert not draft.any() and not target.any()
    else:
        assert bit_patterns(scale) == [case["expected"]["scale"]["bits"]]
        assert bit_patterns(draft) == case["expected"]["draft"]
        assert bit_patterns(target) == case["expected"]["target"]
