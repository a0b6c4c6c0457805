"""The command line: each command parses, makes one library call, and reports what came back.

Results go to stdout; progress, notes, warnings and errors to stderr. Exit status 0 means yes, 1 no or failed,
2 a wrong call, 130 interrupted. Everything heavy is imported inside the command that needs it, so that `--help`
is quick and needs neither torch nor a GPU.
"""

from __future__ import annotations

import errno
import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from bitnest_format import __version__
from bitnest_format.errors import BitnestError, UsageError

if TYPE_CHECKING:
    from bitnest_format.hub import Location

DEBUG_VARIABLE = "BITNEST_DEBUG"
INTERRUPTED_STATUS = 130
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}

Command = TypeVar("Command", bound=Callable[..., Any])


class Interrupted(BitnestError):
    """The user pressed Ctrl-C; the message says how to go on."""

    exit_status = INTERRUPTED_STATUS


class Commands(click.Group):
    """A group that ends every known failure with one message on stderr and its exit status."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (BitnestError, OSError, KeyboardInterrupt) as error:
            if isinstance(error, BrokenPipeError) or ctx.params.get("debug"):
                raise
            message, status = explain(error)
            click.echo(message, err=True)
            ctx.exit(status)


def explain(error: BitnestError | OSError | KeyboardInterrupt) -> tuple[str, int]:
    """The message and the exit status of a failure that is not a bug."""
    if isinstance(error, KeyboardInterrupt):
        return "Interrupted.", INTERRUPTED_STATUS
    if isinstance(error, Interrupted):
        return str(error), error.exit_status
    if isinstance(error, BitnestError):
        return f"Error: {error}", error.exit_status
    reason = error.strerror or str(error) or type(error).__name__
    place = f"{error.filename}: " if error.filename else ""
    advice = " Free some space and run the command again." if error.errno == errno.ENOSPC else ""
    return f"Error: {place}{reason}.{advice}", 1


class Size(click.ParamType[int]):
    """A number of bytes: `5GB`, `500MB`, `2GiB`, `1000000`."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", str(value).strip())
        if match is None or match[2].upper() not in UNITS or float(match[1]) == 0:
            self.fail(f"{value!r} is not a size such as 5GB, 500MB or 2GiB", param, ctx)
        return int(float(match[1]) * UNITS[match[2].upper()])


class Bound(click.ParamType["float | None"]):
    """A number, or `none`."""

    name = "number|none"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float | None:
        if str(value).lower() == "none":
            return None
        try:
            return float(value)
        except ValueError:
            self.fail(f"{value!r} is neither a number nor 'none'", param, ctx)


def example(text: str) -> str:
    """An epilog that click leaves as it is."""
    return "\b\nExample:\n" + "\n".join(f"  {line}" for line in text.splitlines())


def json_option(command: Command) -> Command:
    return click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")(command)


def revision_option(command: Command) -> Command:
    return click.option("--revision", metavar="REV", help="Branch, tag or commit of a Hub repository.")(command)


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True, "max_content_width": 110},
    epilog=example("bitnest-format convert ./SmolLM2-135M-Instruct ./SmolLM2-BitNest"),
)
@click.version_option(__version__, prog_name="bitnest-format")
@click.option("--debug", is_flag=True, hidden=True, envvar=DEBUG_VARIABLE, help="Show tracebacks.")
def main(debug: bool) -> None:
    """Nested 4/8-bit checkpoints: convert, validate, inspect, and decode speculatively from one weight.

    A model is a local path or a Hugging Face Hub repository id (owner/name); what exists locally wins.
    """
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")


