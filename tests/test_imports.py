"""Who may import whom, and what an import or `--help` may cost."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bitnest_format.cli import main

COMMANDS = tuple(main.commands)
ROOT = Path(__file__).resolve().parents[1]
SIBLINGS = ("spec", "converters", "runtime", "kernels")

# A unit is a sibling folder, or a module of bitnest_format/ ("" is its __init__). The table is the import
# direction of the design: a unit may import the units listed for it and nothing else of this package.
CORE = {
    "",
    "errors",
    "spec",
    "families",
    "config_fields",
    "architecture",
    "nesting",
    "packing",
    "manifest",
    "shards",
    "checkpoint",
}
MAY_IMPORT = {
    "": {"api"},
    "__main__": {"cli"},
    "errors": set(),
    "spec": {"errors"},
    "nesting": set(),
    "packing": set(),
    "families": set(),
    "config_fields": {"families"},
    "architecture": {"errors", "families", "config_fields"},
    "manifest": {"errors", "spec"},
    "shards": {"errors"},
    "checkpoint": CORE - {""},
    "validation": CORE - {""},
    "report": CORE - {""},
    "card": {"errors", "manifest", "report"},
    "push": {"", "errors", "manifest", "shards", "checkpoint", "validation", "report", "hub", "card"},
    "progress": set(),
    "hub": {"", "errors", "spec", "manifest", "shards", "checkpoint"},
    "pull": {"", "errors", "manifest", "shards", "checkpoint", "hub"},
    "remote": {"", "errors", "shards", "hub"},
    "kernels": {"errors", "nesting", "packing"},
    "converters": CORE | {"card"},
    "runtime": CORE | {"kernels"},
    "api": CORE | {"hub", "pull", "runtime"},
    "transformers": {"runtime"},
    "doctor": {"errors", "hub", "runtime", "kernels"},
    "vllm": {"runtime"},
    "lm_eval_model": {"", "errors", "api", "runtime"},
    "lm_eval": {"errors", "transformers", "lm_eval_model"},
}
IN_REACH_OF_COMMANDS = {"", "errors"}

# Third-party packages that belong to one place each.
ONLY_IN = {
    "transformers": {"converters", "runtime"},
    "accelerate": {"converters", "runtime"},
    "filelock": {"converters"},
    "huggingface_hub": {"hub", "push", "remote"},
    "yaml": {"card"},
    "packaging": {"doctor"},
    "click": {"cli"},
    "jsonschema": {"manifest"},
    "triton": {"kernels"},
    "gguf": {"converters"},
    "pyarrow": {"converters"},
    "rich": {"progress"},
    "matplotlib": {"runtime"},
    "cuda": {"runtime"},
    "vllm": {"runtime"},
    "lm_eval": {"lm_eval", "lm_eval_model"},
    "tqdm": {"lm_eval_model"},
}
# Packages of which only the modules of one integration may know, by how those begin.
ONLY_IN_MODULES = {"vllm": "bitnest_format.runtime.vllm_"}
# What users are not asked to install beyond the above.
ANYWHERE = {"torch", "safetensors", "numpy", "tokenizers"}

HEAVY = {"torch", "numpy", "transformers", "huggingface_hub", "triton", "safetensors", "rich", "jsonschema"}
HELP_CPU_SECONDS = 0.5


def package_files() -> dict[str, Path]:
    """Every module of the package: its import name and its file."""
    files = {f"bitnest_format.{path.stem}": path for path in sorted((ROOT / "bitnest_format").glob("*.py"))}
    for folder in SIBLINGS:
        for path in sorted((ROOT / folder).glob("*.py")):
            files[f"bitnest_format.{folder}.{path.stem}"] = path
    return {name.removesuffix(".__init__"): path for name, path in files.items()}


FILES = package_files()


def unit_of(module: str) -> str:
    """`bitnest_format.kernels.reference` -> `kernels`; `bitnest_format` -> the empty unit."""
    return [*module.split("."), ""][1]


def of_command_line(unit: str) -> bool:
    return unit == "cli" or unit.startswith("cli_")


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports(tree: ast.AST) -> Iterator[tuple[str, ast.stmt]]:
    """Every imported module name; `from bitnest_format import x` counts as `bitnest_format.x` where that exists."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            for alias in node.names:
                full = f"{module}.{alias.name}"
                yield (full if full in FILES else module), node


@pytest.mark.parametrize("module", FILES)
def test_import_direction(module):
    unit = unit_of(module)
    if of_command_line(unit):  # above everything
        return
    assert unit in MAY_IMPORT, f"{unit}: new module, say in MAY_IMPORT what it may import"
    allowed = MAY_IMPORT[unit] | {unit}
    used = {unit_of(name) for name, _ in imports(parse(FILES[module])) if name.split(".")[0] == "bitnest_format"}
    assert used <= allowed, f"{module} imports {sorted(used - allowed)}"


@pytest.mark.parametrize("module", FILES)
def test_third_party_imports_stand_where_they_belong(module):
    unit = unit_of(module)
    for name, _ in imports(parse(FILES[module])):
        top = name.split(".")[0]
        if top in sys.stdlib_module_names or top == "bitnest_format":
            continue
        home = "cli" if of_command_line(unit) else unit
        assert home in ONLY_IN[top] if top in ONLY_IN else top in ANYWHERE, f"{module} imports {name}"
        assert module.startswith(ONLY_IN_MODULES.get(top, "")), f"{module} imports {name}"


def modules_that_need(package: str) -> set[str]:
    """Modules that cannot be imported without a package: they, or modules they import at the top, import it there."""
    above = {module: {name for name, _ in imports(top_level(parse(path)))} for module, path in FILES.items()}
    found = {module for module, names in above.items() if any(name.split(".")[0] == package for name in names)}
    while more := {module for module, names in above.items() if names & found} - found:
        found |= more
    return found


