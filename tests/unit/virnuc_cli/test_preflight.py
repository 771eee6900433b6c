from dataclasses import replace
from pathlib import Path

import pytest

from virnuc_cli.preflight import readable, require_writable
from virnuc_core.errors import InputError
from virnuc_core.sequences.reader import input_digest, iter_records


@pytest.fixture
def sequences(tmp_path: Path) -> str:
    path = tmp_path / "a.fa"
    path.write_text(">a\nACGT\n")
    return str(path)


def test_standard_input_can_be_read_again_for_the_time_of_the_run(
    sequences: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Path(sequences).open() as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        with readable([sequences, sequences, "-"]):
            assert input_digest("-") == replace(input_digest(sequences), name="-")
            for _ in range(2):
                assert [(record.path, record.sequence) for record in iter_records(["-"], "dna")] == [
                    ("-", b"ACGT")
                ]
        with pytest.raises(InputError, match=r"^- can be read only once"):
            input_digest("-")


def test_output_may_be_a_device(tmp_path: Path) -> None:
    require_writable(tmp_path / "out.tsv")
    require_writable(Path("/dev/null"))
    assert not list(tmp_path.iterdir())
