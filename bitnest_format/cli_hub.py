"""Commands of the Hub: `push`, `pull`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bitnest_format.cli_shared import Interrupted, as_json_text, example, json_option, note, revision_option, warn

if TYPE_CHECKING:
    from bitnest_format.pull import PullView


@click.command(epilog=example("bitnest-format push ./SmolLM2-BitNest me/SmolLM2-BitNest --private"))
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
    warn(result.warnings)
    if as_json:
        click.echo(as_json_text(result.to_dict()))
        return
    sent = f"{len(result.uploaded)} of {result.files} files sent" if result.uploaded else "nothing had changed"
    click.echo(f"{result.pull_request or result.url}\n  commit {result.commit}, {sent}\n\n{result.load_lines()}")


@click.command(epilog=example("bitnest-format pull someone/SmolLM2-BitNest --view draft"))
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
    note(located)
    found = {"path": str(located.path), "repo_id": repo_id, "revision": located.revision, "view": view}
    click.echo(as_json_text(found) if as_json else located.path)
