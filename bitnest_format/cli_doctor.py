"""Commands about this machine: `doctor`, `completion`."""

from __future__ import annotations

import click

from bitnest_format.cli_shared import as_json_text, example, json_option

SHELLS = ("bash", "zsh", "fish")
PROGRAM = "bitnest-format"


@click.command(epilog=example("bitnest-format doctor"))
@click.option("--online", is_flag=True, help="Ask the Hub whose token it is; otherwise nothing is sent anywhere.")
@json_option
@click.pass_context
def doctor(ctx: click.Context, online: bool, as_json: bool) -> None:
    """Check this machine: versions, GPU, kernels, cache, token.

    One line each with ok, warn or fail, and what to do. A token is found or not; it is never shown.

    Exit status 0: nothing failed, 1: something did.
    """
    from bitnest_format import doctor as doctors

    checks = doctors.examine(online=online)
    click.echo(as_json_text(doctors.to_dict(checks)) if as_json else doctors.render(checks))
    ctx.exit(1 if doctors.status_of(checks) == "fail" else 0)


@click.command(
    epilog=example(
        "bitnest-format completion bash >> ~/.bashrc",
        "bitnest-format completion zsh >> ~/.zshrc",
        "bitnest-format completion fish > ~/.config/fish/completions/bitnest-format.fish",
    )
)
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script by which SHELL completes commands, options, their values and paths."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(ctx.find_root().command, {}, PROGRAM, "_BITNEST_FORMAT_COMPLETE").source())
