"""Fills README and the pages of docs/ whose tables come from result files or from code.

    python -m scripts.render [--check] [PAGE...]

Without PAGE all are filled but the tutorial, whose commands are run for it. With --check nothing is written, and the
exit code says whether the pages are what they are made from.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from scripts.render import results, settings, tutorial
from scripts.render.tables import ROOT, MakeTable, fill, load_results


def _filled(tables: Mapping[str, MakeTable], page: str) -> str:
    return fill(page, tables, load_results())


# Functions from the current text of a file to the expected one.
PAGES: Final[dict[str, tuple[Path, Callable[[str], str]]]] = {
    **{Path(name).stem: (ROOT / name, partial(_filled, own)) for name, own in results.PAGES.items()},
    "settings": (ROOT / "docs/configuration.md", partial(_filled, settings.TABLES)),
    "tutorial": (tutorial.PAGE, tutorial.render),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.render",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--check", action="store_true")
    parser.add_argument("pages", nargs="*", metavar="PAGE", help=", ".join(PAGES))
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.pages) - set(PAGES):
        parser.error(f"there is no page {', '.join(sorted(unknown))}: choose from {', '.join(PAGES)}")
    stale = []
    for name in arguments.pages or [name for name in PAGES if name != "tutorial"]:
        path, render = PAGES[name]
        text = path.read_text(encoding="utf-8")
        if (rendered := render(text)) != text:
            stale.append(name)
            if arguments.check:
                print(f"{path.name} is not what it is made from: run python -m scripts.render {name}")
                continue
            path.write_text(rendered, encoding="utf-8")
    return int(arguments.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
