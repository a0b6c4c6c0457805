"""Every kernel is compiled for three architectures without a GPU, and its machine code must keep what makes it fast."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bitnest_format.kernels import compilation
from bitnest_format.kernels.compilation import (
    Compiled,
    Expectation,
    Facts,
    mma_layouts,
    read_listing,
    table,
    violations,
)

pytest.importorskip("triton")

KERNELS = """
import torch
import triton
import triton.language as tl

from bitnest_format.kernels.compilation import Expectation, KernelCase
from bitnest_format.kernels.launch import features


@triton.jit
def copy_words(p_in, p_out, count, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(p_out + offsets, tl.load(p_in + offsets, mask=offsets < count, other=0))


@triton.jit
def store_early(p_in, p_out, BLOCK: tl.constexpr, PDL: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(p_out + offsets, offsets)
    if PDL:
        tl.extra.cuda.gdc_wait()
    tl.store(p_out + BLOCK + offsets, tl.load(p_in + offsets))


@triton.jit
def double(p_in, p_out, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(p_out + offsets, tl.sqrt(tl.load(p_in + offsets).to(tl.float64)).to(tl.float32))


@triton.jit
def dot(p_a, p_b, p_out, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr):
    rows, inner, columns = tl.arange(0, M)[:, None], tl.arange(0, K), tl.arange(0, N)[None, :]
    a = tl.load(p_a + rows * K + inner[None, :])
    b = tl.load(p_b + columns * K + inner[:, None])
    tl.store(p_out + rows * N + columns, tl.dot(a, b, out_dtype=tl.int32))


@triton.jit
def crowded(p_in, p_out, M: tl.constexpr, N: tl.constexpr):
    offsets = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    first = tl.load(p_in + offsets)
    second = tl.load(p_in + M * N + offsets)
    third = tl.load(p_in + 2 * M * N + offsets)
    order = tl.sum(tl.sum(first, 1), 0) * tl.sum(tl.sum(second, 1), 0) * tl.sum(tl.sum(third, 1), 0)
    tl.store(p_out + offsets, first * order + second / (third + order))


def launch(kernel, *types, **options):
    def call():
        tensors = [torch.empty(8, dtype=kind, device="meta") for kind in types]
        if "PDL" in kernel.arg_names:
            pdl = features(tensors[0].device).pdl
            kernel[(7, 2)](*tensors, **options, PDL=pdl, launch_pdl=pdl)
        else:
            kernel[(7, 2)](*tensors, **options)

    return call


def launch_two():
    launch(copy_words, torch.int32, torch.int32, count=1024, BLOCK=1024)()
    launch(double, torch.uint8, torch.float32, BLOCK=128)()


def cases():
    words = torch.int32
    return [
        KernelCase("words", launch(copy_words, words, words, count=1024, BLOCK=1024), (Expectation(wide_loads=2),)),
        KernelCase("early", launch(store_early, words, words, BLOCK=128), (Expectation(),)),
        KernelCase("double", launch(double, torch.uint8, torch.float32, BLOCK=128), (Expectation(),)),
        KernelCase("dot", launch(dot, torch.int8, torch.int8, words, M=16, K=64, N=16), (Expectation(),)),
        KernelCase("crowded", launch(crowded, torch.float32, torch.float32, M=128, N=128), (Expectation(),)),
        KernelCase("two", launch_two, (Expectation(wide_loads=3),)),
    ]
"""
# The table of toy kernels takes the place of the real one.
RUN_TOYS = """
import sys

import toy_kernels

sys.modules["bitnest_format.kernels.catalogue"] = toy_kernels
from bitnest_format.kernels import compilation

sys.exit(compilation.main(sys.argv[1:]))
"""


def run_compiled(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run this interpreter where kernels are compiled, not interpreted, and no GPU is seen."""
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": str(folder), "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("TRITON_INTERPRET", None)
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, encoding="utf-8", env=environment, check=False
    )


@pytest.mark.parametrize("architecture", compilation.ARCHITECTURES)
def test_every_kernel_keeps_its_machine_code(architecture: int, tmp_path: Path) -> None:
    done = run_compiled(tmp_path, "-m", "bitnest_format.kernels.compilation", "--json", "--arch", str(architecture))
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    assert "\n".join(report["violations"]) == ""
    assert done.returncode == 0
    assert len(report["kernels"]) >= len({kernel["case"] for kernel in report["kernels"]}) > 0


def test_names_of_cases_are_unique() -> None:
    from bitnest_format.kernels.catalogue import cases

    names = [case.name for case in cases()]
    assert len(set(names)) == len(names)


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report on small kernels, each of which shows one thing: facts by case and architecture, and violations."""
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "toy_kernels.py").write_text(KERNELS, encoding="utf-8")
    done = run_compiled(folder, "-c", RUN_TOYS, "--json", "--arch", "80", "90", "--dump", str(folder / "dump"))
    assert done.stdout, done.stderr
    assert done.returncode == 1
    report = json.loads(done.stdout)
    facts: dict[tuple[str, int], list[Facts]] = {}
    for kernel in report["kernels"]:
        key = kernel.pop("case"), kernel.pop("arch")
        kernel["mma_layouts"] = tuple(kernel["mma_layouts"])
        kernel["loads"] = {int(size): number for size, number in kernel["loads"].items()}
        facts.setdefault(key, []).append(Facts(**kernel))
    return {"facts": facts, "violations": report["violations"], "dump": folder / "dump"}


def facts_of(toys: dict[str, Any], case: str, architecture: int) -> Facts:
    (facts,) = toys["facts"][case, architecture]
    assert isinstance(facts, Facts)
    return facts


def test_wide_loads_and_waits_are_counted(toys: dict[str, Any]) -> None:
    hopper, ampere = facts_of(toys, "words", 90), facts_of(toys, "words", 80)
    assert hopper.loads == ampere.loads == {16: 2}
    assert (hopper.waits, ampere.waits) == (1, 0)
    assert (hopper.kernel, hopper.blocks, hopper.warps) == ("copy_words", 14, 4)
    assert violations(hopper, Expectation(wide_loads=2)) == []
    assert violations(hopper, Expectation(wide_loads=3)) == [
        "16-byte loads: 2, expected 3 or more; by bytes {16: 2}",
    ]


def test_a_store_that_does_not_wait_is_seen(toys: dict[str, Any]) -> None:
    sentence = "dependent launch: 1 stores before the wait for earlier kernels"
    assert violations(facts_of(toys, "early", 90), Expectation()) == [sentence]
    assert violations(facts_of(toys, "early", 80), Expectation()) == []
    assert f"early, sm_90: {sentence}" in toys["violations"]


def test_a_kernel_waits_where_it_may_start_early() -> None:
    facts = replace(FACTS, spills=0, local_bytes=0, stores_before_wait=0)
    assert violations(facts, Expectation()) == []
    assert violations(replace(facts, waits=0), Expectation()) == ["dependent launch: no wait for earlier kernels"]
    assert violations(replace(facts, overlaps=False), Expectation()) == [
        "dependent launch: waits for earlier kernels, but is launched after their end"
    ]


def test_double_precision_is_seen(toys: dict[str, Any]) -> None:
    facts = facts_of(toys, "double", 90)
    assert facts.fp64 > 0
    assert facts.loads == {1: 1}
    assert violations(facts, Expectation()) == [f"FP64: {facts.fp64} instructions"]


@pytest.mark.parametrize("architecture", [80, 90])
def test_tensor_cores_are_seen(architecture: int, toys: dict[str, Any]) -> None:
    facts = facts_of(toys, "dot", architecture)
    assert facts.int8_mma > 0
    assert facts.half_mma == facts.dp4a == 0
    assert violations(facts, Expectation(byte_products=True, tensor_cores=True)) == []
    words = facts_of(toys, "words", architecture)
    assert violations(words, Expectation(byte_products=True, tensor_cores=True)) == [
        "byte products: neither dp4a nor int8 matrix instructions",
        "tensor cores: no matrix instruction",
    ]


def test_spills_are_seen(toys: dict[str, Any]) -> None:
    facts = facts_of(toys, "crowded", 90)
    assert facts.registers == 255
    assert facts.spills > 0
    assert facts.local_bytes > 0
    assert violations(facts, Expectation()) == [
        f"spills: {facts.spills} instructions on {facts.local_bytes} bytes of local memory"
    ]


def test_every_kernel_of_a_call_is_examined(toys: dict[str, Any]) -> None:
    first, second = toys["facts"]["two", 80]
    assert (first.kernel, second.kernel) == ("copy_words", "double")
    assert [sentence for sentence in toys["violations"] if sentence.startswith("two, sm_80")] == [
        "two, sm_80: 2 kernels launched, expected 1",
        "two, sm_80: 16-byte loads: 2, expected 3 or more; by bytes {16: 2}",
    ]
    assert (toys["dump"] / "two-1-sm80.sass").is_file()
    assert "sm_90a" in (toys["dump"] / "words-0-sm90.ptx").read_text(encoding="utf-8")


LISTING = """
.text.kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   PREEXIT ;
        /*0020*/               @P0 LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
        /*0030*/              @!P1 LDG.E.64 R4, desc[UR4][R2.64] ;
        /*0040*/             @!UP1 LDG.E R4, desc[UR4][R2.64] ;
        /*0050*/                   LDG.E.U8 R4, desc[UR4][R2.64] ;
        /*0060*/                   LDGSTS.E.BYPASS.LTC128B.128 [R4], desc[UR4][R2.64] ;
        /*0070*/                   IDP.4A.S8.S8 R4, R4, R5, RZ ;
        /*0080*/                   I2FP.F32.S32 R4, R4 ;
        /*0090*/                   STL.64 [R1], R4 ;
        /*00a0*/                   LDL.64 R4, [R1] ;
        /*00b0*/                   RED.E.ADD.F32.FTZ.RN [R2.64], R4 ;
        /*00c0*/                   ACQBULK ;
        /*00d0*/                   STG.E.128 desc[UR4][R2.64], R4 ;
        /*00e0*/                   EXIT ;
.L_x_0:
        /*00f0*/                   BRA `(.L_x_0);
        /*0100*/                   NOP;
"""
FACTS = Facts(
    kernel="kernel",
    blocks=12,
    warps=4,
    instructions=15,
    registers=26,
    shared_bytes=1024,
    local_bytes=8,
    spills=2,
    loads={1: 1, 4: 1, 8: 1, 16: 2},
    dp4a=1,
    int8_mma=0,
    half_mma=0,
    fp64=0,
    conversions=1,
    barriers=0,
    overlaps=True,
    waits=1,
    loads_before_wait=2,
    stores_before_wait=1,
)


def test_read_listing() -> None:
    result = SimpleNamespace(metadata=SimpleNamespace(shared=1024, launch_pdl=True), asm={"ttgir": ""})
    compiled = Compiled(name="kernel", blocks=12, warps=4, result=result)
    assert read_listing(LISTING, {"REG": 26, "STACK": 8, "LOCAL": 0}, compiled) == FACTS


TTGIR = """
#blocked = #ttg.blocked<{sizePerThread = [1, 4], threadsPerWarp = [8, 4], warpsPerCTA = [4, 1], order = [1, 0]}>
#blocked1 = #ttg.blocked<{sizePerThread = [4], threadsPerWarp = [32], warpsPerCTA = [4], order = [0]}>
#other = #ttg.slice<{dim = 0, parent = #blocked}>
#loc7 = loc("p")
    %1 = tt.elementwise_inline_asm "{ mma.sync.aligned.m16n8k32 }" {packed_element = 8 : i32} %b, %a : ENDS loc(#loc7)
    %2 = tt.elementwise_inline_asm "{ dp4a }" {packed_element = 1 : i32} %b : tensor<64xi32, #blocked1> loc(#loc7)
"""


def test_mma_layouts() -> None:
    straight = "sizePerThread = [1, 4], threadsPerWarp = [8, 4], warpsPerCTA = [4, 1], order = [1, 0]"
    flat = "sizePerThread = [4], threadsPerWarp = [32], warpsPerCTA = [4], order = [0]"
    tile = "tensor<64x16xi32, #blocked>"
    one = TTGIR.replace("ENDS", f"{tile}, {tile} -> {tile}")
    two = TTGIR.replace("ENDS", f"{tile}, tensor<64xi32, #blocked1> -> {tile}")
    assert mma_layouts(one) == (straight,)
    assert mma_layouts(two) == (straight, flat)
    facts = replace(FACTS, spills=0, local_bytes=0, stores_before_wait=0)
    assert violations(replace(facts, mma_layouts=mma_layouts(one)), Expectation()) == []
    assert violations(replace(facts, mma_layouts=mma_layouts(two)), Expectation()) == [
        f"matrix operands: {flat}, expected {straight}"
    ]


def test_violations_of_shared_memory() -> None:
    facts = replace(FACTS, spills=0, local_bytes=0, stores_before_wait=0, shared_bytes=49153)
    assert violations(facts, Expectation()) == ["shared memory: 49153 bytes, expected at most 49152"]
    assert violations(facts, Expectation(shared_bytes=None)) == []


def test_table() -> None:
    assert table([("kernel of rows", 90, FACTS)]).splitlines() == [
        "case            sm  blocks  warps  regs  smem  spills  instr  ld16  ld8  ld<8  dp4a  imma  hmma  cvt  early",
        "kernel of rows  90      12      4    26  1024       2     15     2    1     2     1     0     0    1      2",
    ]


def test_interpreted_kernels_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match="kernels are interpreted while TRITON_INTERPRET is set; unset it"):
        compilation.compile_launches(lambda: None, 90)
