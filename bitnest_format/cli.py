"""The command line: each command parses, makes one library call, and reports what came back.

Results go to stdout; progress, notes, warnings and errors to stderr. Exit status 0 means yes, 1 no or failed,
2 a wrong call, 130 interrupted. With `--json`, stdout holds one JSON document and nothing else, also when the command
fails. Everything heavy is imported inside the command that needs it, so that `--help` and completion are quick and need
neither torch nor a GPU. Commands stand in the modules `cli_*`.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import Any

import click

from bitnest_format import __version__
from bitnest_format.cli_bench import bench
from bitnest_format.cli_checkpoint import diff, export, inspect, validate
from bitnest_format.cli_convert import convert
from bitnest_format.cli_doctor import completion, doctor
from bitnest_format.cli_generate import generate
from bitnest_format.cli_hub import pull, push
from bitnest_format.cli_shared import INTERRUPTED_STATUS, Interrupted, as_json_text, example
from bitnest_format.errors import BitnestError, FailedElsewhere

DEBUG_VARIABLE = "BITNEST_DEBUG"


class Commands(click.Group):
    """A group that ends every known failure with one message on stderr and its exit status."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta["as_json"] = "--json" in args
        try:
            return super().parse_args(ctx, args)
        except click.ClickException as error:
            self._fail(ctx, error.format_message(), type(error).__name__, [], error.exit_code)
            raise

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.ClickException as error:
            # A wrong call; click writes the message and the usage.
            self._fail(ctx, error.format_message(), type(error).__name__, [], error.exit_code)
            raise
        except (BitnestError, OSError, KeyboardInterrupt) as error:
            if isinstance(error, BrokenPipeError) or ctx.params.get("debug"):
                raise
            message, status = explain(error)
            if message:
                shown = message if isinstance(error, Interrupted | KeyboardInterrupt) else f"Error: {message}"
                click.echo(shown, err=True)
                self._fail(ctx, message, type(error).__name__, getattr(error, "problems", []), status)
            if isinstance(error, FailedElsewhere):
                # The connections to a rank that is gone cannot be closed, and their threads may abort an orderly end.
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
            ctx.exit(status)

    def _fail(self, ctx: click.Context, message: str, kind: str, problems: list[str], status: int) -> None:
        """With --json, the failure as the one document on stdout."""
        if ctx.meta["as_json"]:
            error = {"type": kind, "message": message, "problems": problems or [message], "exit_status": status}
            click.echo(as_json_text({"error": error}))


def explain(error: BitnestError | OSError | KeyboardInterrupt) -> tuple[str, int]:
    """The message and the exit status of a failure that is not a bug."""
    if isinstance(error, KeyboardInterrupt):
        return "Interrupted.", INTERRUPTED_STATUS
    if isinstance(error, BitnestError):
        return str(error), error.exit_status
    reason = error.strerror or str(error) or type(error).__name__
    place = f"{error.filename}: " if error.filename else ""
    advice = " Free some space and run the command again." if error.errno == errno.ENOSPC else ""
    return f"{place}{reason}.{advice}", 1


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


for command in (convert, validate, inspect, push, pull, export, diff, generate, bench, doctor, completion):
    main.add_command(command)
