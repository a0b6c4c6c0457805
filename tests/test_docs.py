"""The pages of the documentation: their blocks run, their commands exist, their links lead somewhere."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]
# Environments that have a job of their own in CI; their blocks are run by the tests named here.
ELSEWHERE = {"vllm": "tests/vllm", "lm_eval": "tests/runtime/test_lm_eval.py"}
# An input `hub:owner/name` is a repository that holds the input `name`.
ON_HUB = "hub:"
# Imported once for all programs of all pages.
IMPORTED = (
    "torch",
    "transformers",
    "bitnest_format.transformers",
    "bitnest_format.cli",
    "bitnest_format.push",
    "bitnest_format.pull",
    "bitnest_format.runtime.generate",
    "bitnest_format.converters.sources",
    "bitnest_format.converters.pipeline",
    "bitnest_format.converters.export",
    "bitnest_format.converters.diff",
    "gguf",
    "jsonschema",
)

# The tests are no package: a helper is loaded by its path.
spec = importlib.util.spec_from_file_location("doc_blocks", Path(__file__).with_name("doc_blocks.py"))
assert spec is not None and spec.loader is not None
doc_blocks = sys.modules["doc_blocks"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(doc_blocks)


@pytest.fixture(scope="module")
def hub(helper):
    with helper("hub_server").HubServer() as server:
        yield server


@pytest.fixture(scope="module")
def environment(helper, hub, tmp_path_factory):
    """The variables under which pages run: no network but a Hub of their own, no GPU, one thread, programs that start
    at once."""
    folder = tmp_path_factory.mktemp("docs")
    fixed = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1", "PYTHONUTF8": "1"}
    variables = hub.environment(folder / "home", token="hf_me") | fixed
    with helper("warm_python").WarmPython(folder, IMPORTED, variables) as warm:
        yield variables | {"PATH": warm.path}


def page_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_blocks_run(page, hub, environment, documented_inputs, tmp_path):
    if not any(block.runs_in("") for block in doc_blocks.read_blocks(page)):
        return
    names = doc_blocks.given(page)
    documented_inputs(tmp_path, [name for name in names if not name.startswith(ON_HUB)])
    hub.repositories.clear()
    shutil.rmtree(environment["HF_HOME"], ignore_errors=True)
    for repo_id in (name.removeprefix(ON_HUB) for name in names if name.startswith(ON_HUB)):
        hub.create(repo_id, tmp_path / repo_id.partition("/")[2])
    doc_blocks.run_page(page, tmp_path, environment)


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_blocks_parse_and_call_the_command_line_rightly(page):
    blocks = doc_blocks.read_blocks(page)
    assert [problem for block in blocks for problem in doc_blocks.problems(block)] == []
    assert {block.environment for block in blocks} <= {"", *ELSEWHERE}


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_commands_in_sentences_exist(page):
    """Inline code that begins with `bitnest-format` is a call, if perhaps without its arguments."""
    text = re.sub(r"^ {0,3}```.*?^ {0,3}```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    problems = [
        f"{code}: {problem}"
        for code in re.findall(r"`(bitnest-format [^`]+)`", text)
        for words in doc_blocks.commands(code)
        if (problem := doc_blocks.call_problem(words[1:])) and not problem.startswith("Missing ")
    ]
    assert problems == []


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    missing = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        place, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        file = page.parent / place if place else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            missing.append(target)
    assert missing == []


def test_every_page_and_every_example_can_be_found():
    entrances = "".join((ROOT / page).read_text(encoding="utf-8") for page in ("README.md", "docs/README.md"))
    linked = {target.removeprefix("docs/") for target in re.findall(r"\]\(([^)\s#]+\.md)", entrances)}
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").glob("*.md")}
    assert pages - {"README.md"} <= linked
    blocks = [block for block in doc_blocks.read_blocks(ROOT / "docs" / "examples.md") if block.runs_in("")]
    scripts = [f"examples/{script.name}" for script in sorted((ROOT / "examples").glob("*.py"))]
    assert scripts
    assert [script for script in scripts if not any(script in block.text for block in blocks)] == []


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ +(.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