@main.command(epilog=example("bitnest-format convert ./SmolLM2-135M-Instruct ./SmolLM2-BitNest --group-size 64"))
@click.argument("source")
@click.argument("output", type=click.Path(path_type=Path))
@click.option(
    "--recipe",
    type=click.Choice(["default", "paper"]),
    default="default",
    help="Where options that are not given come from; 'paper' is the construction of arXiv 2610.02800.",
)
@click.option(
    "--rotation",
    metavar="none|random|hadamard|spinquant:FILE",
    show_default="random",
    help="Rotation folded into the weights.",
)
@click.option(
    "--group-size",
    type=int,
    show_default="128, or 64 or 32 where that does not divide",
    help="Inputs that share a scale; -1 is one group per row.",
)
@click.option("--base", type=click.Choice(["gptq", "rtn"]), show_default="gptq", help="How base codes are found.")
@click.option(
    "--base-bound",
    type=Bound(),
    show_default="0.8; recipe paper: none",
    help="Largest distance of a base code from its weight, in steps.",
)
@click.option(
    "--scale-search",
    type=click.Choice(["mse", "max"]),
    show_default="mse",
    help="Search each group's scale, or take the largest weight / 7.",
)
@click.option(
    "--refinement",
    type=click.Choice(["closed", "feedback"]),
    show_default="feedback; recipe paper: closed",
    help="How refinement codes are found.",
)
@click.option("--damping", type=float, show_default="0.01", help="Share of the Hessian's mean diagonal added to it.")
@click.option(
    "--calibration",
    metavar="builtin|PATH|DATASET_ID",
    show_default="builtin",
    help="Text to calibrate on: the built-in one, a .txt, .jsonl or .parquet file, or a dataset on the Hub.",
)
@click.option("--calibration-samples", type=int, show_default="64", help="Sequences to calibrate on.")
@click.option("--sequence-length", type=int, show_default="512", help="Tokens in each sequence.")
@click.option("--seed", type=int, show_default="0", help="Seed of the rotation.")
@click.option("--max-shard-size", "shard_bytes", type=Size(), show_default="5GB", help="Largest shard.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), show_default="cpu", help="Where to compute.")
@revision_option
@click.option("--resume", is_flag=True, help="Continue an interrupted conversion of the same source and options.")
@click.option("--dry-run", is_flag=True, help="Check the source and print the plan; write nothing.")
@click.option("--ignore-unknown-tensors", is_flag=True, help="Leave out tensors this architecture does not know.")
@json_option
@click.pass_context
def convert(
    ctx: click.Context,
    /,
    source: str,
    output: Path,
    recipe: str,
    revision: str | None,
    resume: bool,
    dry_run: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Convert SOURCE into a nested checkpoint OUTPUT.

    OUTPUT is a new folder. SOURCE is a Hugging Face model folder, a GGUF file, or a Hub repository id.
    """
    from bitnest_format import hub
    from bitnest_format.converters.options import ConvertOptions
    from bitnest_format.converters.pipeline import convert as run_conversion
    from bitnest_format.converters.sources import open_source
    from bitnest_format.progress import StageProgress

    given = {name: value for name, value in options.items() if _was_given(ctx, name)}
    if "calibration" in given:
        given["calibration"] = _calibration(given["calibration"])
    chosen = ConvertOptions.paper(**given) if recipe == "paper" else ConvertOptions(**given)
    _check_device(chosen.device)
    located = hub.locate(source, revision=revision, patterns=hub.SOURCE_FILES)
    _note(located)
    model = open_source(
        located.path,
        name=located.repo_id,
        revision=located.revision,
        ignore_unknown_tensors=chosen.ignore_unknown_tensors,
    )
    if dry_run:
        from bitnest_format.architecture import read_architecture
        from bitnest_format.converters.preflight import preflight, render_plan

        plan = preflight(model, read_architecture(model.config), chosen, output)
        click.echo(_json(plan.to_dict()) if as_json else render_plan(plan))
        return
    try:
        with StageProgress() as progress:
            result = run_conversion(model, output, chosen, resume=resume, progress=progress)
    except KeyboardInterrupt:
        raise Interrupted("Interrupted. Run the same command with --resume to continue.") from None
    _warn(result.warnings)
    summary = result.to_dict()
    click.echo(_json(summary) if as_json else _conversion_text(summary))


@main.command(epilog=example("bitnest-format validate ./SmolLM2-BitNest --deep"))
@click.argument("checkpoint")
@click.option("--deep", is_flag=True, help="Read every byte too: hashes, scales, forbidden code pairs.")
@revision_option
@json_option
@click.pass_context
def validate(ctx: click.Context, checkpoint: str, deep: bool, revision: str | None, as_json: bool) -> None:
    """Check a nested CHECKPOINT against the format.

    Lists everything that is wrong, one finding a line, as file: place: message.
    Exit status 0: valid, 1: invalid, 2: wrong call.
    """
    from bitnest_format import hub
    from bitnest_format.validation import validate as find_faults

    folder = _checkpoint_folder(checkpoint, revision, hub.CHECKPOINT_FILES)
    findings = find_faults(folder, deep=deep)
    if as_json:
        listed = [{"file": f.file, "place": f.place, "message": f.message} for f in findings]
        click.echo(_json({"path": checkpoint, "deep": deep, "valid": not findings, "findings": listed}))
    elif findings:
        click.echo("\n".join(map(str, findings)))
        click.echo(f"{checkpoint}: invalid, {len(findings)} finding{'s' * (len(findings) > 1)}", err=True)
    else:
        click.echo(f"{checkpoint}: valid" + ("" if deep else " (contents of the planes not read: use --deep)"))
    ctx.exit(1 if findings else 0)


@main.command(epilog=example("bitnest-format inspect ./SmolLM2-BitNest"))
@click.argument("checkpoint")
@click.option("--tensor", metavar="NAME", help="Show one module or stored tensor in full.")
@revision_option
@json_option
def inspect(checkpoint: str, tensor: str | None, revision: str | None, as_json: bool) -> None:
    """Show what a nested CHECKPOINT holds.

    Sizes of the planes, group sizes, saturation and error of each module, rotation and provenance.
    """
    from bitnest_format import hub, report

    folder = _checkpoint_folder(checkpoint, revision, hub.CHECKPOINT_FILES)
    inspected = report.inspect_checkpoint(folder, tensor)
    click.echo(_json(report.to_dict(inspected)) if as_json else report.render(inspected))


def _was_given(ctx: click.Context, name: str) -> bool:
    return ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def _calibration(value: str) -> str:
    """`builtin`, a file, or a dataset on the Hub, as what the converter takes: `builtin` or a path."""
    from bitnest_format import hub

    if value == "builtin" or Path(value).expanduser().exists():
        return value
    if not hub.is_repo_id(value):
        raise UsageError(
            f"--calibration {value}: no such file, and neither 'builtin' nor a dataset id (expected owner/name)"
        )
    located = hub.fetch_dataset_text(value)
    _note(located)
    return str(located.path)


def _check_device(device: str) -> None:
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise UsageError("--device cuda: torch finds no CUDA device here. Use --device cpu.")


def _checkpoint_folder(checkpoint: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    from bitnest_format import hub

    located = hub.locate(checkpoint, revision=revision, patterns=patterns)
    _note(located)
    if not located.path.is_dir():
        raise UsageError(f"{checkpoint}: is a file, expected the folder of a nested checkpoint")
    return located.path


def _note(located: Location) -> None:
    if located.note:
        click.echo(f"Note: {located.note}", err=True)


def _warn(warnings: Iterable[str]) -> None:
    for warning in warnings:
        click.echo(f"Warning: {warning}", err=True)


def _conversion_text(summary: dict[str, Any]) -> str:
    lines = [f"{summary['folder']}: {summary['modules']} modules, {summary['bytes']:,} bytes"]
    for label, name in (
        ("mean error of the draft weights", "mean_draft_error"),
        ("mean error of the target weights", "mean_target_error"),
        ("mean saturation of refinement codes", "mean_saturation"),
    ):
        if summary[name] is not None:
            lines.append(f"  {label}: {summary[name]:.2%}")
    lines.append(f"  time: {summary['seconds']:.0f} s")
    return "\n".join(lines)


def _json(data: Any) -> str:
    return json.dumps(data, indent=2, ensure_ascii=False)
