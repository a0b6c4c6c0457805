"""`generate`."""

from __future__ import annotations

import warnings
from functools import partial
from typing import IO, TYPE_CHECKING, Any

import click

from bitnest_format.cli_shared import (
    Gamma,
    as_json_text,
    checkpoint_folder,
    completing,
    example,
    json_option,
    revision_option,
    warn,
)
from bitnest_format.errors import UsageError

if TYPE_CHECKING:
    from bitnest_format.runtime.generate import Generation, OpenView
    from bitnest_format.runtime.model import Unpack


@click.command(epilog=example('bitnest-format generate ./SmolLM2-BitNest --stats --prompt "Why do birds build nests?"'))
@click.argument("checkpoint", shell_complete=completing(paths=True))
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
    shell_complete=completing("auto", "cpu", "cuda"),
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
    folder = checkpoint_folder(checkpoint, revision, patterns)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeviceWarning)
        model = api.load(str(folder), view=view, device=device, unpack=unpack)
    warn([model.device_choice.warning] if model.device_choice.warning else [])
    if model.checkpoint.manifest.draft_only:
        click.echo(f"Note: {DRAFT_ONLY}", err=True)
    messages = None if system is None else [{"role": "system", "content": system}, {"role": "user", "content": text}]
    stream = None if as_json else partial(click.echo, nl=False)
    result = model.generate(messages or text, chat=chat, kv=kv, stream=stream, **options)
    if as_json:
        click.echo(as_json_text(_generation(result)))
    else:
        click.echo()
    if stats:
        click.echo(_stats_text(result), err=True)


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
