"""Kernels compiled ahead of time, without a GPU, and what their machine code shows.

Interpreted tests say whether a kernel is right; these facts say whether it can be fast: that weights come in 16-byte
loads, that byte products run as dp4a or on the tensor cores, that nothing spills. A case calls a kernel's public
function with tensors of real sizes but without memory (`device="meta"`); what it would launch is compiled instead, with
the tiles and warps it has chosen. `python -m bitnest_format.kernels.compilation` prints the facts of every case of
`catalogue`. Only Triton's compiler and the disassemblers beside it are needed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from bitnest_format.kernels import launch as launch_module
from bitnest_format.kernels.launch import Features

# Ampere, Orin and Hopper; Triton compiles 90 as sm_90a.
ARCHITECTURES = (80, 87, 90)
# Overlap of kernels (programmatic dependent launch) exists from here on.
FIRST_WITH_PDL = 90
# Above this a kernel asks for another carve-out of the L1 cache, which costs its neighbours in a graph.
DECODE_SHARED_BYTES = 48 * 1024
# Where hand-written matrix instructions expect a tile: four lanes to a row, 16 bytes each, warps below each other.
MMA_LAYOUT = "sizePerThread = [1, 4], threadsPerWarp = [8, 4], warpsPerCTA = [{}, 1], order = [1, 0]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """What a kernel's code must show beside what all must: no FP64, and no local memory (so no spills).

    `local_bytes`: local memory at most, for kernels that were measured to be faster with a few spilled words than with
    smaller tiles. `wide_loads`: global loads of 16 bytes, at least. `byte_products`: dp4a or int8 tensor cores.
    `tensor_cores`: matrix instructions of any type. `shared_bytes`: shared memory, at most; None sets no limit.
    """

    wide_loads: int = 0
    byte_products: bool = False
    tensor_cores: bool = False
    shared_bytes: int | None = DECODE_SHARED_BYTES
    local_bytes: int = 0


@dataclass(frozen=True, slots=True)
class KernelCase:
    """A call that launches kernels, and what is expected of each of them in turn: of so many and no more."""

    name: str
    launch: Callable[[], object]
    expect: tuple[Expectation, ...] = (Expectation(),)


@dataclass(frozen=True, slots=True)
class Compiled:
    """A kernel that a call would launch: its name, how many blocks of how many warps, and Triton's result."""

    name: str
    blocks: int
    warps: int
    result: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the machine code of one kernel shows; counts are of instructions in the listing, not of executions.

    `blocks` and `warps` of the launch, `registers` of a thread, `shared_bytes` of a block, `local_bytes` of a thread's
    stack, `spills`: loads and stores of local memory. `loads`: global loads by bytes, those into shared memory
    included. `overlaps`: the launch may begin before earlier kernels have ended; `waits`: instructions that wait for
    them, `loads_before_wait`: of 16 bytes. `mma_layouts`: how tensors that feed hand-written matrix instructions lie in
    the registers of threads.
    """

    kernel: str
    blocks: int
    warps: int
    instructions: int
    registers: int
    shared_bytes: int
    local_bytes: int
    spills: int
    loads: Mapping[int, int]
    dp4a: int
    int8_mma: int
    half_mma: int
    fp64: int
    conversions: int
    barriers: int
    overlaps: bool
    waits: int
    loads_before_wait: int
    stores_before_wait: int
    mma_layouts: tuple[str, ...] = ()

    @property
    def wide_loads(self) -> int:
        return self.loads.get(16, 0)


def compile_launches(launch: Callable[[], object], architecture: int) -> list[Compiled]:
    """Call `launch` and compile for a compute capability, such as 90, what it would have launched.

    Raises `RuntimeError` where kernels are interpreted.
    """
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction, KernelInterface

    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise RuntimeError("kernels are interpreted while TRITON_INTERPRET is set; unset it")
    found: list[Compiled] = []

    def instead(kernel: Any, grid: Any) -> Callable[..., None]:
        def call(*arguments: Any, **options: Any) -> None:
            assert isinstance(kernel, JITFunction)
            sizes = grid(options) if callable(grid) else grid
            result = kernel.run(*arguments, grid=sizes, warmup=True, **options)
            found.append(Compiled(kernel.fn.__name__, math.prod(sizes), result.metadata.num_warps, result))

        return call

    here: Any = launch_module
    launching, features, active = KernelInterface.__getitem__, here._features, driver._active
    KernelInterface.__getitem__ = instead
    here._features = lambda device: Features(asm=True, pdl=architecture >= FIRST_WITH_PDL)
    driver.set_active(_NoGpu(architecture))
    try:
        launch()
    finally:
        KernelInterface.__getitem__, here._features, driver._active = launching, features, active
    return found


class _NoGpu:
    """What Triton asks its driver before it compiles. Its cache of compiled kernels is kept by the device's number."""

    def __init__(self, architecture: int):
        self.architecture = architecture

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.architecture, 32)

    def get_current_device(self) -> int:
        return self.architecture

    def get_current_stream(self, device: int) -> int:
        return 0


