from pathlib import Path

import pytest

from flows.outputs import require_absolute, require_no_input, require_run
from virnuc_core.errors import InputError, UsageError


def test_output_is_not_an_input(tmp_path: Path) -> None:
    sequences, link = tmp_path / "a.fa", tmp_path / "link.fa"
    sequences.touch()
    link.symlink_to(sequences)
    require_no_input(tmp_path / "new.tsv", [str(sequences), "-", "tiny"])
    for out in (sequences, link, tmp_path / ".." / tmp_path.name / "a.fa"):
        with pytest.raises(UsageError, match="is the input"):
            require_no_input(out, ["-", str(sequences)])


def test_a_deployed_run_needs_absolute_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    require_absolute("a.fa", "/data/b.fa", "out")
    monkeypatch.setenv("PREFECT__RUNTIME__DEPLOYMENT__ID", "of-a-deployment")
    require_absolute("/data/b.fa", "/out")
    with pytest.raises(UsageError, match=r"^a\.fa, out: a deployed run has no folder of its own"):
        require_absolute("a.fa", "/data/b.fa", "out")


def test_a_run_has_a_plan(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no folder of a run"):
        require_run(tmp_path)
    (tmp_path / "plan.json").touch()
    require_run(tmp_path)
