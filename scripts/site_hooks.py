"""MkDocs hooks: pages generated from code, and files outside `docs/`.

The pages in `docs/` are also for a Git host, so they link to files all over the repository. Here these links get a place in
the site: some files become pages, others are copied, and links to folders become plain text. MkDocs calls the functions
by name; mkdocs.yml names this file.
"""

import os
import posixpath
import re
from pathlib import Path
from typing import Final

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from virnuc_cli.main import cli
from virnuc_cli.options import iter_commands

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
    *(f"virnuc_core.api.{name}" for name in ("embed", "predict", "open_embeddings")),
    *(f"virnuc_core.api.{name}" for name in ("Embedder", "Predictor", "Predictions")),
    *(f"virnuc_core.settings.{name}" for name in ("EngineSettings", "ScoringSettings")),
    *(f"virnuc_core.results.embeddings.{name}" for name in ("Embeddings", "Rows")),
    "virnuc_core.errors.VirnucError",
)

_LINK: Final = re.compile(r"(?<!!)\[(?P<label>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^)\s]+)\)")
_ELSEWHERE: Final = re.compile(r"[a-z]+:|#|//")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    contents = {name: (ROOT / source).read_text(encoding="utf-8") for source, name in PAGES.items()}
    contents |= {COMMANDS: commands_page(cli), API: api_page()}
    for name, content in contents.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
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
    head = (
        "# All commands and flags\n\n"
        "Made from the command line of this version. [Command line](cli.md) explains what the flags do together.\n"
    )
    commands = sorted(iter_commands(group), key=lambda command: command[0])
    return head + "".join(_command_text(name, command) for name, command in commands)


def _command_text(name: str, command: click.Command) -> str:
    context = click.Context(command, info_name=f"virnuc {name}")
    usage = " ".join([f"virnuc {name}", *command.collect_usage_pieces(context)])
    help_text = "\n\n".join(" ".join(part.split()) for part in (command.help or "").split("\n\n"))
    lines = ["", f"## {name}", "", f"    {usage}", "", help_text, ""]
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


def api_page() -> str:
    head = "# Python reference\n\nMade from the code of this version. [Python](python-api.md) shows the functions at work.\n"
    return head + "".join(f"\n::: {name}\n" for name in API_NAMES)
