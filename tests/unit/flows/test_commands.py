from pathlib import Path

import pytest

from flows.commands import readable
from virnuc_core.errors import InputError


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


def test_message_names_standard_input_and_not_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "piped").touch()
    with (tmp_path / "piped").open() as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        with pytest.raises(InputError, match=r"^standard input: empty$"), readable(["-"]) as files:
            raise InputError(f"{files[0]}: empty")
