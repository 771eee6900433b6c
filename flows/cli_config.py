"""`virnuc config`: what the settings are, and where each has its value from."""

from dataclasses import asdict
from typing import Any

import click

from flows.cli_options import OUTPUT_OPTIONS, CommandGroup, with_options
from flows.columns import aligned
from flows.config_file import FileSettings, iter_commands
from flows.config_origin import command_origins, environment_origins, split_command


@click.group(name="config", cls=CommandGroup)
def config_group() -> None:
    """What the settings are, and where they come from."""


@config_group.command(context_settings={"ignore_unknown_options": True})
@with_options(
    click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[COMMAND [FLAGS]...]"),
    *OUTPUT_OPTIONS,
)
@click.pass_context
def show(ctx: click.Context, command: tuple[str, ...], quiet: bool, as_json: bool, debug: bool) -> None:
    """Every setting of COMMAND (of all commands), its value, and where that came from.

    FLAGS are taken as if COMMAND were run with them.
    """
    from flows.commands import show as say

    root = ctx.find_root()
    assert isinstance(root.command, click.Group)
    settings = root.obj
    assert isinstance(settings, FileSettings)
    if command:
        chosen = [split_command(root.command, command)]
    else:
        chosen = [(path, ()) for path, _ in iter_commands(root.command)]
    found = {" ".join(path): list(command_origins(root, path, rest)) for path, rest in chosen}
    environment = list(environment_origins(settings))
    document: dict[str, Any] = {
        "files": [str(file) for file in settings.files],
        "commands": {name: [asdict(origin) for origin in origins] for name, origins in found.items()},
        "environment": [asdict(origin) for origin in environment],
    }
    files = ", ".join(document["files"]) or "none"
    tables = {name: origins for name, origins in {**found, "environment": environment}.items() if origins}
    text = [f"settings files: {files}"]
    text += [f"{name}\n{aligned([origin.line for origin in origins])}" for name, origins in tables.items()]
    say("json" if as_json else "human", document, "\n\n".join(text))