def top_level(tree: ast.Module) -> ast.Module:
    """The statements that an import of the module runs: not those of functions, nor for type checkers alone."""

    def skipped(node: ast.stmt) -> bool:
        for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        return for_types or isinstance(node, ast.FunctionDef | ast.ClassDef)

    return ast.Module([node for node in tree.body if not skipped(node)], [])


def test_integrations_alone_need_their_packages():
    for package, beginning in ONLY_IN_MODULES.items():
        found = modules_that_need(package)
        assert found and all(module.startswith(beginning) for module in found), package


def test_kernels_alone_need_triton():
    found = modules_that_need("triton")
    assert "bitnest_format.kernels.primitives" in found
    assert {unit_of(module) for module in found} == {"kernels"}


@pytest.mark.parametrize("module", FILES)
def test_imports_are_absolute(module):
    for _, node in imports(parse(FILES[module])):
        assert not (isinstance(node, ast.ImportFrom) and node.level), f"{module}:{node.lineno}: relative import"


@pytest.mark.parametrize("module", [module for module in FILES if of_command_line(unit_of(module))])
def test_command_line_imports_the_rest_inside_command_bodies(module):
    used = {name for name, _ in imports(top_level(parse(FILES[module])))}
    ours = {unit_of(name) for name in used if name.startswith("bitnest_format")}
    assert {unit for unit in ours if not of_command_line(unit)} <= IN_REACH_OF_COMMANDS
    assert {name.split(".")[0] for name in used} & HEAVY == set()


def test_text_files_are_opened_with_an_encoding():
    """PU-4: the locale's encoding is never used, neither here nor in the tests."""
    missing = []
    for path in [*FILES.values(), *sorted((ROOT / "tests").glob("**/*.py"))]:
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Call) and reads_text(node) and not any(k.arg == "encoding" for k in node.keywords):
                missing.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not missing


def reads_text(call: ast.Call) -> bool:
    """Whether a call is `open`, `read_text` or `write_text`, in text mode."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", None)
    if name in ("read_text", "write_text"):
        return True
    if name != "open":
        return False
    method = isinstance(call.func, ast.Attribute)
    if method and isinstance(call.func.value, ast.Name):
        owner = call.func.value.id
        if owner in ("os", "tarfile", "zipfile") or owner[0].isupper():  # not a text file; a constructor of a class
            return False
    mode = next((k.value for k in call.keywords if k.arg == "mode"), None)
    positional = call.args[0 if method else 1 :]
    mode = mode or (positional[0] if positional else None)
    return not (isinstance(mode, ast.Constant) and isinstance(mode.value, str) and "b" in mode.value)


def test_importing_the_package_loads_nothing_heavy():
    assert loaded_by("import bitnest_format") & HEAVY == set()


def test_help_loads_nothing_heavy():
    for command in ("", *COMMANDS):
        arguments = [command, "--help"] if command else ["--help"]
        code = f"from bitnest_format.cli import main; main({arguments!r}, standalone_mode=False)"
        assert loaded_by(code) & HEAVY == set(), command


def test_help_is_quick():
    """Less than half a second of CPU time, the interpreter's own start included."""
    command = [sys.executable, "-m", "bitnest_format", "--help"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    assert usage.ru_utime + usage.ru_stime < HELP_CPU_SECONDS


def loaded_by(code: str) -> set[str]:
    """The top-level modules in `sys.modules` after running `code` in a fresh interpreter."""
    probe = f"import sys\n{code}\nprint(*{{n.split('.')[0] for n in sys.modules}}, file=sys.stderr)"
    done = run_python("-c", probe)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.split())


def run_python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run this interpreter without a GPU, with UTF-8 streams, from a folder that is not on `sys.path`."""
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "CUDA_VISIBLE_DEVICES": "", **variables}
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        encoding="utf-8",
        env=environment,
        stdin=subprocess.DEVNULL,
        check=False,
    )


def test_no_default_encoding_at_run_time(tiny_checkpoint, tmp_path):
    """PU-4: a run in the C locale without UTF-8 mode, with every use of the locale's encoding made an error."""
    folder = tiny_checkpoint(tmp_path / "模型-🐦")
    strict = ("-X", "warn_default_encoding", "-X", "utf8=0", "-W", "error::EncodingWarning")
    help_text = run_python(*strict, "-m", "bitnest_format", "--help", LC_ALL="C.UTF-8")
    assert help_text.returncode == 0, help_text.stderr
    done = run_python(*strict, "-m", "bitnest_format", "validate", str(folder), "--deep", LC_ALL="C.UTF-8")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == f"{folder}: valid\n"


WITHOUT_TRITON = """
import importlib, sys
sys.modules["triton"] = None
import bitnest_format
from bitnest_format import report, validation
from pathlib import Path
for module in sys.argv[2:]:
    importlib.import_module(module)
folder = Path(sys.argv[1])
assert validation.validate(folder, deep=True) == []
print(report.render(report.inspect_checkpoint(folder)))
print(*bitnest_format.load(str(folder)).generate([5, 6], max_new_tokens=3).token_ids)
"""


def test_everything_works_without_triton_and_without_a_gpu(tiny_checkpoint, tmp_path):
    """GP-1: every module but the Triton kernels imports; validate, inspect and generate run."""
    needy = set().union(*map(modules_that_need, ("triton", "lm_eval", *ONLY_IN_MODULES)))
    modules = sorted({*FILES} - {"bitnest_format.__main__"} - needy)
    done = run_python("-c", WITHOUT_TRITON, str(tiny_checkpoint(tmp_path / "model", eos_token_id=None)), *modules)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()[-1].split()) == 3
