"""Conversions by several processes, started on this machine as torchrun would start them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from bitnest_format.cli import main
from bitnest_format.converters.ranks import Ranks
from bitnest_format.shards import write_json

SECONDS = 120
CLI = "import sys; from bitnest_format.cli import main; main(sys.argv[1:])"
# The process dies without a word when it comes to its second layer.
DYING = f"""
import os, signal
from bitnest_format.converters.float_model import FloatModel
run = FloatModel.run_layer
FloatModel.run_layer = lambda self, layer, *rest: (
    os.kill(os.getpid(), signal.SIGKILL) if layer == 1 else run(self, layer, *rest)
)
{CLI}
"""
# Rank 1 stops answering for longer than rank 0 is willing to wait.
STALLING = f"""
import datetime, time, torch
from bitnest_format.converters.float_model import FloatModel
run = FloatModel.run_layer
def run_layer(self, layer, *rest):
    if layer == 1 and self.ranks.index == 1:
        time.sleep(10)
    if layer == 1:
        torch.distributed.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=3))
    return run(self, layer, *rest)
FloatModel.run_layer = run_layer
{CLI}
"""

Launch = Callable[..., list[tuple[int, str, str]]]


@pytest.fixture
def launch() -> Iterator[Launch]:
    """`(arguments, programs)` -> exit status, stdout and stderr of each rank; one rank runs each program.

    Ranks end by themselves, or are killed with the test.
    """
    started: list[subprocess.Popen[str]] = []

    def run(arguments: Sequence[object], programs: Sequence[str] = (CLI, CLI)) -> list[tuple[int, str, str]]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        shared = {**os.environ, "PYTHONSAFEPATH": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(len(programs))}
        shared["OMP_NUM_THREADS"] = str(torch.get_num_threads())
        ranks = [
            subprocess.Popen(
                [sys.executable, "-W", "error", "-c", program, *map(str, arguments)],
                env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                encoding="utf-8",
            )
            for rank, program in enumerate(programs)
        ]
        started.extend(ranks)
        outputs = [process.communicate(timeout=SECONDS) for process in ranks]
        return [(process.returncode, *output) for process, output in zip(ranks, outputs, strict=True)]

    yield run
    for process in started:
        if process.poll() is None:
            process.kill()
            process.communicate()


@pytest.fixture
def conversion(tmp_path: Path, tiny_model: Any) -> Callable[..., list[object]]:
    """`(output, nan=False)` -> the arguments of a conversion of a tiny model that calibrates on 9 sequences."""

    def arguments(output: str, nan: bool = False) -> list[object]:
        folder = tmp_path / ("broken" if nan else "source")
        if not folder.exists():
            folder.mkdir()
            config, tensors = tiny_model()
            if nan:
                tensors["model.norm.weight"][0] = torch.nan
            write_json(folder / "config.json", config)
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
            ids = torch.randint(0, 320, (9, 64), generator=torch.Generator().manual_seed(0))
            save_file({"input_ids": ids}, tmp_path / "ids.safetensors")
        options = {
            "--calibration": tmp_path / "ids.safetensors",
            "--sequence-length": 64,
            "--base-sweeps": 1,
            "--refinement-sweeps": 1,
            "--scale-search": "max",
        }
        return [
            "convert",
            folder,
            tmp_path / output,
            "--quantize-lm-head",
            *(x for pair in options.items() for x in pair),
        ]

    return arguments


def _bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def _convert_here(arguments: Sequence[object]) -> None:
    done = CliRunner().invoke(main, list(map(str, arguments)))
    assert done.exit_code == 0, done.output


def test_two_ranks_write_the_bytes_of_one(launch: Launch, conversion: Any, tmp_path: Path) -> None:
    _convert_here(conversion("one"))
    (status, summary, messages), (other_status, *other) = launch(conversion("two"))
    assert status == other_status == 0, messages
    assert summary.startswith(f"{tmp_path / 'two'}: 15 modules")
    assert "quantizing layers" in messages
    assert other == ["", ""]
    assert _bytes(tmp_path / "one") == _bytes(tmp_path / "two")


def test_the_first_rank_alone_makes_the_rotation(launch: Launch, conversion: Any) -> None:
    """Its last bits depend on the number of threads, which may differ from rank to rank."""
    without = f"from bitnest_format.converters import rotation\nrotation.random_orthogonal = None\n{CLI}"
    (status, _, messages), (other_status, *_) = launch(conversion("out"), (CLI, without))
    assert (status, other_status) == (0, 0), messages


def test_problem_is_told_once_and_ends_all_ranks(launch: Launch, conversion: Any, tmp_path: Path) -> None:
    (status, _, messages), (other_status, *other) = launch(conversion("out", nan=True))
    assert status == other_status == 1
    assert messages.splitlines()[-1] == (
        "Error: model.safetensors: model.norm.weight: 1 NaN value, expected finite weights. Export the model again."
    )
    assert other == ["", ""]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "ids.safetensors"]


@pytest.mark.parametrize("programs", [(CLI, DYING), (STALLING, STALLING)], ids=["dies", "stalls"])
def test_lost_rank_ends_the_others_and_a_resume_needs_no_second_one(
    programs: tuple[str, str], launch: Launch, conversion: Any, tmp_path: Path
) -> None:
    (status, _, messages), other = launch(conversion("out"), programs)
    assert status == 1
    assert messages.splitlines()[-1].startswith("Error: rank 0: another rank ended or stopped answering (")
    assert "Traceback" not in messages
    assert other[0] in (1, -signal.SIGKILL) and other[1] == ""
    # torch may log that rank 0's counter is gone.
    assert not any(line.startswith(("Error", "Traceback")) for line in other[2].splitlines())
    assert not (tmp_path / "out").exists()
    _convert_here([*conversion("out"), "--resume"])
    _convert_here(conversion("whole"))
    assert _bytes(tmp_path / "out") == _bytes(tmp_path / "whole")


@pytest.mark.parametrize(
    ("costs", "count", "owners"),
    [
        ([1, 1, 1, 1], 2, [0, 0, 1, 1]),
        ([1, 1, 1], 4, [0, 2, 3]),
        ([8, 1, 1], 2, [0, 1, 1]),
        ([], 3, []),
        ([5], 2, [1]),
    ],
)
def test_tasks_are_shared_in_runs_of_about_the_same_cost(costs: list[float], count: int, owners: list[int]) -> None:
    ranks = Ranks()
    ranks.count = count
    assert ranks.share(costs) == owners
