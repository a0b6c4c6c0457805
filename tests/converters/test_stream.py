"""Conversions that read a repository's weights where they lie, against a Hub on loopback."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import save, save_file

from bitnest_format.cli import main
from bitnest_format.converters.pipeline import _Conversion

Run = Callable[..., Result]
Change = Callable[[dict[str, torch.Tensor]], None]


@pytest.fixture
def weights(hub_server: Any, tiny_model: Any) -> Callable[..., int]:
    """`(change=None, **tiny_model arguments)` -> a repository `me/model` in two shards; returns the weights' bytes."""

    def make(change: Change | None = None, **arguments: Any) -> int:
        config, tensors = tiny_model(num_hidden_layers=3, **arguments)
        if change is not None:
            change(tensors)
        names = list(tensors)
        shards = {
            "model-00001-of-00002.safetensors": names[: len(names) // 2],
            "model-00002-of-00002.safetensors": names[len(names) // 2 :],
        }
        files = {file: save({name: tensors[name] for name in some}) for file, some in shards.items()}
        index = {"metadata": {}, "weight_map": {name: file for file, some in shards.items() for name in some}}
        small = {"config.json": config, "model.safetensors.index.json": index}
        texts = {name: json.dumps(content).encode() for name, content in small.items()}
        hub_server.create("me/model", {**files, **texts})
        return sum(map(len, files.values()))

    return make


@pytest.fixture
def convert(tmp_path: Path) -> Run:
    """`(output, *more, source="me/model")` -> the outcome of `convert --stream`; calibrates on token ids."""
    ids = torch.randint(0, 320, (4, 32), generator=torch.Generator().manual_seed(0))
    save_file({"input_ids": ids}, tmp_path / "ids.safetensors")
    sweeps = ("--base-sweeps", "0", "--refinement-sweeps", "0", "--scale-search", "max")

    def run(output: str, *more: str, source: str = "me/model", stream: bool = True) -> Result:
        calibration = ("--calibration", str(tmp_path / "ids.safetensors"), "--sequence-length", "32")
        streaming = ("--stream",) if stream else ()
        return CliRunner().invoke(
            main, ["convert", source, str(tmp_path / output), *calibration, *sweeps, *streaming, *more]
        )

    return run


def _stored(folder: Path) -> dict[str, bytes]:
    """Every file but the manifest, which names the fingerprint of the source."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != "bitnest.json"}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_streamed_conversion_reads_once_and_stores_nothing_of_the_source(
    tied: bool, weights: Any, convert: Run, hub_server: Any, tmp_path: Path
) -> None:
    size = weights(tied=tied)
    done = convert("streamed")
    assert done.exit_code == 0, done.output
    assert size <= hub_server.sent("safetensors$") < 1.02 * size
    assert not [path for path in (tmp_path / "hub").rglob("*") if path.name.endswith(".safetensors")]
    assert convert("downloaded", stream=False).exit_code == 0
    assert _stored(tmp_path / "streamed") == _stored(tmp_path / "downloaded")
    manifest = json.loads((tmp_path / "streamed" / "bitnest.json").read_text(encoding="utf-8"))
    assert manifest["source"]["name"] == "me/model"
    assert manifest["source"]["revision"] == hub_server.repositories["me/model"].branches["main"]


@pytest.mark.parametrize(("ignore_ranges", "times"), [(False, 9), (True, 2)])
def test_broken_connections_go_on_where_they_broke(
    ignore_ranges: bool, times: int, weights: Any, convert: Run, hub_server: Any, tmp_path: Path
) -> None:
    size = weights()
    hub_server.ignore_ranges = ignore_ranges
    fault = hub_server.fault("GET", r"/cdn/.*safetensors", cut=50_000, times=times, skip=4)
    done = convert("out")
    assert done.exit_code == 0, done.output
    assert fault.seen == times
    assert ignore_ranges or hub_server.sent("safetensors$") < 1.02 * size


def test_server_that_keeps_breaking_off_ends_the_conversion_and_a_resume_goes_on(
    weights: Any, convert: Run, hub_server: Any, tmp_path: Path
) -> None:
    weights()
    fault = hub_server.fault("GET", r"/cdn/.*safetensors", cut=0, times=1000, skip=25)
    done = convert("out")
    assert done.exit_code == 1
    assert done.stderr.splitlines()[-1].startswith("Error: me/model: the Hub could not be reached (")
    assert not (tmp_path / "out").exists()
    fault.times = 0
    resumed = convert("out", "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert convert("whole").exit_code == 0
    assert _stored(tmp_path / "out") == _stored(tmp_path / "whole")


def test_resume_reads_only_what_is_missing(
    weights: Any, convert: Run, hub_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(_Conversion, "assemble", interrupt)
        assert convert("out").exit_code == 130
    before = hub_server.sent("safetensors$")
    done = convert("out", "--resume")
    assert done.exit_code == 0, done.output
    head = 320 * 256 * 2
    assert head <= hub_server.sent("safetensors$") - before < head + 10_000


def test_values_that_are_not_finite_are_found_when_they_are_read(weights: Any, convert: Run, tmp_path: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.v_proj.weight"][3, 7] = torch.inf

    weights(spoil)
    done = convert("out")
    assert done.exit_code == 1
    assert done.stderr.splitlines()[-1] == (
        "Error: model-00001-of-00002.safetensors: model.layers.0.self_attn.v_proj.weight: 1 infinite value, expected "
        "finite weights. Export the model again."
    )
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*bitnest-work"))


def test_local_folders_are_not_streamed(convert: Run, tmp_path: Path) -> None:
    done = convert("out", source=str(tmp_path))
    assert done.exit_code == 2
    assert done.stderr.splitlines()[-1] == (
        f"Error: --stream: {tmp_path} is a local path, which is read in place anyway. Leave --stream out."
    )


def test_repository_without_safetensors_is_refused(hub_server: Any, convert: Run, tiny_model: Any) -> None:
    config = json.dumps(tiny_model()[0]).encode()
    hub_server.create("me/model", {"config.json": config, "pytorch_model.bin": b"\x80\x02"})
    done = convert("out")
    assert done.exit_code == 1
    assert "has its weights only as pytorch_model.bin; these formats can carry code and are not opened." in done.stderr
