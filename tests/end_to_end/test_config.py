"""Settings of variables, of virnuc.toml and of flags reach the run."""

from pathlib import Path

import pytest

from tests.end_to_end.conftest import CommandLine
from tests.made_models import MadeModels


def test_every_source_reaches_the_run(
    virnuc: CommandLine, models: MadeModels, contigs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("virnuc.toml").write_text(
        "token-budget = 4096\nattention = 'sdpa'\nengine = 'reference'\nepochs = 3\n"
    )
    monkeypatch.setenv("VIRNUC_ATTENTION", "reference")
    monkeypatch.setenv("VIRNUC_ENGINE", "reference")
    given = ("--engine", "packed", "--chunk-length", 500, "-t", 2, *models.flags)
    document = virnuc.done("predict", contigs, "-o", "run", *given, "--json").document
    esm2 = document["models"][1]
    assert (esm2["engine"], esm2["attention"], esm2["token_budget"]) == ("packed", "reference", 4096)
