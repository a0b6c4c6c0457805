"""Kernels compiled ahead of time, without a GPU, and what their machine code shows.

Interpreted tests say whether a kernel is right; these facts say whether it can be fast: that weights come in 16-byte
loads, that byte products run as dp4a or on the tensor cores, that nothing spills. `python -m
bitnest_format.kernels.compilation` prints them for every kernel of `catalogue`. Only the compiler is needed, and the
disassemblers that come with Triton.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

# Ampere, Orin and Hopper; Triton compiles 90 as sm_90a.
ARCHITECTURES = (80, 87, 90)
# Overlap of kernels (programmatic dependent launch) exists from here on.
FIRST_WITH_PDL = 90
# Above this a kernel asks for another carve-out of the L1 cache, which costs its neighbours in a graph.
DECODE_SHARED_BYTES = 48 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """What a kernel's code must show beside what all must: no spills, no local memory, no FP64.

    `wide_loads`: global loads of 16 bytes, at least. `byte_products`: dp4a or int8 tensor-core instructions.
    `tensor_cores`: matrix instructions of any type. `shared_bytes`: shared memory, at most; None sets no limit.
    """

    wide_loads: int = 0
    byte_products: bool = False
    tensor_cores: bool = False
    shared_bytes: int | None = DECODE_SHARED_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCase:
    """One kernel, `function` of an importable `module`, with the arguments that it is compiled for.

    `arguments`: Triton types by name, pointers (`*i32`) taken as aligned to 16 bytes and integers (`i32`) as unknown,
    or as multiples of 16 where the type reads `i32:16`. `constants`: values of constexprs, and None for a tensor that
    is not given. A constexpr `PDL` is set where the architecture has it.
    """

    name: str
    module: str
    function: str
    arguments: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3
    expect: Expectation = Expectation()


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the machine code of one kernel shows; counts are of instructions in the listing, not of executions.

    `registers` of a thread, `shared_bytes` of a block, `local_bytes` of a thread's stack, `spills`: loads and stores of
    local memory. `loads`: global loads by bytes, those into shared memory included.
    """

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
    waits: int
    stores_before_wait: int

    @property
    def wide_loads(self) -> int:
        return self.loads.get(16, 0)


