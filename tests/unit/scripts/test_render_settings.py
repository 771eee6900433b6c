"""The reference of settings is made from the commands."""

from pathlib import Path

import pytest

from scripts.render_settings import PAGE, RESULT_PAGE


def test_the_page_is_what_the_commands_say() -> None:
    assert RESULT_PAGE.main(["--check"]) == 0, "run python -m scripts.render_settings"


def test_a_page_that_is_not_is_found_and_mended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text().replace("VIRNUC_PREDICT_TOKEN_BUDGET`", "VIRNUC_PREDICT_TOKENS`"))
    assert RESULT_PAGE.main(["--check", "--page", str(page)]) == 1
    assert "scripts.render_settings" in capsys.readouterr().out
    assert RESULT_PAGE.main(["--page", str(page)]) == 0
    assert page.read_text() == PAGE.read_text()


def test_a_row_says_flag_variable_key_default_and_meaning() -> None:
    row = "| `--devices auto\\|cpu\\|0,1,...` | `VIRNUC_PREDICT_DEVICES` | `devices` | auto | Where to compute |"
    assert row in PAGE.read_text().splitlines()


def test_a_page_without_a_place() -> None:
    with pytest.raises(ValueError, match="no place for the table 'settings'"):
        RESULT_PAGE.render("nothing", None)
