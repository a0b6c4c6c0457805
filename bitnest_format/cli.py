"""The command line: each command parses, makes one library call, and reports what came back.

Results go to stdout; progress, notes, warnings and errors to stderr. Exit status 0 means yes, 1 no or failed,
2 a wrong call, 130 interrupted. Everything heavy is imported inside the command that needs it, so that `--help`
is quick and needs neither torch nor a GPU.
"""

from __future__ import annotations

import errno
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

import click

from bitnest_format import __version__
from bitnest_format.errors import BitnestError, FailedElsewhere, UsageError

if TYPE_CHECKING:
    from bitnest_format.converters.base import Source
    from bitnest_format.converters.export import ExportResult
    from bitnest_format.hub import Location
    from bitnest_format.pull import PullView
    from bitnest_format.runtime.generate import Generation, OpenView
    from bitnest_format.runtime.model import Unpack
    from bitnest_format.shards import Files

# The rows of converters.export_formats.FORMATS, whose import would cost --help a second.
EXPORT_FORMATS = ("compressed-tensors-w4", "compressed-tensors-w8", "gptq", "gptq-v2", "hf")
# How base planes are found; a quantized source brings them.
BASE_OPTIONS = ("base", "base_bound", "base_sweeps", "scale_search")
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
            if message:
                click.echo(message, err=True)
            if isinstance(error, FailedElsewhere):
                # The connections to a rank that is gone cannot be closed, and their threads may abort an orderly end.
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
            ctx.exit(status)


def explain(error: BitnestError | OSError | KeyboardInterrupt) -> tuple[str, int]:
    """The message and the exit status of a failure that is not a bug."""
    if isinstance(error, KeyboardInterrupt):
        return "Interrupted.", INTERRUPTED_STATUS
    if isinstance(error, Interrupted | FailedElsewhere):
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


class Gamma(click.ParamType["int | str"]):
    """A whole number, or `auto`."""

    name = "integer|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if isinstance(value, int) or str(value) == "auto":
            return value
        try:
            return int(value)
        except ValueError:
            self.fail(f"{value!r} is neither a whole number nor 'auto'", param, ctx)


class Lengths(click.ParamType["tuple[int, ...]"]):
    """Lengths in tokens: `2048`, `2K`, `2K,8K`; K is 1024."""

    name = "tokens"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        found = [re.fullmatch(r"([1-9]\d{0,8})([kK]?)", part.strip()) for part in str(value).split(",")]
        lengths = tuple(int(match[1]) * (1024 if match[2] else 1) for match in found if match)
        if len(lengths) < len(found):
            self.fail(f"{value!r} is not a list of lengths such as 2K,8K or 3000", param, ctx)
        return lengths