def compile_case(case: KernelCase, architecture: int) -> dict[str, Any]:
    """Compile for a compute capability such as 90; Triton's stages by name, `ptx` and `cubin` among them.

    `shared_bytes` is added. Raises `ValueError` where the case does not name the kernel's arguments, and
    `RuntimeError` where kernels are interpreted.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(importlib.import_module(case.module), case.function)
    if not isinstance(function, triton.runtime.JITFunction):
        raise RuntimeError(f"{case.function} is interpreted: unset TRITON_INTERPRET to compile it")
    names = list(function.arg_names)
    constants = dict(case.constants)
    pdl = architecture >= FIRST_WITH_PDL
    if "PDL" in names:
        constants["PDL"] = pdl
    unknown = sorted({*constants, *case.arguments} - set(names))
    missing = [name for name in names if name not in constants and name not in case.arguments]
    if unknown or missing:
        raise ValueError(f"{case.name}: arguments missing: {missing}, not of {case.function}: {unknown}")
    types = {name: case.arguments[name] for name in names if name not in constants}
    aligned = [name for name, kind in types.items() if kind.startswith("*") or kind.endswith(":16")]
    source = ASTSource(
        function,
        signature={name: types[name].removesuffix(":16") if name in types else "constexpr" for name in names},
        constexprs=constants,
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    if "PDL" in names and pdl:
        options["launch_pdl"] = True
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    return {**compiled.asm, "shared_bytes": compiled.metadata.shared}


def examine(case: KernelCase, architecture: int, dump: Path | None = None) -> Facts:
    """Compile a case and read its machine code; `dump` is a folder that receives the PTX and the listing."""
    compiled = compile_case(case, architecture)
    listing = disassemble(compiled["cubin"])
    if dump is not None:
        stem = re.sub(r"\W+", "-", f"{case.name} sm{architecture}")
        (dump / f"{stem}.ptx").write_text(compiled["ptx"], encoding="utf-8")
        (dump / f"{stem}.sass").write_text(listing, encoding="utf-8")
    return read_listing(listing, resources(compiled["cubin"]), compiled["shared_bytes"])


def disassemble(cubin: bytes) -> str:
    """The machine instructions of a compiled kernel, one a line."""
    return _run_tool("nvdisasm", cubin, "-c")


def resources(cubin: bytes) -> dict[str, int]:
    """What the compiler reserved: `REG` registers, `STACK` and `LOCAL` bytes of a thread, `SHARED` bytes, and more."""
    text = _run_tool("cuobjdump", cubin, "-res-usage")
    return {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", text.split("Function", 1)[1])}


def read_listing(listing: str, reserved: Mapping[str, int], shared_bytes: int) -> Facts:
    """Count the instructions of a listing by what matters here."""
    codes = [match[1] for line in listing.splitlines() if (match := _INSTRUCTION.match(line))]
    while codes and codes[-1].startswith(("NOP", "BRA")):  # padding, and the loop that guards the end
        codes.pop()
    count = Counter(code.split(".")[0] for code in codes)
    loads = Counter(_load_bytes(code) for code in codes if code.startswith(("LDG", "LDGSTS")))
    wait = next((place for place, code in enumerate(codes) if code.startswith("ACQBULK")), 0)
    return Facts(
        instructions=len(codes),
        registers=reserved["REG"],
        shared_bytes=shared_bytes,
        local_bytes=max(reserved["STACK"], reserved["LOCAL"]),
        spills=count["LDL"] + count["STL"],
        loads=dict(sorted(loads.items())),
        dp4a=count["IDP"],
        int8_mma=count["IMMA"] + count["IGMMA"],
        half_mma=count["HMMA"] + count["HGMMA"],
        fp64=sum(1 for code in codes if _FP64.match(code)),
        conversions=count["I2F"] + count["I2FP"] + count["F2I"] + count["F2F"] + count["F2FP"],
        barriers=count["BAR"],
        waits=count["ACQBULK"],
        stores_before_wait=sum(1 for code in codes[:wait] if code.startswith(("STG", "RED", "ATOMG"))),
    )


def violations(facts: Facts, expect: Expectation) -> list[str]:
    """What in `facts` breaks the expectation or the rules for all kernels; one sentence each."""
    found = []
    if facts.spills or facts.local_bytes:
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
    if facts.stores_before_wait:
        found.append(f"dependent launch: {facts.stores_before_wait} stores before the wait for earlier kernels")
    return found


def table(rows: Iterable[tuple[str, int, Facts]]) -> str:
    """The facts of kernels as text, one kernel and architecture a line."""
    heads = ("kernel", "sm", "regs", "smem", "spills", "instr", "ld16", "ld8", "ld<8", "dp4a", "imma", "hmma", "cvt")
    cells = [
        (
            name,
            *map(
                str,
                (
                    architecture,
                    facts.registers,
                    facts.shared_bytes,
                    facts.spills,
                    facts.instructions,
                    facts.wide_loads,
                    facts.loads.get(8, 0),
                    sum(number for size, number in facts.loads.items() if size < 8),
                    facts.dp4a,
                    facts.int8_mma,
                    facts.half_mma,
                    facts.conversions,
                ),
            ),
        )
        for name, architecture, facts in rows
    ]
    widths = [max(len(row[column]) for row in [heads, *cells]) for column in range(len(heads))]
    lines = [
        "  ".join(cell.rjust(width) if column else cell.ljust(width) for column, (cell, width) in enumerate(row_widths))
        for row_widths in (list(zip(row, widths, strict=True)) for row in [heads, *cells])
    ]
    return "\n".join(lines)


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
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        parser.error("kernels are interpreted while TRITON_INTERPRET is set; unset it")

    from bitnest_format.kernels.catalogue import CASES

    chosen = [case for case in CASES if fnmatchcase(case.name, options.only)]
    if options.dump is not None:
        options.dump.mkdir(parents=True, exist_ok=True)
    found = [
        (case, architecture, examine(case, architecture, options.dump))
        for architecture in options.arch
        for case in chosen
    ]
    broken = [
        f"{case.name}, sm_{architecture}: {violation}"
        for case, architecture, facts in found
        for violation in violations(facts, case.expect)
    ]
    if options.json:
        kernels = [{"name": case.name, "arch": arch, **asdict(facts)} for case, arch, facts in found]
        print(json.dumps({"kernels": kernels, "violations": broken}))
    else:
        print(table((case.name, architecture, facts) for case, architecture, facts in found))
        print(*broken, sep="\n", file=sys.stderr)
    return 1 if broken else 0


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


def _run_tool(name: str, cubin: bytes, option: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        done = subprocess.run(
            [str(_tools() / name), option, str(path)], capture_output=True, encoding="utf-8", check=True
        )
    return done.stdout


@cache
def _tools() -> Path:
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


if __name__ == "__main__":
    sys.exit(main())
