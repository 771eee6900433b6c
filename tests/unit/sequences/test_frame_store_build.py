import gzip
import random
import subprocess
import sys
from pathlib import Path

import pytest

from virnuc_core.errors import InputError, UsageError
from virnuc_core.sequences.frame_store import FrameStore, write_frames_tsv
from virnuc_core.sequences.frame_store_build import build_frame_store
from virnuc_core.sequences.reader import input_digest
from virnuc_core.specs import Alphabet

PEAK_MEMORY = """
import resource, sys
from virnuc_core.sequences.frame_store_build import build_frame_store
build_frame_store([sys.argv[1]], sys.argv[2], 500)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def build(
    tmp_path: Path, text: str, chunk_length: int | None = 500, alphabet: Alphabet = "dna"
) -> FrameStore:
    path = tmp_path / "input.fa"
    path.write_text(text)
    return build_frame_store([path], tmp_path / "frames", chunk_length, alphabet)


def rejected(path: Path) -> list[list[str]]:
    return [line.split("\t") for line in path.read_text().splitlines()]


def test_every_record_is_used_or_listed(tmp_path: Path) -> None:
    store = build(tmp_path, ">a\nACGT\n>b\n>c\nEEEEFFFF\n>\nGGG\n>\n")
    file = str(tmp_path / "input.fa")
    assert store.record_names(0, 2) == ["a", "record_4"]
    assert store.record_number.tolist() == [1, 4]
    assert store.record_length.tolist() == [4, 3]
    assert rejected(store.rejected_path) == [
        ["record", "id", "file", "length", "reason"],
        ["2", "b", file, "0", "empty sequence"],
        ["3", "c", file, "8", "not DNA: 8 of 8 letters are not IUPAC nucleotide codes"],
        ["5", "record_5", file, "0", "empty sequence"],
    ]
    assert (store.meta.num_records, store.meta.num_rejected) == (2, 3)


def test_repeated_names_are_told_apart_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = build(tmp_path, ">a\nACGT\n>a\nACGT\n>b\nGGG\n>a\nCCC\n")
    assert store.record_names(0, 4) == ["a", "a_dup2", "b", "a_dup3"]
    assert store.chunk_ids(1, 2) == ["a_dup2_chunk_1"]
    assert store.meta.num_renamed == 2
    assert "2 records have the name of an earlier one, which keeps it, and get a number" in caplog.text
    assert "the next record called a is now a_dup2" in caplog.text
    assert not list(store.folder.glob("*/"))


def test_several_files_are_one_input(tmp_path: Path) -> None:
    paths = [tmp_path / "a.fa", tmp_path / "b.fa.gz"]
    paths[0].write_text(">x\nACGT\n")
    paths[1].write_bytes(gzip.compress(b">x\nGGG\n"))
    store = build_frame_store(paths, tmp_path / "frames", 300)
    assert store.record_names(0, 2) == ["x", "x_dup2"]
    assert store.meta.inputs == tuple(input_digest(path) for path in paths)


@pytest.mark.parametrize("text", ["", ">a\n>b\n", ">p\nMEEPLQFILE\n"])
def test_nothing_usable_is_an_error_that_leaves_the_list_only(tmp_path: Path, text: str) -> None:
    path = tmp_path / "input.fa"
    path.write_text(text)
    listed = tmp_path / "rejected.tsv"
    with pytest.raises(InputError, match=r"no sequence record|can be used"):
        build_frame_store([path], tmp_path / "frames", 500, rejected_copy=listed)
    assert len(rejected(listed)) == 1 + text.count(">")
    assert sorted(tmp_path.iterdir()) == [path, listed]


def test_a_failed_build_keeps_the_store_that_was_there(tmp_path: Path) -> None:
    store = build(tmp_path, ">a\nACGTACGT\n")
    bad = tmp_path / "bad.fa.gz"
    bad.write_bytes(gzip.compress(b">b\nACGT\n")[:-9])
    with pytest.raises(InputError, match="truncated"):
        build_frame_store([bad], store.folder, 500)
    assert FrameStore.open(store.folder).record_names(0, 1) == ["a"]


def test_a_new_store_replaces_the_old_one_and_a_dead_attempt(tmp_path: Path) -> None:
    build(tmp_path, ">a\nACGTACGT\n")
    (tmp_path / ".frames.tmp").mkdir()
    (tmp_path / ".frames.tmp" / "protein.bin").write_bytes(b"stale")
    assert build(tmp_path, ">b\nACGTACGT\n").record_names(0, 1) == ["b"]
    assert not (tmp_path / ".frames.tmp").exists()


def test_a_folder_of_something_else_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "frames").mkdir()
    (tmp_path / "frames" / "thesis.tex").write_text("x")
    with pytest.raises(UsageError, match="in the way"):
        build(tmp_path, ">a\nACGT\n")
    assert (tmp_path / "frames" / "thesis.tex").exists()


@pytest.mark.parametrize("alphabet", ["dna", "protein"])
def test_whole_sequences(tmp_path: Path, alphabet: Alphabet) -> None:
    store = build(tmp_path, ">a\nACGU\n>b x\nggg\n", None, alphabet)
    column, other = (store.dna, store.protein) if alphabet == "dna" else (store.protein, store.dna)
    assert other is None
    assert column is not None
    assert column.to_strings() == ["ACGT" if alphabet == "dna" else "ACGU", "GGG"]
    assert store.frame_ids(0, 2) == ["a", "b"]
    assert (store.num_records, store.num_chunks, store.num_frames) == (2, 2, 2)
    assert store.chunk_end.tolist() == [4, 3]


@pytest.mark.parametrize(("chunk_length", "alphabet"), [(0, "dna"), (-5, "dna"), (500, "protein")])
def test_a_chunk_length_that_makes_no_sense_is_refused(
    tmp_path: Path, chunk_length: int, alphabet: Alphabet
) -> None:
    with pytest.raises(UsageError, match="chunk length"):
        build(tmp_path, ">a\nACGT\n", chunk_length, alphabet)


def test_records_over_several_batches_give_the_frames_of_each_alone(tmp_path: Path) -> None:
    letters = random.Random(1)
    records = ["".join(letters.choices("ACG", k=length)) for length in (2_500_000, 700_000, 700_001, 1200)]
    store = build(tmp_path, "".join(f">r{i}\n{record}\n" for i, record in enumerate(records)))
    write_frames_tsv(store, tmp_path / "all.tsv")
    parts = []
    for i, record in enumerate(records):
        # A short record in front moves every border of a batch.
        one = build(tmp_path, f">front\n{'GCC' * 50_000}\n>r{i}\n{record}\n")
        write_frames_tsv(one, tmp_path / "one.tsv")
        lines = (tmp_path / "one.tsv").read_text().splitlines()
        parts += [line for line in lines if line.startswith(f"r{i}_")]
    assert (tmp_path / "all.tsv").read_text().splitlines()[1:] == parts


def test_the_digest_is_of_the_content(tmp_path: Path) -> None:
    first = build(tmp_path, ">a\nACGTACGT\n").meta
    assert build(tmp_path, ">a  comment\nacgt\nACGT\n").meta.content_sha256 == first.content_sha256
    assert build(tmp_path, ">b\nACGTACGT\n").meta.content_sha256 != first.content_sha256
    assert build(tmp_path, ">a\nACGTACGA\n").meta.content_sha256 != first.content_sha256


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    letters = random.Random(2)
    record = "".join(letters.choices("ACGT", k=20_000))
    peaks = []
    for copies in (100, 2000):
        path = tmp_path / f"{copies}.fa"
        with open(path, "w") as file:
            file.writelines(f">r{i}\n{record}\n" for i in range(copies))
        command = [sys.executable, "-c", PEAK_MEMORY, str(path), str(tmp_path / f"frames{copies}")]
        peaks.append(int(subprocess.run(command, capture_output=True, check=True).stdout))
    assert peaks[1] < peaks[0] + 40 * 1024, peaks


def test_an_empty_file_among_others_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = [tmp_path / "empty.fa", tmp_path / "full.fa"]
    paths[0].write_text("")
    paths[1].write_text(">x\nACGT\n")
    assert build_frame_store(paths, tmp_path / "frames", 300).record_number.tolist() == [1]
    assert f"{paths[0]} holds no sequence record" in caplog.text
