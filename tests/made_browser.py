"""Headless Chromium for tests: the installed one, or playwright's."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

pytest.importorskip("playwright.sync_api")

from playwright.sync_api import Browser, sync_playwright

_PROGRAMS: Final = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@contextmanager
def chromium() -> Iterator[Browser]:
    """Skips where there is none."""
    installed = next(filter(None, map(shutil.which, _PROGRAMS)), None)
    with sync_playwright() as playwright:
        if installed is None and not Path(playwright.chromium.executable_path).exists():
            pytest.skip("there is no Chromium on the PATH, and playwright has none of its own")
        browser = playwright.chromium.launch(
            executable_path=installed, args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser
        browser.close()
