"""Commands that read a checkpoint: `validate`, `inspect`, `export`, `diff`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bitnest_format.cli_shared import (
    Size,
    as_json_text,
    checkpoint_files,
    checkpoint_folder,
    completing,
    example,
    json_option,
    note,
    revision_option,
    was_given,
)

if TYPE_CHECKING:
    from bitnest_format.converters.export import ExportResult

# The rows of converters.export_formats.FORMATS, whose import would cost --help a second.
EXPORT_FORMATS = ("compressed-tensors-w4", "compressed-tensors-w8", "gptq", "gptq-v2", "hf")


@click.command(epilog=example("bitnest-format validate ./SmolLM2-BitNest --deep"))
@click.argument("checkpoint", shell_complete=completing(paths=True))
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

    files = checkpoint_files(checkpoint, revision, hub.CHECKPOINT_FILES)
    unread = "" if deep else " (hashes not checked: use --deep)"
    if not files.local and deep:
        # What was not downloaded is judged by its name: a pickle stays one.
        names = tuple(files.names())
        files = LocalFiles(checkpoint_folder(checkpoint, revision, hub.CHECKPOINT_FILES), names)
    elif not files.local:
        unread = " (from its headers: codes, scales and hashes not checked: use --deep)"
    findings = find_faults(files, deep=deep)
    if as_json:
        listed = [{"file": f.file, "place": f.place, "message": f.message} for f in findings]
        click.echo(as_json_text({"path": checkpoint, "deep": deep, "valid": not findings, "findings": listed}))
    elif findings:
        click.echo(render_findings(findings))
        click.echo(f"{checkpoint}: invalid, {len(findings)} finding{'s' * (len(findings) > 1)}", err=True)
    else:
        click.echo(f"{checkpoint}: valid{unread}")
        if Manifest.from_dict(json_in(files, MANIFEST_FILE)).draft_only:
            click.echo(f"Note: {DRAFT_ONLY}", err=True)
    ctx.exit(1 if findings else 0)


@click.command(epilog=example("bitnest-format inspect ./SmolLM2-BitNest"))
@click.argument("checkpoint", shell_complete=completing(paths=True))
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
        inspected = report.inspect_checkpoint(checkpoint_folder(checkpoint, revision, hub.CHECKPOINT_FILES), tensor)
    else:
        inspected = report.inspect_checkpoint(checkpoint_files(checkpoint, revision, hub.DRAFT_FILES))
    click.echo(as_json_text(inspected.to_dict()) if as_json else report.render(inspected))


@click.command(epilog=example("bitnest-format export ./SmolLM2-BitNest ./SmolLM2-W4A16 --format compressed-tensors-w4"))
@click.argument("checkpoint", shell_complete=completing(paths=True))
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

    chosen = ExportOptions(**{name: value for name, value in options.items() if was_given(ctx, name)})
    draft = chosen.chosen_view == "draft"
    located = hub.locate(checkpoint, revision=revision, patterns=hub.DRAFT_FILES if draft else hub.CHECKPOINT_FILES)
    note(located)
    if located.repo_id is not None:
        verify(located.path, located.repo_id, view="draft" if draft else "nested")
    with StageProgress() as progress:
        result = run_export(
            located.path, output, chosen, repo_id=located.repo_id, revision=located.revision, progress=progress
        )
    for remark in result.notes:
        click.echo(f"Note: {remark}", err=True)
    click.echo(as_json_text(result.to_dict()) if as_json else _export_text(result))


@click.command(epilog=example("bitnest-format diff ./SmolLM2-BitNest ./SmolLM2-135M-Instruct"))
@click.argument("a", shell_complete=completing(paths=True))
@click.argument("b", shell_complete=completing(paths=True))
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
        note(located)
    with StageProgress() as progress:
        report = run_diff(left.path, right.path, names=(a, b), rotation_file=rotation_file, progress=progress)
    click.echo(as_json_text(report.to_dict()) if as_json else render(report))
    ctx.exit(1 if report.differs else 0)


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
