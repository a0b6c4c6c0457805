"""Every kernel is compiled for three architectures without a GPU, and its machine code must keep what makes it fast."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from bitnest_format.kernels import catalogue, compilation
from bitnest_format.kernels.compilation import Expectation, Facts, read_listing, table, violations

needs_compiler = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton, which compiles without a GPU")

KERNELS = """
import triton
import triton.language as tl


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
"""
CASES = """
import json
import sys
from dataclasses import asdict

from bitnest_format.kernels.compilation import KernelCase, examine

for architecture in (80, 90):
    for case in json.loads(sys.argv[1]):
        print(json.dumps([case["function"], architecture, asdict(examine(KernelCase(**case), architecture))]))
"""
TOYS = [
    {
        "function": "copy_words",
        "arguments": {"p_in": "*i32", "p_out": "*i32", "count": "i32:16"},
        "constants": {"BLOCK": 1024},
    },
    {"function": "store_early", "arguments": {"p_in": "*i32", "p_out": "*i32"}, "constants": {"BLOCK": 128}},
    {"function": "double", "arguments": {"p_in": "*u8", "p_out": "*fp32"}, "constants": {"BLOCK": 128}},
    {
        "function": "dot",
        "arguments": {"p_a": "*i8", "p_b": "*i8", "p_out": "*i32"},
        "constants": {"M": 16, "K": 64, "N": 16},
    },
    {
        "function": "crowded",
        "arguments": {"p_in": "*fp32", "p_out": "*fp32"},
        "constants": {"M": 128, "N": 128},
    },
]


def run_compiled(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run this interpreter where kernels are compiled, not interpreted, and no GPU is seen."""
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": str(folder), "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("TRITON_INTERPRET", None)
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, encoding="utf-8", env=environment, check=False
    )


@pytest.mark.parametrize("architecture", compilation.ARCHITECTURES)
@needs_compiler
def test_every_kernel_keeps_its_machine_code(architecture: int, tmp_path: Path) -> None:
    done = run_compiled(tmp_path, "-m", "bitnest_format.kernels.compilation", "--json", "--arch", str(architecture))
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    assert report["violations"] == []
    assert done.returncode == 0
    assert [kernel["name"] for kernel in report["kernels"]] == [case.name for case in catalogue.CASES]


def test_names_of_kernels_are_unique() -> None:
    names = [case.name for case in catalogue.CASES]
    assert len(set(names)) == len(names)


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Mapping[tuple[str, int], Facts]:
    """Facts of small kernels, each of which shows one thing."""
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "toy_kernels.py").write_text(KERNELS, encoding="utf-8")
    cases = json.dumps([{**case, "name": case["function"], "module": "toy_kernels"} for case in TOYS])
    done = run_compiled(folder, "-c", CASES, cases)
    assert done.returncode == 0, done.stderr
    facts = {}
    for line in done.stdout.splitlines():
        name, architecture, found = json.loads(line)
        found["loads"] = {int(size): number for size, number in found["loads"].items()}
        facts[name, architecture] = Facts(**found)
    return facts


@needs_compiler
def test_examine_counts_wide_loads_and_waits(toys: Mapping[tuple[str, int], Facts]) -> None:
    hopper, ampere = toys["copy_words", 90], toys["copy_words", 80]
    assert hopper.loads == ampere.loads == {16: 2}
    assert (hopper.waits, ampere.waits) == (1, 0)
    assert violations(hopper, Expectation(wide_loads=2)) == []
    assert violations(hopper, Expectation(wide_loads=3)) == [
        "16-byte loads: 2, expected 3 or more; by bytes {16: 2}",
    ]


@needs_compiler
def test_examine_sees_a_store_that_does_not_wait(toys: Mapping[tuple[str, int], Facts]) -> None:
    assert violations(toys["store_early", 90], Expectation()) == [
        "dependent launch: 1 stores before the wait for earlier kernels",
    ]
    assert violations(toys["store_early", 80], Expectation()) == []


@needs_compiler
def test_examine_sees_double_precision(toys: Mapping[tuple[str, int], Facts]) -> None:
    facts = toys["double", 90]
    assert facts.fp64 > 0
    assert facts.loads == {1: 1}
    assert violations(facts, Expectation()) == [f"FP64: {facts.fp64} instructions"]


@needs_compiler
@pytest.mark.parametrize("architecture", [80, 90])
def test_examine_sees_tensor_cores(architecture: int, toys: Mapping[tuple[str, int], Facts]) -> None:
    facts = toys["dot", architecture]
    assert facts.int8_mma > 0
    assert facts.half_mma == facts.dp4a == 0
    assert violations(facts, Expectation(byte_products=True, tensor_cores=True)) == []
    assert violations(toys["copy_words", architecture], Expectation(byte_products=True, tensor_cores=True)) == [
        "byte products: neither dp4a nor int8 matrix instructions",
        "tensor cores: no matrix instruction",
    ]


@needs_compiler
def test_examine_sees_spills(toys: Mapping[tuple[str, int], Facts]) -> None:
    facts = toys["crowded", 90]
    assert facts.registers == 255
    assert facts.spills > 0
    assert facts.local_bytes > 0
    assert violations(facts, Expectation()) == [
        f"spills: {facts.spills} instructions on {facts.local_bytes} bytes of local memory"
    ]


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
    waits=1,
    stores_before_wait=1,
)


def test_read_listing() -> None:
    assert read_listing(LISTING, {"REG": 26, "STACK": 8, "LOCAL": 0}, 1024) == FACTS


def test_violations_of_shared_memory() -> None:
    facts = replace(FACTS, spills=0, local_bytes=0, stores_before_wait=0, shared_bytes=49153)
    assert violations(facts, Expectation()) == ["shared memory: 49153 bytes, expected at most 49152"]
    assert violations(facts, Expectation(shared_bytes=None)) == []


def test_table() -> None:
    assert table([("kernel of rows", 90, FACTS)]).splitlines() == [
        "kernel          sm  regs  smem  spills  instr  ld16  ld8  ld<8  dp4a  imma  hmma  cvt",
        "kernel of rows  90    26  1024       2     15     2    1     2     1     0     0    1",
    ]


@needs_compiler
def test_compile_case_names_wrong_arguments(tmp_path: Path) -> None:
    (tmp_path / "toy_kernels.py").write_text(KERNELS, encoding="utf-8")
    case = (
        "KernelCase(name='copy', module='toy_kernels', function='copy_words', arguments={'p_in': '*i32', 'n': 'i32'})"
    )
    code = f"from bitnest_format.kernels.compilation import *; compile_case({case}, 90)"
    done = run_compiled(tmp_path, "-c", code)
    assert done.stderr.splitlines()[-1] == (
        "ValueError: copy: arguments missing: ['p_out', 'count', 'BLOCK'], not of copy_words: ['n']"
    )


def test_interpreted_kernels_are_not_compiled(capsys: pytest.CaptureFixture[str]) -> None:
    assert os.environ["TRITON_INTERPRET"] == "1"
    with pytest.raises(SystemExit):
        compilation.main([])
    assert capsys.readouterr().err.endswith("kernels are interpreted while TRITON_INTERPRET is set; unset it\n")
