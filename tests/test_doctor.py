"""The doctor's judgement of each fact, right and wrong, and one report of this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from bitnest_format import doctor, hub
from bitnest_format.cli import main
from bitnest_format.doctor import Check, Gpu

GIB = 2**30
H200 = Gpu("NVIDIA H200", (9, 0), 100 * GIB, 140 * GIB)
OLD = Gpu("Tesla T4", (7, 5), 10 * GIB, 15 * GIB, "cuda:1 (Tesla T4) has compute capability 7.5, too old")
NO_GPU = "torch finds no GPU"


@pytest.mark.parametrize(
    ("version", "check"),
    [
        ((3, 13, 1), Check("python", "ok", "3.13.1, supported >=3.11")),
        (
            (3, 10, 4),
            Check("python", "fail", "3.10.4, supported >=3.11", "make an environment with another Python"),
        ),
    ],
)
def test_python(version, check):
    assert doctor.check_python(version, ">=3.11") == check


@pytest.mark.parametrize(
    ("found", "extra", "check"),
    [
        ("2.13.0+cpu", None, Check("torch", "ok", "2.13.0+cpu, supported <3,>=2.11")),
        ("2.12.0.dev20260101", None, Check("torch", "ok", "2.12.0.dev20260101, supported <3,>=2.11")),
        ("2.9.1", None, Check("torch", "fail", "2.9.1, supported <3,>=2.11", "pip install 'torch<3,>=2.11'")),
        ("3.0", None, Check("torch", "fail", "3.0, supported <3,>=2.11", "pip install 'torch<3,>=2.11'")),
        (None, None, Check("torch", "fail", "not installed, supported <3,>=2.11", "pip install 'torch<3,>=2.11'")),
        ("2.9", "x", Check("torch", "warn", "2.9, supported <3,>=2.11", "pip install 'torch<3,>=2.11'")),
        (None, "x", Check("torch", "ok", "not installed, optional: pip install 'bitnest-format[x]'")),
    ],
)
def test_requirement(found, extra, check):
    assert doctor.check_requirement("torch>=2.11,<3", found, extra=extra) == check


@pytest.mark.parametrize(
    ("gpus", "reason", "driver", "checks"),
    [
        ([], NO_GPU, None, [Check("gpu", "ok", f"none ({NO_GPU}); the CPU decodes")]),
        (
            [],
            "this torch is built without CUDA",
            "570.1",
            [
                Check(
                    "gpu",
                    "warn",
                    "none (this torch is built without CUDA), though NVIDIA's driver 570.1 is loaded",
                    "install a torch built for CUDA (https://pytorch.org/get-started) that this driver supports",
                )
            ],
        ),
        (
            [H200, OLD],
            None,
            "570.1",
            [
                Check("cuda:0", "ok", "NVIDIA H200, compute capability 9.0, driver 570.1, 100.0 of 140.0 GiB free"),
                Check(
                    "cuda:1",
                    "warn",
                    "Tesla T4, compute capability 7.5, driver 570.1, 10.0 of 15.0 GiB free",
                    "not used: cuda:1 (Tesla T4) has compute capability 7.5, too old",
                ),
            ],
        ),
    ],
    ids=["none", "driver alone", "two"],
)
def test_gpus(gpus, reason, driver, checks):
    assert doctor.check_gpus(gpus, reason, driver) == checks


@pytest.mark.parametrize(
    ("error", "needed", "interpreted", "status", "found"),
    [
        (None, True, False, "ok", "one compiled"),
        (ImportError("No module named 'triton'\nmore"), False, False, "warn", None),
        (RuntimeError("no C compiler"), True, False, "fail", "one compiled: RuntimeError: no C compiler"),
        (None, True, True, "warn", "TRITON_INTERPRET is set: kernels are interpreted, slowly"),
    ],
)
def test_kernels(error, needed, interpreted, status, found):
    check = doctor.check_kernels("one compiled", error, needed=needed, interpreted=interpreted)
    assert check.status == status
    assert check.found == (found or "one compiled: ImportError: No module named 'triton'")
    assert bool(check.advice) == (status != "ok")


def test_cache():
    folder = Path("/cache")
    assert doctor.check_cache(folder, 1_500_000_000, True, 50_000_000_000) == [
        Check("cache", "ok", "/cache, 1.5 GB"),
        Check("disk", "ok", "50.0 GB free there"),
    ]
    assert doctor.check_cache(folder, 0, False, 9_900_000_000) == [
        Check("cache", "fail", "/cache is not writable", "set HF_HOME to a folder of yours"),
        Check(
            "disk",
            "warn",
            "9.9 GB free there, less than 10.0 GB",
            "free some, or set HF_HOME to a folder on another disk",
        ),
    ]


@pytest.mark.parametrize(
    ("arguments", "check"),
    [
        (
            (None,),
            Check("token", "ok", "none; needed to push, and for private or gated repositories (hf auth login)"),
        ),
        (("HF_TOKEN",), Check("token", "ok", "from HF_TOKEN, not checked (--online does)")),
        (("HF_TOKEN", "me"), Check("token", "ok", "from HF_TOKEN, of me")),
        (
            ("/token", None, "the Hub does not accept this token"),
            Check(
                "token",
                "fail",
                "from /token: the Hub does not accept this token",
                "hf auth login, or set HF_TOKEN",
            ),
        ),
    ],
)
def test_token(arguments, check):
    assert doctor.check_token(*arguments) == check


@pytest.mark.parametrize(
    ("environment", "check"),
    [
        ({}, Check("network", "ok", "allowed")),
        ({"HF_HUB_OFFLINE": "0"}, Check("network", "ok", "allowed")),
        (
            {"HF_ENDPOINT": "http://mirror"},
            Check("network", "ok", "allowed, the Hub is http://mirror (HF_ENDPOINT)"),
        ),
        (
            {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "yes"},
            Check(
                "network",
                "warn",
                "HF_HUB_OFFLINE=1, TRANSFORMERS_OFFLINE=yes: only what is in the cache is used",
                "unset HF_HUB_OFFLINE TRANSFORMERS_OFFLINE",
            ),
        ),
    ],
)
def test_offline(environment, check):
    assert doctor.check_offline(environment) == check


def test_the_worst_status_counts_and_advice_stands_below():
    checks = [Check("a", "ok", "fine"), Check("long", "warn", "so so", "do this")]
    assert doctor.status_of(checks) == "warn"
    assert doctor.status_of([*checks, Check("c", "fail", "no", "x")]) == "fail"
    assert doctor.status_of(checks[:1]) == "ok"
    assert doctor.render(checks) == "ok    a     fine\nwarn  long  so so\n            -> do this"
    assert doctor.to_dict(checks) == {
        "status": "warn",
        "checks": [
            {"name": "a", "status": "ok", "found": "fine", "advice": ""},
            {"name": "long", "status": "warn", "found": "so so", "advice": "do this"},
        ],
    }


@pytest.fixture
def run(hub_server, monkeypatch):
    """`(*arguments)` -> exit status and checks by name, on a machine whose Hub is the tests'."""
    for name in (*doctor.OFFLINE_VARIABLES, "HF_ENDPOINT", "TRITON_INTERPRET"):
        monkeypatch.delenv(name, raising=False)

    def call(*arguments):
        result = CliRunner().invoke(main, ["doctor", "--json", *arguments])
        document = json.loads(result.stdout)
        assert {*document} == {"status", "checks"}
        return result.exit_code, {check["name"]: check for check in document["checks"]}

    return call


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_this_machine(run, hub_server, tmp_path):
    status, checks = run()
    assert status == 0
    for name in ("python", "torch", "transformers", "huggingface-hub", "safetensors", "accelerate", "click"):
        assert checks[name]["status"] == "ok", checks[name]
        if name != "python":
            assert checks[name]["found"].startswith(f"{metadata.version(name)}, supported ")
    assert checks["gpu"]["found"].startswith("none (")
    assert checks["cache"]["found"] == f"{tmp_path / 'hub'}, 0.0 GB"
    assert checks["token"]["found"].startswith("none; ")
    assert not {"pytest", "ruff", "mypy"} & {*checks}
    assert hub_server.log == []  # nothing was sent


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_a_kernel_is_really_compiled(hub_server, tmp_path):
    """In a process of its own: here kernels may have been made for the interpreter."""
    pytest.importorskip("triton")
    environment = hub_server.environment(tmp_path) | {"PYTHONSAFEPATH": "1"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-m", "bitnest_format", "doctor"],
        env=environment,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split(maxsplit=2) for line in done.stdout.splitlines() if " kernels " in line] == [
        ["ok", "kernels", "one compiled for sm_90"]
    ]