class Names(click.ParamType["tuple[str, ...]"]):
    """Words separated by commas."""

    name = "names"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        return value if isinstance(value, tuple) else tuple(part.strip() for part in str(value).split(","))


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
    "--reference",
    metavar="PATH|REPO_ID",
    help="Of a GPTQ or compressed-tensors SOURCE: the full-precision model it was made from.",
)
@click.option("--reference-revision", metavar="REV", help="Branch, tag or commit of the reference's repository.")
@click.option(
    "--recipe",
    type=click.Choice(["default", "paper"]),
    default="default",
    help="Where options that are not given come from; 'paper' is the construction of arXiv 2610.02800.",
)
@click.option(
    "--rotation",
    metavar="none|random|hadamard|learn|spinquant:FILE|folded",
    show_default="random; none where SOURCE is quantized",
    help="Rotation folded into the weights; 'folded' keeps a source as it is and records that it came rotated.",
)
@click.option("--learn-steps", type=int, show_default="100", help="Steps of --rotation learn.")
@click.option("--learn-rate", type=float, show_default="1.5", help="Rate of its first step; it falls to zero.")
@click.option(
    "--save-rotation",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the rotation too, to a .safetensors that --rotation spinquant:FILE reads.",
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
    "--base-sweeps",
    type=int,
    show_default="3; recipe paper: 0",
    help="Passes of coordinate descent over the base plane after error feedback.",
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
@click.option(
    "--refinement-sweeps",
    type=int,
    show_default="3",
    help="The same over the refinement plane, with --refinement feedback.",
)
@click.option(
    "--quantize-lm-head",
    is_flag=True,
    help="Nest the head as well; a tied embedding is then kept beside it. Smaller, faster, a little less exact.",
)
@click.option("--damping", type=float, show_default="0.01", help="Share of the Hessian's mean diagonal added to it.")
@click.option(
    "--calibration",
    metavar="builtin|PATH|DATASET_ID",
    show_default="builtin",
    help="Calibrate on the built-in text, a .txt, .jsonl or .parquet file, token ids (.safetensors), or a Hub dataset.",
)
@click.option("--calibration-samples", type=int, show_default="64", help="Sequences to calibrate on.")
@click.option("--sequence-length", type=int, show_default="512", help="Tokens in each sequence.")
@click.option("--seed", type=int, show_default="0", help="Seed of the rotation and of learning it.")
@click.option("--max-shard-size", "shard_bytes", type=Size(), show_default="5GB", help="Largest shard.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), show_default="cpu", help="Where to compute.")
@revision_option
@click.option("--stream", is_flag=True, help="Read a Hub repository's weights layer by layer, without a download.")
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
    reference: str | None,
    reference_revision: str | None,
    recipe: str,
    revision: str | None,
    stream: bool,
    resume: bool,
    dry_run: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Convert SOURCE into a nested checkpoint OUTPUT.

    OUTPUT is a new folder. SOURCE is a Hugging Face model folder, a GGUF file, or a Hub repository id. The 4-bit
    weights of a GPTQ or compressed-tensors model become the base plane as they are; without --reference there is
    nothing to refine them by, and OUTPUT can only draft.

    Processes started together (torchrun --nproc-per-node 2 -m bitnest_format convert ...) share the work, one GPU each.
    """
    from bitnest_format.converters.base import given_modules
    from bitnest_format.converters.options import ConvertOptions
    from bitnest_format.converters.pipeline import convert as run_conversion
    from bitnest_format.converters.ranks import joined
    from bitnest_format.progress import StageProgress

    if reference_revision is not None and reference is None:
        raise UsageError("--reference-revision: needs --reference")
    given = {name: value for name, value in options.items() if _was_given(ctx, name)}
    with joined(options["device"]) as ranks:
        if "calibration" in given:
            given["calibration"] = _calibration(given["calibration"])
        chosen = ConvertOptions.paper(**given) if recipe == "paper" else ConvertOptions(**given)
        _check_device(chosen.device)
        if stream and all(_is_local(place) for place in (source, reference) if place is not None):
            raise UsageError(f"--stream: {source} is a local path, which is read in place anyway. Leave --stream out.")
        model = _source(source, revision, chosen.ignore_unknown_tensors, stream, aloud=ranks.first)
        if reference is not None:
            from bitnest_format.converters.given_base import with_reference

            other = _source(reference, reference_revision, chosen.ignore_unknown_tensors, stream, aloud=ranks.first)
            model = with_reference(model, other)
        useless = [name for name in BASE_OPTIONS if name in given]
        if useless and given_modules(model) and not chosen.quantize_lm_head:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in useless)
            raise UsageError(f"{names}: the base planes are the source's own and stay as they are. Leave it out.")
        if dry_run:
            from bitnest_format.architecture import read_architecture
            from bitnest_format.converters.preflight import preflight, render_plan

            plan = ranks.once(lambda: preflight(model, read_architecture(model.config, model.tensors), chosen, output))
            if ranks.first:
                click.echo(_json(plan.to_dict()) if as_json else render_plan(plan))
            return
        try:
            with StageProgress() as progress:
                result = run_conversion(model, output, chosen, resume=resume, progress=progress, ranks=ranks)
        except KeyboardInterrupt:
            raise Interrupted("Interrupted. Run the same command with --resume to continue.") from None
        if ranks.first:
            _warn(result.warnings)
            summary = result.to_dict()
            click.echo(_json(summary) if as_json else _conversion_text(summary))


@main.command(epilog=example("bitnest-format validate ./SmolLM2-BitNest --deep"))
@click.argument("checkpoint")
@click.option("--deep", is_flag=True, help="Check the SHA-256 of every file and plane too.")
@revision_option
@json_option
@click.pass_context
def validate(ctx: click.Context, checkpoint: str, deep: bool, revision: str | None, as_json: bool) -> None:
    """Check a nested CHECKPOINT against the format.

    Lists everything that is wrong, one finding a line, as file: place: message. A Hub repository is judged by its
    listing, JSON files and shard headers, without a download of its weights; with --deep it is downloaded.

    Exit status 0: valid, 1: invalid, 2: wrong call.
    """
    from bitnest_format import hub
    from bitnest_format.manifest import DRAFT_ONLY, MANIFEST_FILE, Manifest
    from bitnest_format.report import render_findings
    from bitnest_format.shards import LocalFiles, json_in
    from bitnest_format.validation import validate as find_faults

    files = _checkpoint_files(checkpoint, revision, hub.CHECKPOINT_FILES)
    unread = "" if deep else " (hashes not checked: use --deep)"
    if not files.local and deep:
        # What was not downloaded is judged by its name: a pickle stays one.
        names = tuple(files.names())
        files = LocalFiles(_checkpoint_folder(checkpoint, revision, hub.CHECKPOINT_FILES), names)
    elif not files.local:
        unread = " (from its headers: codes, scales and hashes not checked: use --deep)"
    findings = find_faults(files, deep=deep)
    if as_json:
        listed = [{"file": f.file, "place": f.place, "message": f.message} for f in findings]
        click.echo(_json({"path": checkpoint, "deep": deep, "valid": not findings, "findings": listed}))
    elif findings:
        click.echo(render_findings(findings))
        click.echo(f"{checkpoint}: invalid, {len(findings)} finding{'s' * (len(findings) > 1)}", err=True)
    else:
        click.echo(f"{checkpoint}: valid{unread}")
        if Manifest.from_dict(json_in(files, MANIFEST_FILE)).draft_only:
            click.echo(f"Note: {DRAFT_ONLY}", err=True)
    ctx.exit(1 if findings else 0)


@main.command(epilog=example("bitnest-format inspect ./SmolLM2-BitNest"))
@click.argument("checkpoint")
@click.option("--tensor", metavar="NAME", help="Show one module or stored tensor in full.")
@revision_option
@json_option
def inspect(checkpoint: str, tensor: str | None, revision: str | None, as_json: bool) -> None:
    """Show what a nested CHECKPOINT holds.

    Sizes of the planes, group sizes, saturation and error of each module, rotation and provenance. Of a Hub
    repository only JSON files and shard headers are read; with --tensor it is downloaded.
    """
    from bitnest_format import hub, report

    if tensor:
        inspected = report.inspect_checkpoint(_checkpoint_folder(checkpoint, revision, hub.CHECKPOINT_FILES), tensor)
    else:
        inspected = report.inspect_checkpoint(_checkpoint_files(checkpoint, revision, hub.DRAFT_FILES))
    click.echo(_json(inspected.to_dict()) if as_json else report.render(inspected))


@main.command(epilog=example("bitnest-format push ./SmolLM2-BitNest me/SmolLM2-BitNest --private"))
@click.argument("checkpoint", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("repo_id")
@click.option("--private", is_flag=True, help="Make the repository private.")
@click.option("--revision", metavar="BRANCH", help="Push to this branch, made if it does not exist, or to refs/pr/N.")
@click.option("--create-pr", is_flag=True, help="Open a pull request instead.")
@click.option("--message", metavar="TEXT", help="Summary of the commits.")
@click.option("--tag", metavar="NAME", help="Give the last commit a tag.")
@json_option
def push(checkpoint: Path, repo_id: str, as_json: bool, **options: Any) -> None:
    """Publish the nested CHECKPOINT, a folder, as REPO_ID on the Hub.

    Checks everything first, then uploads the weights, and last what makes them loadable, with a model card. Run it
    again after an interruption: what has arrived is not sent twice.
    """
    from bitnest_format import push as pushing
    from bitnest_format.progress import StageProgress

    try:
        with StageProgress() as progress:
            result = pushing.push(checkpoint, repo_id, progress=progress, **options)
    except KeyboardInterrupt:
        raise Interrupted("Interrupted. Run the same command again: what has arrived is not sent twice.") from None
    _warn(result.warnings)
    if as_json:
        click.echo(_json(result.to_dict()))
        return
    sent = f"{len(result.uploaded)} of {result.files} files sent" if result.uploaded else "nothing had changed"
    click.echo(f"{result.pull_request or result.url}\n  commit {result.commit}, {sent}\n\n{result.load_lines()}")


@main.command(epilog=example("bitnest-format pull someone/SmolLM2-BitNest --view draft"))
@click.argument("repo_id")
@click.option(
    "--view",
    type=click.Choice(["nested", "draft"]),
    default="nested",
    help="Everything, or what drafting alone needs; a later pull of nested adds the refinement.",
)
@click.option("--out", type=click.Path(path_type=Path), help="Folder to fill in place of the Hub's cache.")
@click.option("--deep", is_flag=True, help="Check the SHA-256 of every file; with --out always done.")
@click.option("--force", is_flag=True, help="Download again what is there already.")
@revision_option
@json_option
def pull(
    repo_id: str, view: PullView, out: Path | None, deep: bool, force: bool, revision: str | None, as_json: bool
) -> None:
    """Download the nested checkpoint REPO_ID from the Hugging Face Hub.

    Prints the folder. An interrupted pull goes on where it stopped when it is run again.
    """
    from bitnest_format.pull import pull as run_pull

    try:
        located = run_pull(repo_id, view=view, revision=revision, out=out, deep=deep, force=force)
    except KeyboardInterrupt:
        raise Interrupted("Interrupted. Run the same command to continue.") from None
    _note(located)
    found = {"path": str(located.path), "repo_id": repo_id, "revision": located.revision, "view": view}
    click.echo(_json(found) if as_json else located.path)


@main.command(epilog=example("bitnest-format export ./SmolLM2-BitNest ./SmolLM2-W4A16 --format compressed-tensors-w4"))
@click.argument("checkpoint")
@click.argument("output", type=click.Path(path_type=Path))
@click.option("--format", type=click.Choice(EXPORT_FORMATS), required=True, help="What to write.")
@click.option(
    "--view",
    type=click.Choice(["draft", "target"]),
    show_default="w4, gptq: draft; w8, hf: target",
    help="The 4-bit draft or the 8-bit target; gptq and hf can hold either.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float16", "bfloat16", "float32"]),
    show_default="as in config.json",
    help="With --format hf: the type of dequantized weights.",
)
@click.option(
    "--activations",
    type=click.Choice(["none", "int8"]),
    default="none",
    help="With compressed-tensors: have its readers quantize inputs to INT8 per token, as nested decoding does.",
)
@click.option("--max-shard-size", "shard_bytes", type=Size(), show_default="5GB", help="Largest shard.")
@revision_option
@json_option
@click.pass_context
def export(
    ctx: click.Context, /, checkpoint: str, output: Path, revision: str | None, as_json: bool, **options: Any
) -> None:
    """Write one view of the nested CHECKPOINT to OUTPUT in a format that other programs read.

    compressed-tensors-w4 stores the base planes as they are; gptq and gptq-v2 differ in how zero points are stored; hf
    is dequantized. OUTPUT is a new folder. Of a repository only the planes that are needed are downloaded.
    """
    from bitnest_format import hub
    from bitnest_format.converters.export import export as run_export
    from bitnest_format.converters.export_options import ExportOptions
    from bitnest_format.progress import StageProgress
    from bitnest_format.pull import verify

    chosen = ExportOptions(**{name: value for name, value in options.items() if _was_given(ctx, name)})
    draft = chosen.chosen_view == "draft"
    located = hub.locate(checkpoint, revision=revision, patterns=hub.DRAFT_FILES if draft else hub.CHECKPOINT_FILES)
    _note(located)
    if located.repo_id is not None:
        verify(located.path, located.repo_id, view="draft" if draft else "nested")
    with StageProgress() as progress:
        result = run_export(
            located.path, output, chosen, repo_id=located.repo_id, revision=located.revision, progress=progress
        )
    for note in result.notes:
        click.echo(f"Note: {note}", err=True)
    click.echo(_json(result.to_dict()) if as_json else _export_text(result))


@main.command(epilog=example("bitnest-format diff ./SmolLM2-BitNest ./SmolLM2-135M-Instruct"))
@click.argument("a")
@click.argument("b")
@click.option(
    "--rotation-file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="The rotation A was made with, where its manifest cannot make it again (spinquant, learned).",
)
@click.option("--revision", metavar="REV", help="Branch, tag or commit of A.")
@click.option("--other-revision", metavar="REV", help="Branch, tag or commit of B.")
@json_option
@click.pass_context
def diff(
    ctx: click.Context,
    /,
    a: str,
    b: str,
    rotation_file: Path | None,
    revision: str | None,
    other_revision: str | None,
    as_json: bool,
) -> None:
    """Compare the nested checkpoint A with B.

    B is another nested checkpoint, the full-precision model A was made of (A's rotation is accounted for), or a GPTQ or
    compressed-tensors checkpoint; either may come first, and be a folder or a Hub repository id. Shows, per module,
    errors, saturation and which planes are equal byte for byte, and every other difference.

    Exit status 0: they do not differ; 1: they do, or could not be compared; 2: wrong call. Against a full-precision
    model, quantization errors are no difference as long as the manifest records them.
    """
    from bitnest_format import hub
    from bitnest_format.converters.diff import diff as run_diff
    from bitnest_format.converters.diff_report import render
    from bitnest_format.progress import StageProgress

    left, right = (
        hub.locate(name, revision=rev, patterns=hub.SOURCE_FILES) for name, rev in ((a, revision), (b, other_revision))
    )
    for located in (left, right):
        _note(located)
    with StageProgress() as progress:
        report = run_diff(left.path, right.path, names=(a, b), rotation_file=rotation_file, progress=progress)
    click.echo(_json(report.to_dict()) if as_json else render(report))
    ctx.exit(1 if report.differs else 0)


@main.command(epilog=example('bitnest-format generate ./SmolLM2-BitNest --stats --prompt "Why do birds build nests?"'))
@click.argument("checkpoint")
@click.option("--prompt", metavar="TEXT", help="The text to continue or to answer.")
@click.option("--prompt-file", type=click.File(encoding="utf-8"), help="Read the prompt from a file; - is stdin.")
@click.option("--system", metavar="TEXT", help="System message, put before the prompt by the chat template.")
@click.option(
    "--chat/--raw",
    default=None,
    show_default="chat where the checkpoint has a chat template",
    help="Wrap the prompt into the chat template, or continue it as it is.",
)
@click.option(
    "--view",
    type=click.Choice(["nested", "target", "draft"]),
    default="nested",
    help="Speculative decoding from both planes, plain decoding from both, or from the base plane alone.",
)
@click.option(
    "--gamma",
    type=Gamma(),
    show_default="the checkpoint's, mostly 4",
    help="Tokens drafted in a round; auto chooses as the text goes, after measuring what rounds cost.",
)
@click.option("--max-new-tokens", type=int, default=256, help="Most tokens to generate.")
@click.option("--temperature", type=float, default=0.0, help="0 is greedy; above it samples.")
@click.option("--top-k", type=int, help="Sample from the k likeliest tokens.")
@click.option("--top-p", type=float, help="Sample from the likeliest tokens that together have this probability.")
@click.option("--seed", type=int, default=0, help="Seed of sampling.")
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; may be given several times.")
@click.option(
    "--kv-switch",
    type=int,
    show_default="2048 on a GPU and with --unpack call, otherwise never reached",
    help="Cache entries up to which drafts read KV8.",
)
@click.option("--recent", type=int, show_default="128", help="Newest entries that drafts read at KV8 beyond that.")
@click.option(
    "--unpack",
    type=click.Choice(["auto", "load", "call"]),
    default="auto",
    help="On the CPU: unpack weights while loading (faster, more memory) or at each call.",
)
@click.option(
    "--device",
    metavar="auto|cpu|cuda[:N]",
    default="auto",
    help="Where to compute; auto is a GPU where one can be used.",
)
@click.option("--stats", is_flag=True, help="Print acceptance, tokens a round and bytes read a token on stderr.")
@revision_option
@json_option
def generate(
    checkpoint: str,
    prompt: str | None,
    prompt_file: IO[str] | None,
    system: str | None,
    chat: bool | None,
    view: OpenView,
    kv_switch: int | None,
    recent: int | None,
    unpack: Unpack,
    device: str,
    stats: bool,
    revision: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Generate text from a nested CHECKPOINT.

    The text is streamed to stdout as it becomes certain. At temperature 0 the nested view writes exactly what the
    target view writes.
    """
    text = _prompt_text(prompt, prompt_file)
    if system is not None and chat is False:
        raise UsageError("--system needs the chat template, which --raw turns off. Leave one of them out.")
    from bitnest_format import api, hub
    from bitnest_format.manifest import DRAFT_ONLY
    from bitnest_format.runtime.device import DeviceWarning
    from bitnest_format.runtime.kv_cache import KvSettings

    given = {"draft_switch_length": kv_switch, "recent": recent}
    kv = KvSettings(**{name: value for name, value in given.items() if value is not None})
    patterns = hub.DRAFT_FILES if view == "draft" else hub.CHECKPOINT_FILES
    folder = _checkpoint_folder(checkpoint, revision, patterns)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeviceWarning)
        model = api.load(str(folder), view=view, device=device, unpack=unpack)
    _warn([model.device_choice.warning] if model.device_choice.warning else [])
    if model.checkpoint.manifest.draft_only:
        click.echo(f"Note: {DRAFT_ONLY}", err=True)
    messages = None if system is None else [{"role": "system", "content": system}, {"role": "user", "content": text}]
    stream = None if as_json else partial(click.echo, nl=False)
    result = model.generate(messages or text, chat=chat, kv=kv, stream=stream, **options)
    if as_json:
        click.echo(_json(_generation(result)))
    else:
        click.echo()
    if stats:
        click.echo(_stats_text(result), err=True)


@main.command(epilog=example("bitnest-format bench llama-3-8b --context 2K,32K --acceptance 0.95 --out bench.json"))
@click.argument("model", metavar="SHAPE|CHECKPOINT")
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
    folder = None if model in SHAPES else _checkpoint_folder(model, revision, hub.CHECKPOINT_FILES)
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
    text = _json(document)
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


def _source(
    path_or_repo_id: str, revision: str | None, ignore_unknown_tensors: bool, stream: bool, *, aloud: bool
) -> Source:
    """The model to convert, downloaded where it lies on the Hub; with `stream`, its small files alone."""
    from bitnest_format import hub, remote
    from bitnest_format.converters.sources import open_source

    weights = None
    if stream and not _is_local(path_or_repo_id):
        located, weights = remote.locate_weights(path_or_repo_id, revision=revision)
    else:
        located = hub.locate(path_or_repo_id, revision=revision, patterns=hub.SOURCE_FILES)
    if aloud:
        _note(located)
    return open_source(
        located.path,
        name=located.repo_id,
        revision=located.revision,
        ignore_unknown_tensors=ignore_unknown_tensors,
        weights=weights,
    )


def _is_local(path_or_repo_id: str) -> bool:
    return bool(path_or_repo_id) and Path(path_or_repo_id).expanduser().exists()


def _check_device(device: str) -> None:
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise UsageError("--device cuda: torch finds no CUDA device here. Use --device cpu.")


def _checkpoint_files(checkpoint: str, revision: str | None, patterns: tuple[str, ...]) -> Files:
    """The files of a checkpoint, those of a repository left where they are."""
    from bitnest_format.remote import open_files

    files, note = open_files(checkpoint, revision=revision, patterns=patterns)
    if note:
        click.echo(f"Note: {note}", err=True)
    return files


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


def _warn(messages: Iterable[str]) -> None:
    for warning in messages:
        click.echo(f"Warning: {warning}", err=True)


def _conversion_text(summary: dict[str, Any]) -> str:
    only = " (draft only)" if summary["views"] == ["draft"] else ""
    lines = [f"{summary['folder']}: {summary['modules']} modules, {summary['bytes']:,} bytes{only}"]
    for label, name in (
        ("mean error of the draft weights", "mean_draft_error"),
        ("mean error of the target weights", "mean_target_error"),
        ("mean saturation of refinement codes", "mean_saturation"),
    ):
        if summary[name] is not None:
            lines.append(f"  {label}: {summary[name]:.2%}")
    learned = summary["learned_rotation"]
    if learned:
        lines.append(
            f"  rounding loss of the rotation, nats a token: {learned['loss_before']:.3f} at the start, "
            f"{learned['loss_after']:.3f} learned, {learned['loss_unquantized']:.3f} without rounding"
        )
    lines.append(f"  time: {summary['seconds']:.0f} s")
    return "\n".join(lines)


def _export_text(result: ExportResult) -> str:
    lines = [f"{result.folder}: {result.view} view as {result.format}, {result.bytes:,} bytes"]
    if result.planes_equal:
        lines.append(f"  {result.planes_equal} of {result.modules} base planes stored byte for byte")
    if result.rounding:
        changed = "weights" if result.format == "hf" else "scales"
        largest = f"largest {result.largest_rounding:.1e}"
        lines.append(f"  {changed} rounded: relative norm of the change {result.rounding:.1e}, {largest}")
    else:
        lines.append("  nothing was rounded")
    return "\n".join(lines)


def _prompt_text(prompt: str | None, prompt_file: IO[str] | None) -> str:
    if (prompt is None) == (prompt_file is None):
        raise UsageError("give the prompt with either --prompt or --prompt-file")
    if prompt is not None:
        return prompt
    assert prompt_file is not None
    try:
        return prompt_file.read()
    except UnicodeDecodeError as error:
        raise UsageError(f"{prompt_file.name}: is not UTF-8 text ({error.reason} at byte {error.start})") from error


def _generation(result: Generation) -> dict[str, Any]:
    return {
        "text": result.text,
        "token_ids": list(result.token_ids),
        "finish_reason": result.finish_reason,
        "stats": result.stats.to_dict(),
    }


def _stats_text(result: Generation) -> str:
    """The statistics, each with its definition where the name alone does not say it."""
    stats = result.stats
    lines = [f"{stats.prompt_tokens} prompt tokens, {stats.new_tokens} new, ended by {result.finish_reason}"]
    if stats.acceptance is not None:
        drafted = f"accepted drafts / drafted tokens = {stats.accepted} / {stats.drafted}, gamma {stats.gamma}"
        lines.append(f"acceptance {stats.acceptance:.3f} ({drafted})")
    if stats.tokens_per_round is not None:
        lines.append(f"{stats.tokens_per_round:.2f} tokens a round, {stats.rounds} rounds")
    if stats.acceptance is not None:
        lengths = ", ".join(f"{length}: {count}" for length, count in enumerate(stats.accepted_lengths))
        lines.append(f"rounds by drafts accepted: {lengths}")
    if stats.bytes_per_token is not None:
        lines.append(f"{stats.bytes_per_token / 1e6:.1f} MB read a token, by the format's byte model")
    phases = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in stats.seconds.items())
    pace = "" if stats.tokens_per_second is None else f"; {stats.tokens_per_second:.1f} tokens/s after the prompt"
    lines.append(f"{phases}{pace}; cache {stats.cache_bytes / 1e6:.1f} MB")
    return "\n".join(lines)


def _json(data: Any) -> str:
    return json.dumps(data, indent=2, ensure_ascii=False)