def examine(case: KernelCase, architecture: int, dump: Path | None = None) -> list[Facts]:
    """Compile the kernels of a case and read their machine code; `dump` is a folder for PTX and listings."""
    found = []
    for number, compiled in enumerate(compile_launches(case.launch, architecture)):
        cubin = compiled.result.asm["cubin"]
        listing = disassemble(cubin)
        if dump is not None:
            stem = re.sub(r"\W+", "-", f"{case.name} {number} sm{architecture}")
            (dump / f"{stem}.ptx").write_text(compiled.result.asm["ptx"], encoding="utf-8")
            (dump / f"{stem}.sass").write_text(listing, encoding="utf-8")
        found.append(read_listing(listing, resources(cubin), compiled))
    return found


def disassemble(cubin: bytes) -> str:
    """The machine instructions of a compiled kernel, one a line."""
    return _run_tool("nvdisasm", cubin, "-c", "-ndf")


def resources(cubin: bytes) -> dict[str, int]:
    """What the compiler reserved: `REG` registers, `STACK` and `LOCAL` bytes of a thread, `SHARED` bytes, and more."""
    text = _run_tool("cuobjdump", cubin, "-res-usage")
    return {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", text.split("Function", 1)[1])}


def read_listing(listing: str, reserved: Mapping[str, int], compiled: Compiled) -> Facts:
    """Count the instructions of a listing by what matters here."""
    codes = [match[1] for line in listing.splitlines() if (match := _INSTRUCTION.match(line))]
    while codes and codes[-1].startswith(("NOP", "BRA")):  # padding, and the loop that guards the end
        codes.pop()
    count = Counter(code.split(".")[0] for code in codes)
    loads = Counter(_load_bytes(code) for code in codes if code.startswith("LDG"))
    wait = next((place for place, code in enumerate(codes) if code.startswith("ACQBULK")), 0)
    return Facts(
        kernel=compiled.name,
        blocks=compiled.blocks,
        warps=compiled.warps,
        instructions=len(codes),
        registers=reserved["REG"],
        shared_bytes=compiled.result.metadata.shared,
        local_bytes=max(reserved["STACK"], reserved["LOCAL"]),
        spills=count["LDL"] + count["STL"],
        loads=dict(sorted(loads.items())),
        dp4a=count["IDP"],
        int8_mma=count["IMMA"] + count["IGMMA"],
        half_mma=count["HMMA"] + count["HGMMA"],
        fp64=sum(1 for code in codes if _FP64.match(code)),
        conversions=count["I2F"] + count["I2FP"] + count["F2I"] + count["F2F"] + count["F2FP"],
        barriers=count["BAR"],
        overlaps=compiled.result.metadata.launch_pdl,
        waits=count["ACQBULK"],
        loads_before_wait=sum(1 for code in codes[:wait] if code.startswith("LDG") and _load_bytes(code) == 16),
        stores_before_wait=sum(1 for code in codes[:wait] if code.startswith(("STG", "RED", "ATOMG"))),
        mma_layouts=mma_layouts(compiled.result.asm["ttgir"]),
    )


def mma_layouts(ttgir: str) -> tuple[str, ...]:
    """The different layouts of tensors that go into, and come from, inline assembly with matrix instructions."""
    named = dict(re.findall(r"^(#\w+) = #ttg\.\w+<\{(.*)\}>$", ttgir, re.MULTILINE))
    used = re.findall(r"tt\.elementwise_inline_asm [^\n]*mma\.sync[^\n]* : ([^\n]*)", ttgir)
    return tuple(sorted({named.get(name, name) for types in used for name in re.findall(r", (#\w+)>", types)}))


def violations(facts: Facts, expect: Expectation) -> list[str]:
    """What in `facts` breaks the expectation or the rules for all kernels; one sentence each."""
    found = []
    if facts.local_bytes > expect.local_bytes or (facts.spills and not expect.local_bytes):
        found.append(f"spills: {facts.spills} instructions on {facts.local_bytes} bytes of local memory")
    if facts.fp64:
        found.append(f"FP64: {facts.fp64} instructions")
    if facts.wide_loads < expect.wide_loads:
        found.append(f"16-byte loads: {facts.wide_loads}, expected {expect.wide_loads} or more; by bytes {facts.loads}")
    if expect.byte_products and not facts.dp4a + facts.int8_mma:
        found.append("byte products: neither dp4a nor int8 matrix instructions")
    if expect.tensor_cores and not facts.int8_mma + facts.half_mma:
        found.append("tensor cores: no matrix instruction")
    if expect.shared_bytes is not None and facts.shared_bytes > expect.shared_bytes:
        found.append(f"shared memory: {facts.shared_bytes} bytes, expected at most {expect.shared_bytes}")
    expected = MMA_LAYOUT.format(facts.warps)
    found += [f"matrix operands: {layout}, expected {expected}" for layout in facts.mma_layouts if layout != expected]
    if facts.overlaps and not facts.waits:
        found.append("dependent launch: no wait for earlier kernels")
    if facts.waits and not facts.overlaps:
        found.append("dependent launch: waits for earlier kernels, but is launched after their end")
    if facts.stores_before_wait:
        found.append(f"dependent launch: {facts.stores_before_wait} stores before the wait for earlier kernels")
    return found


def table(rows: Iterable[tuple[str, int, Facts]]) -> str:
    """The facts of kernels as text, one kernel and architecture a line; `rows` are `(case, architecture, facts)`."""
    cells = [("case", "sm", *_COLUMNS)]
    for name, architecture, facts in rows:
        cells.append((name, str(architecture), *(str(column(facts)) for column in _COLUMNS.values())))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in cells)