def test_a_compiler_that_fails_is_reported(run, monkeypatch):
    pytest.importorskip("triton")

    def broken(architecture: int) -> None:
        raise OSError("ptxas: not found")

    monkeypatch.setattr("bitnest_format.kernels.self_test.compile_one", broken)
    status, checks = run()
    expected = {"status": "warn", "found": "one compiled for sm_90: OSError: ptxas: not found"}
    assert status == 0
    assert expected.items() <= checks["kernels"].items()


def test_interpreted_kernels_are_reported(run, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert run()[1]["kernels"]["status"] == "warn"


def test_a_failure_is_exit_status_1(run, monkeypatch):
    monkeypatch.setattr(doctor, "_installed", lambda name: None if name == "safetensors" else metadata.version("click"))
    status, checks = run()
    assert status == 1
    assert checks["safetensors"]["found"].startswith("not installed, supported ")


def test_a_torch_that_cannot_be_imported_is_reported(run, monkeypatch):
    def broken(requested: object) -> None:
        raise OSError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr("bitnest_format.runtime.device.choose_device", broken)
    status, checks = run()
    assert status == 1
    found = "cannot be looked at: OSError: libcudart.so.13: cannot open shared object file"
    assert checks["gpu"] == {
        "name": "gpu",
        "status": "fail",
        "found": found,
        "advice": "install what is missing, or again: pip install --force-reinstall bitnest-format",
    }
    assert "cache" in checks and "token" in checks


@pytest.mark.parametrize("online", [False, True])
def test_a_token_is_never_shown_and_asked_about_only_online(run, hub_server, monkeypatch, online):
    monkeypatch.setenv("HF_TOKEN", "hf_me")
    _, checks = run(*["--online"] * online)
    assert checks["token"]["found"] == (
        "from HF_TOKEN, of me" if online else "from HF_TOKEN, not checked (--online does)"
    )
    assert "hf_me" not in json.dumps(checks)
    assert bool(hub_server.log) is online


def test_a_token_in_a_file(run, tmp_path):
    (tmp_path / "token").write_text("hf_me\n", encoding="utf-8")
    assert run("--online")[1]["token"]["found"] == f"from {tmp_path / 'token'}, of me"


def test_a_token_that_the_hub_refuses(run, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_stale")
    status, checks = run("--online")
    assert status == 1
    assert checks["token"]["found"] == "from HF_TOKEN: the Hub does not accept this token"


def test_a_hub_that_cannot_be_reached(run, hub_server, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setenv("HF_TOKEN", "hf_me")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(hub, "TRIES", 1)
    status, checks = run("--online")
    assert status == 1
    assert "the Hub could not be reached" in checks["token"]["found"]


def test_a_cache_that_is_not_writable(run, monkeypatch):
    monkeypatch.setattr("os.access", lambda *_: False)
    status, checks = run()
    assert (status, checks["cache"]["status"]) == (1, "fail")


def test_the_size_of_a_cache_counts_each_file_once(tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "a").write_bytes(bytes(1000))
    (tmp_path / "snapshot").symlink_to(tmp_path / "blobs" / "a")
    assert 1000 <= doctor._size(tmp_path) < 1200
