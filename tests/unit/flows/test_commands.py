from pathlib import Path

import pytest

from flows.commands import folder_of, readable
from virnuc_core.errors import UsageError


def test_files_are_left_as_they_are() -> None:
    with readable(["a.fa", "b.fa"]) as files:
        assert files == ["a.fa", "b.fa"]


def test_standard_input_becomes_a_file_for_the_time_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "piped").write_bytes(b">a\nACGT\n")
    with (tmp_path / "piped").open() as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        with readable(["a.fa", "-"]) as files:
            assert files[0] == "a.fa"
            assert Path(files[1]).read_bytes() == b">a\nACGT\n"
    assert not Path(files[1]).exists()


def test_output_needs_a_folder(tmp_path: Path) -> None:
    assert folder_of(tmp_path / "out.tsv") == tmp_path
    for out in (tmp_path / "no" / "out.tsv", tmp_path):
        with pytest.raises(UsageError, match="--out"):
            folder_of(out)
