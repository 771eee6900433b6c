"""MkDocs hooks: pages generated from code, and files outside `docs/`.

The pages in `docs/` are also for a Git host, so they link to files all over the repository. Here these links get a place in
the site: some files become pages, others are copied, and links to folders become plain text. MkDocs calls the functions
by name; mkdocs.yml names this file.
"""

import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from virnuc_cli.main import cli

ROOT: Final = Path(__file__).parents[1]
# Pages of the site from elsewhere in the repository.
PAGES: Final = {
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changes.md",
    "CONTRIBUTING.md": "contributing.md",
    "examples/README.md": "examples.md",
}
COMMANDS: Final = "commands.md"
API: Final = "api-reference.md"
COPIES: Final = "files"
API_NAMES: Final = (
    *(f"virnuc_core.api.{name}" for name in ("embed", "predict", "open_embeddings", "export_embeddings")),
    "virnuc_core.api.Predictions",
    *(f"virnuc_core.settings.{name}" for name in ("EngineSettings", "ScoringSettings")),
    *(f"virnuc_core.results.embeddings.{name}" for name in ("Embeddings", "Rows")),
    "virnuc_core.errors.VirnucError",
)

_LINK: Final = re.compile(r"(?<!!)\[(?P<label>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^)\s]+)\)")
_ELSEWHERE: Final = re.compile(r"[a-z]+:|#|//")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds generated pages, and those from elsewhere in the repository."""
    for source, name in PAGES.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text(encoding="utf-8")))
    files.append(File.generated(config, COMMANDS, content=commands_page(cli)))
    files.append(File.generated(config, API, content=api_page()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrites every link into the repository."""
    own = page.file.src_uri
    if own in (COMMANDS, API):
        return markdown
    sources = {name: source for source, name in PAGES.items()}
    folder = posixpath.dirname(sources.get(own, f"docs/{own}"))

    def resolve(link: re.Match[str]) -> str:
        target, label = link["target"], link["label"]
        if _ELSEWHERE.match(target):
            return link[0]
        path, hash_sign, anchor = target.partition("#")
        wanted = posixpath.normpath(posixpath.join(folder, path))
        if wanted.startswith("docs/"):
            place = wanted.removeprefix("docs/")
        elif wanted in PAGES:
            place = PAGES[wanted]
        elif (ROOT / wanted).is_dir():
            return label
        else:
            place = f"{COPIES}/{wanted}"
            if (ROOT / wanted).is_file() and files.get_file_from_path(place) is None:
                files.append(File.generated(config, place, abs_src_path=str(ROOT / wanted)))
        return f"[{label}]({os.path.relpath(place, posixpath.dirname(own) or '.')}{hash_sign}{anchor})"

    return _LINK.sub(resolve, markdown)


def commands_page(group: click.Group) -> str:
    """Every command with its arguments and options."""
    head = (
        "# All commands and flags\n\n"
        "Made from the command line of this version. [Command line](cli.md) explains what the flags do together.\n"
    )
    return head + "".join(_command_text("virnuc", name, command) for name, command in _walk(group))


def _walk(group: click.Group, prefix: str = "") -> Iterator[tuple[str, click.Command]]:
    """The commands of a group and its subgroups, by name."""
    for name, command in sorted(group.commands.items()):
        if isinstance(command, click.Group):
            yield from _walk(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


def _command_text(program: str, name: str, command: click.Command) -> str:
    context = click.Context(command, info_name=f"{program} {name}")
    usage = " ".join([f"{program} {name}", *command.collect_usage_pieces(context)])
    lines = ["", f"## {name}", "", f"    {usage}", "", _paragraphs(command.help or ""), ""]
    options = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
    if options:
        lines += ["| flag | values | meaning |", "|---|---|---|", *map(_option_row, options), ""]
    return "\n".join(lines)


def _option_row(option: click.Option) -> str:
    values = "" if option.is_flag else option.metavar or option.type.name
    if isinstance(option.type, click.Choice):
        values = ", ".join(map(str, option.type.choices))
    required = " Required." if option.required else ""
    cells = [f"`{', '.join(option.opts)}`", values, (option.help or "") + required]
    return "| " + " | ".join(cell.replace("|", "&#124;") for cell in cells) + " |"


def _paragraphs(text: str) -> str:
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def api_page() -> str:
    """The mkdocstrings directives for the public names."""
    text = "# Python reference\n\nMade from the code of this version. [Python](python-api.md) shows the functions at work.\n"
    return text + "".join(f"\n::: {name}\n" for name in API_NAMES)
