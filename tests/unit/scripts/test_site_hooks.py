"""The site builds without a warning, loads nothing from other hosts, and lists every command."""

import re
import shutil
from pathlib import Path

import click
import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config
from playwright.sync_api import sync_playwright

from scripts.site_hooks import ROOT, commands_page
from virnuc_cli.main import cli

pytestmark = pytest.mark.slow

# What a browser would fetch by itself, unlike links.
FETCHED = re.compile(r"""<(?:script|link|img|iframe|source)\b[^>]*?(?:src|href)=["'](?:https?:)?//[^"']+""")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        patch.chdir(ROOT)
        build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True))
    return folder


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 20
    assert {page.name: found for page in pages if (found := FETCHED.findall(page.read_text()))} == {}
    for style in site.rglob("*.css"):
        assert not re.findall(r"url\((?:https?:)?//", style.read_text()), style


def test_search_works_in_pages_opened_as_files(site: Path) -> None:
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("there is no Chromium on this machine")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto((site / "faq.html").as_uri())
        page.locator("input.md-search__input").click()
        page.keyboard.type("evaluate")
        page.get_by_text("matching documents").wait_for()
        assert "virnuc evaluate" in page.locator(".md-search-result").inner_text()
        browser.close()
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []


def test_files_of_the_repository_are_copied(site: Path) -> None:
    copied = site / "files" / "benchmarks" / "results" / "val_auroc.json"
    assert copied.read_bytes() == (ROOT / "benchmarks" / "results" / "val_auroc.json").read_bytes()
    assert 'href="files/benchmarks/results/val_auroc.json"' in (site / "science.html").read_text()
    assert 'href="hard-inputs.html"' in (site / "security.html").read_text()


def test_references_are_made_from_the_code(site: Path) -> None:
    commands = (site / "commands.html").read_text()
    assert "--chunk-length" in commands
    api = (site / "api-reference.html").read_text()
    assert "open_embeddings" in api
    assert "an interrupted run there is resumed" in api


def test_every_command_is_listed_once() -> None:
    page = commands_page(cli)
    headings = re.findall(r"^## (.*)$", page, re.MULTILINE)
    assert sorted(name for name, command in cli.commands.items() if not isinstance(command, click.Group)) == [
        name for name in sorted(headings) if " " not in name
    ]
    assert "| `--devices` | auto&#124;cpu&#124;0,1,... | Where to compute [auto]. |" in page
