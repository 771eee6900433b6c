"""What users read: a sample of sentences, or every text of the program in one file.

    python -m scripts.sentences --sample 60 --seed 1     from README, docs, help and messages
    python -m scripts.sentences --texts                  help and messages, to be read in one sitting

`tests/unit/test_interfaces.py` holds the texts to the copy in `tests/unit/interfaces/texts.txt`.
"""

import argparse
import ast
import random
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Final

import click

from virnuc_cli.main import cli
from virnuc_cli.options import iter_commands

ROOT: Final = Path(__file__).parents[1]
PACKAGES: Final = ("virnuc_core", "virnuc_cli", "flows", "tasks", "deployments")
_SENTENCE: Final = re.compile(r"(?<=[.!?:])\s+(?=[A-Z`*\[])")
_WORD: Final = re.compile(r"[A-Za-z]{2,}")
# Comments and texts of JavaScript; a text may have texts in what is filled in.
_FILLED: Final = r"\$\{(?:`[^`]*`|[^`{}]|\{[^}]*\})*\}"
_SCRIPT: Final = re.compile(rf"//[^\n]*|\"([^\"\n]*)\"|'([^'\n]*)'|`((?:{_FILLED}|[^`])*)`")


def help_texts() -> Iterator[str]:
    """The help of every command and of its arguments and options."""
    for name, command in sorted(iter_commands(cli)):
        yield f"virnuc {name}: {' '.join((command.help or '').split())}"
        for param in command.params:
            if isinstance(param, click.Option) and param.help:
                yield f"virnuc {name} {param.opts[0]}: {param.help}"


def messages() -> Iterator[str]:
    """The texts in the code that are no docstrings, three words or more, with {} for what is filled in."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            yield from dict.fromkeys(_texts_of(tree))
        for path in sorted((ROOT / package).rglob("*.js")):
            for found in _SCRIPT.finditer(path.read_text(encoding="utf-8")):
                text = re.sub(_FILLED, "{}", "".join(filter(None, found.groups())))
                if _is_prose(text):
                    yield text


def _texts_of(tree: ast.AST) -> Iterator[str]:
    passed = {id(part) for node in ast.walk(tree) for part in _parts_of(node)}
    for node in ast.walk(tree):
        if id(node) not in passed and isinstance(node, ast.Constant | ast.JoinedStr):
            text = _joined(node)
            if _is_prose(text):
                yield " ".join(text.split())


def _parts_of(node: ast.AST) -> Iterator[ast.AST]:
    """Docstrings, and the parts of texts with something filled in."""
    if isinstance(node, ast.JoinedStr):
        yield from (part for part in ast.walk(node) if part is not node)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        yield node.value


def _joined(node: ast.Constant | ast.JoinedStr) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)


def _is_prose(text: str) -> bool:
    return len(_WORD.findall(text)) >= 3 and " " in text.strip()


def prose(path: Path) -> Iterator[str]:
    """Sentences of a page, without code, tables' rules, comments and pictures."""
    text = re.sub(
        r"```.*?```|<!--.*?-->|^ {4}.*?$",
        "",
        path.read_text(encoding="utf-8"),
        flags=re.DOTALL | re.MULTILINE,
    )
    for paragraph in re.split(r"\n\s*\n|\n[-*|#>]|\|", text):
        for sentence in _SENTENCE.split(" ".join(paragraph.split())):
            if len(_WORD.findall(sentence)) >= 4 and not sentence.startswith("!["):
                yield f"{path.relative_to(ROOT)}: {sentence}"


def texts() -> str:
    """Help and messages, one a line."""
    return "".join(f"{text}\n" for text in chain(help_texts(), messages()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--sample", type=int, metavar="N")
    what.add_argument("--texts", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.texts:
        print(texts(), end="")
        return
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    sentences = sorted({*chain.from_iterable(map(prose, pages)), *help_texts(), *messages()})
    for sentence in random.Random(arguments.seed).sample(sentences, arguments.sample):
        print(f"- {sentence}")


if __name__ == "__main__":
    main()