def main(arguments: Sequence[str] | None = None) -> int:
    """Examine kernels and print a table or JSON; status 1 where one breaks what is expected of it."""
    parser = argparse.ArgumentParser(
        prog="python -m bitnest_format.kernels.compilation",
        description="Compile every kernel without a GPU and show what its machine code looks like.",
    )
    parser.add_argument("--arch", type=int, nargs="+", default=ARCHITECTURES, help="compute capabilities, as 90")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="kernels by name, as 'dual_plane*'")
    parser.add_argument("--json", action="store_true", help="facts and violations as JSON")
    parser.add_argument("--dump", type=Path, metavar="FOLDER", help="write PTX and listings there")
    options = parser.parse_args(arguments)
    if options.dump is not None:
        options.dump.mkdir(parents=True, exist_ok=True)

    from bitnest_format.kernels.catalogue import cases

    rows: list[tuple[str, int, Facts]] = []
    broken: list[str] = []
    for architecture in options.arch:
        for case in cases():
            if not fnmatchcase(case.name, options.only):
                continue
            where = f"{case.name}, sm_{architecture}"
            try:
                found = examine(case, architecture, options.dump)
            except Exception as error:  # of many kinds: the front end, the passes, the assembler
                cause = str(error).strip().splitlines() or [""]
                broken.append(f"{where}: does not compile: {type(error).__name__}: {cause[-1]}")
                continue
            rows += [(case.name, architecture, facts) for facts in found]
            if len(found) != len(case.expect):
                broken.append(f"{where}: {len(found)} kernels launched, expected {len(case.expect)}")
            for facts, expect in zip(found, case.expect, strict=False):
                broken += [f"{where}: {violation}" for violation in violations(facts, expect)]
    if options.json:
        kernels = [{"case": name, "arch": architecture, **asdict(facts)} for name, architecture, facts in rows]
        print(json.dumps({"kernels": kernels, "violations": broken}))
    else:
        print(table(rows))
        for sentence in broken:
            print(sentence, file=sys.stderr)
    return 1 if broken else 0


_COLUMNS: dict[str, Callable[[Facts], int]] = {
    "blocks": lambda facts: facts.blocks,
    "warps": lambda facts: facts.warps,
    "regs": lambda facts: facts.registers,
    "smem": lambda facts: facts.shared_bytes,
    "spills": lambda facts: facts.spills,
    "instr": lambda facts: facts.instructions,
    "ld16": lambda facts: facts.wide_loads,
    "ld8": lambda facts: facts.loads.get(8, 0),
    "ld<8": lambda facts: sum(number for size, number in facts.loads.items() if size < 8),
    "dp4a": lambda facts: facts.dp4a,
    "imma": lambda facts: facts.int8_mma,
    "hmma": lambda facts: facts.half_mma,
    "cvt": lambda facts: facts.conversions,
    "early": lambda facts: facts.loads_before_wait,
}
# An address in a comment, a predicate, the instruction and its suffixes.
_INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)")
_FP64 = re.compile(r"(DADD|DMUL|DFMA|DSETP|DMMA|DMNMX|MUFU\.RCP64H|MUFU\.RSQ64H)|.*\.F64")


def _load_bytes(code: str) -> int:
    suffixes = code.split(".")
    if "128" in suffixes:
        return 16
    if "64" in suffixes:
        return 8
    if "U8" in suffixes or "S8" in suffixes:
        return 1
    return 2 if "U16" in suffixes or "S16" in suffixes else 4


def _run_tool(name: str, cubin: bytes, *options: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        done = subprocess.run(
            [str(_tools() / name), *options, str(path)], capture_output=True, encoding="utf-8", check=True
        )
    return done.stdout


@cache
def _tools() -> Path:
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


if __name__ == "__main__":
    sys.exit(main())
