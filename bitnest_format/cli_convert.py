"""`convert`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bitnest_format.cli_shared import (
    Bound,
    Interrupted,
    Size,
    as_json_text,
    completing,
    example,
    is_local,
    json_option,
    note,
    revision_option,
    warn,
    was_given,
)
from bitnest_format.errors import UsageError

if TYPE_CHECKING:
    from bitnest_format.converters.base import Source

# How base planes are found; a quantized source brings them.
BASE_OPTIONS = ("base", "base_bound", "base_sweeps", "scale_search")


@click.command(
    epilog=example(
        "bitnest-format convert ./SmolLM2-135M-Instruct ./SmolLM2-BitNest --dry-run",
        "bitnest-format convert ./SmolLM2-135M-Instruct ./SmolLM2-BitNest",
    )
)
@click.argument("source", shell_complete=completing(paths=True))
@click.argument("output", type=click.Path(path_type=Path))
@click.option(
    "--reference",
    metavar="PATH|REPO_ID",
    shell_complete=completing(paths=True),
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
    shell_complete=completing("none", "random", "hadamard", "learn", "spinquant:", "folded"),
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
    shell_complete=completing("builtin", paths=True),
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
    given = {name: value for name, value in options.items() if was_given(ctx, name)}
    with joined(options["device"]) as ranks:
        if "calibration" in given:
            given["calibration"] = _calibration(given["calibration"])
        chosen = ConvertOptions.paper(**given) if recipe == "paper" else ConvertOptions(**given)
        _check_device(chosen.device)
        if stream and all(is_local(place) for place in (source, reference) if place is not None):
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
                click.echo(as_json_text(plan.to_dict()) if as_json else render_plan(plan))
            return
        try:
            with StageProgress() as progress:
                result = run_conversion(model, output, chosen, resume=resume, progress=progress, ranks=ranks)
        except KeyboardInterrupt:
            raise Interrupted("Interrupted. Run the same command with --resume to continue.") from None
        if ranks.first:
            warn(result.warnings)
            summary = result.to_dict()
            click.echo(as_json_text(summary) if as_json else _conversion_text(summary))


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
    note(located)
    return str(located.path)


def _source(
    path_or_repo_id: str, revision: str | None, ignore_unknown_tensors: bool, stream: bool, *, aloud: bool
) -> Source:
    """The model to convert, downloaded where it lies on the Hub; with `stream`, its small files alone."""
    from bitnest_format import hub, remote
    from bitnest_format.converters.sources import open_source

    weights = None
    if stream and not is_local(path_or_repo_id):
        located, weights = remote.locate_weights(path_or_repo_id, revision=revision)
    else:
        located = hub.locate(path_or_repo_id, revision=revision, patterns=hub.SOURCE_FILES)
    if aloud:
        note(located)
    return open_source(
        located.path,
        name=located.repo_id,
        revision=located.revision,
        ignore_unknown_tensors=ignore_unknown_tensors,
        weights=weights,
    )


def _check_device(device: str) -> None:
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise UsageError("--device cuda: torch finds no CUDA device here. Use --device cpu.")


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
