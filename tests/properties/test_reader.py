"""Texts of joined pieces: every record is read with its own letters, or the file is refused."""

import gzip
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from virnuc_core.errors import InputError
from virnuc_core.sequences.reader import iter_records

NAMES = st.text("ab1_", min_size=1, max_size=3)
LINES = st.lists(st.text("ACGTNacgu1- ", max_size=7), max_size=3)
NEWLINES = st.sampled_from(["\n", "\r\n", "\r"])
# Between two pieces: nothing, if the first one has lost its final newline.
JOINS = st.sampled_from(["\n", "\n\n", "\n# note > x\n", "", "\ufeff", "\n\ufeff", " ", "\n# note"])


@st.composite
def fasta(draw: st.DrawFn) -> tuple[str, str]:
    """A record and its letters."""
    name, lines = draw(NAMES), draw(LINES)
    letters = "".join(lines).replace(" ", "").upper().replace("U", "T")
    return "\n".join([f">{name} x", *lines]), letters


@st.composite
def fastq(draw: st.DrawFn) -> tuple[str, str]:
    name, letters = draw(NAMES), draw(st.text("ACGTN", min_size=1, max_size=9))
    qualities = draw(st.text(">@+#I", min_size=len(letters), max_size=len(letters)))
    return f"@{name}\n{letters}\n+\n{qualities}", letters


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("joined") / "input"


@given(
    pieces=st.lists(st.tuples(st.one_of(fasta(), fasta(), fastq()), JOINS), min_size=1, max_size=5),
    newline=NEWLINES,
    compressed=st.booleans(),
)
@example(pieces=[((">a x\nACGT", "ACGT"), ""), ((">b x\nGG", "GG"), "\n")], newline="\n", compressed=True)
@example(
    pieces=[((">a x\nACGT", "ACGT"), "\n"), (("@b\nGG\n+\nII", "GG"), "\n")], newline="\n", compressed=False
)
def test_no_record_is_lost_in_another(
    path: Path, pieces: list[tuple[tuple[str, str], str]], newline: str, compressed: bool
) -> None:
    parts = [(text + join).replace("\n", newline).encode() for (text, _), join in pieces]
    path.write_bytes(b"".join(map(gzip.compress, parts) if compressed else parts))
    expected = [letters for (_, letters), _ in pieces]
    try:
        found = [record.sequence.decode() for record in iter_records([path], "dna")]
    except InputError:
        is_whole = all(join in ("\n", "\n\n", "\n# note > x\n") for _, join in pieces)
        is_fasta = all(text.startswith(">") for (text, _), _ in pieces)
        assert not (is_whole and is_fasta), "a whole file is refused"
        return
    lengths = [len(letters) for letters in found]
    # A header that has lost its newline keeps what follows in its line: only a record without any letter can be in it.
    assert "".join(found) == "".join(expected)
    assert [length for length in lengths if length] == [len(letters) for letters in expected if letters]
