"""`bench`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import IO, Any

import click
from click.shell_completion import CompletionItem

from bitnest_format.cli_shared import (
    Lengths,
    Names,
    as_json_text,
    checkpoint_folder,
    completing,
    example,
    json_option,
    revision_option,
)
from bitnest_format.errors import UsageError


def _complete_model(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from bitnest_format.runtime.shapes import SHAPES

    return completing(*SHAPES, paths=True)(ctx, parameter, incomplete)


def _complete_machine(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from bitnest_format.runtime.machines import CUSTOM_FIELDS, MACHINES

    return completing(*MACHINES, *(f"{field}=" for field in CUSTOM_FIELDS))(ctx, parameter, incomplete)


@click.command(
    epilog=example(
        "bitnest-format bench llama-3-8b --context 2K,32K --acceptance 0.95 --out bench.json",
        "bitnest-format bench llama-3-8b --simulate orin-nx-16",
    )
)
@click.argument("model", metavar="SHAPE|CHECKPOINT", shell_complete=_complete_model)
@click.option(
    "--context",
    "contexts",
    type=Lengths(),
    multiple=True,
    default=((2048,),),
    show_default="2K",
    help="Tokens in the cache, such as 2K,8K,32K; may be given several times.",
)
@click.option("--modes", type=Names(), default="half,target,nested", help="half is fp16, target W8A8 without drafts.")
@click.option("--gamma", type=int, default=4, help="Tokens drafted in a round.")
@click.option(
    "--acceptance",
    type=float,
    show_default="0.95 on random weights; real text on a checkpoint",
    help="Accept drafts at this stated rate instead of by the text.",
)
@click.option(
    "--acceptance-of",
    type=click.Choice(["tokens", "drafts"]),
    default="tokens",
    help="The rate is each token's probability, or accepted / drafted.",
)
@click.option("--text", type=click.File(encoding="utf-8"), help="Text to decode on a checkpoint.  [default: built-in]")
@click.option(
    "--quantized-head/--half-head",
    default=False,
    help="Of a shape: a nested W4/W8 head, or a 16-bit one. A checkpoint's is as stored.",
)
@click.option("--kv-switch", type=int, show_default="2048", help="Cache entries up to which drafts read KV8.")
@click.option("--recent", type=int, show_default="128", help="Newest entries that drafts read at KV8 beyond that.")
@click.option("--repeats", type=int, default=5, help="Timed blocks of each mode.")
@click.option("--kernels", is_flag=True, help="Time each kernel alone instead.")
@click.option(
    "--simulate",
    metavar="MACHINE",
    shell_complete=_complete_machine,
    help="Predict for a machine that is not here: orin-nx-16, h200, ..., or bandwidth=GB/s,memory=GiB,launch=us.",
)
@click.option("--device", metavar="cuda[:N]", default="cuda", help="The GPU to measure.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write the JSON to this file too.")
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Draw into this file; needs matplotlib.")
@revision_option
@json_option
def bench(
    model: str,
    contexts: tuple[tuple[int, ...], ...],
    revision: str | None,
    simulate: str | None,
    device: str,
    kernels: bool,
    out: Path | None,
    plot: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Measure decoding speed on a GPU, or predict it.

    Runs fp16 (cuBLAS), W8A8 and nested decoding in turns on a named shape with random weights (llama-2-7b, llama-3-8b,
    qwen2.5-7b, llama-3.2-3b) or on a nested checkpoint. Reports tokens/s, GB/s and their share of what a plain read
    reaches, memory and energy.
    """
    from bitnest_format import hub
    from bitnest_format.runtime import bench_report, bench_request
    from bitnest_format.runtime.shapes import SHAPES

    if model not in SHAPES and not Path(model).expanduser().exists() and not hub.is_repo_id(model):
        raise UsageError(f"{model!r}: neither a shape ({', '.join(SHAPES)}) nor a folder or repository of a checkpoint")
    folder = None if model in SHAPES else checkpoint_folder(model, revision, hub.CHECKPOINT_FILES)
    lengths = tuple(dict.fromkeys(length for given in contexts for length in given))
    command = ["bitnest-format", *sys.argv[1:]]
    options |= {"contexts": lengths, "text": _bench_text(options["text"]), "command": command}
    request = bench_request.make_request(model, folder, stated=simulate is not None or kernels, **options)
    if simulate is not None:
        document = bench_request.simulate_on(request, simulate)
    elif kernels:
        document = bench_request.run_kernels(request, device)
    else:
        document = bench_request.run(request, folder, device)
    text = as_json_text(document)
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")
    click.echo(text if as_json else bench_report.render(document))
    if plot is not None and (why_not := bench_report.draw(document, plot)):
        click.echo(f"Note: {why_not}", err=True)


def _bench_text(given: IO[str] | None) -> str:
    """The text that a checkpoint decodes: the file given, or the built-in text."""
    if given is not None:
        return given.read()
    from bitnest_format.converters.calibration import builtin_text

    return builtin_text()
