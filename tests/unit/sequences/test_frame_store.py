"""The frame store: ids and columns of any input, refused or replaced as a whole."""

import gzip
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.made_hostile import hostile_json
from virnuc_core.errors import DamagedFileError, InputError, UsageError
from virnuc_core.sequences.frame_store import SCHEMA_VERSION, FrameStore, write_frames_tsv
from virnuc_core.sequences.frame_store_build import build_frame_store
from virnuc_core.sequences.reader import input_digest
from virnuc_core.specs import CHUNKS_BY_RECORD, Alphabet, ChunkRule, FrameRule

SEQUENCES = {"long": "GCC" * 300, "none": "TTAATTAACTAGCTAG" * 5, "short": "GCCGCCA"}
PEAK_MEMORY = """
import sys
from virnuc_core.sequences.frame_store_build import build_frame_store
build_frame_store([sys.argv[1]], sys.argv[2], 500)
# Not ru_maxrss, which begins with the peak of the process that started this one.
with open("/proc/self/status") as status:
    print(next(line.split()[1] for line in status if line.startswith("VmHWM:")))
"""
META_OF_OTHER_FORM = [b"", b"{}", b'{"inputs": [{}]}', b'{"inputs": 3}', *hostile_json("inputs").values()]


def build(
    tmp_path: Path,
    text: str,
    chunk_length: ChunkRule | None = 500,
    alphabet: Alphabet = "dna",
    frames: FrameRule = "open",
) -> FrameStore:
    path = tmp_path / "input.fa"
    path.write_text(text, encoding="utf-8")
    return build_frame_store([path], tmp_path / "frames", chunk_length, alphabet, frames=frames)


def fasta(records: dict[str, str]) -> str:
    return "".join(f">{name}\n{sequence}\n" for name, sequence in records.items())


def table(path: Path) -> list[list[str]]:
    return [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def store(tmp_path: Path) -> FrameStore:
    return build(tmp_path, fasta(SEQUENCES))


def test_ids_of_any_range(store: FrameStore) -> None:
    assert store.record_names(0, 3) == list(SEQUENCES)
    chunks = ["long_chunk_1", "long_chunk_2", "none_chunk_1", "short_chunk_1"]
    frames = store.frame_ids(0, store.num_frames)
    assert (frames[0], frames[-1]) == ("long_chunk_1F1", "short_chunk_1R3")
    for begin in range(store.num_frames + 1):
        for end in range(begin, store.num_frames + 1):
            assert store.frame_ids(begin, end) == frames[begin:end]
    for begin in range(5):
        assert store.chunk_id_column(begin, 4).to_pylist() == chunks[begin:]
    assert 2 not in store.frame_chunk
    assert store.chunk_record.tolist() == [0, 0, 1, 2]
    assert [store.sequence(row).decode() for row in range(3)] == list(SEQUENCES.values())
    with pytest.raises(ValueError, match="read-only"):
        store.frame_chunk[0] = 1


@pytest.mark.parametrize("alphabet", ["dna", "protein"])
def test_whole_sequences_are_stored_once(tmp_path: Path, alphabet: Alphabet) -> None:
    store = build(tmp_path, ">a\nACGU\n>b x\nggg\n", None, alphabet)
    column, other = (store.dna, store.protein) if alphabet == "dna" else (store.protein, store.dna)
    assert other is None
    assert store.sequences is None
    assert column is not None
    expected = ["ACGT" if alphabet == "dna" else "ACGU", "GGG"]
    assert column.to_strings() == [store.sequence(row).decode() for row in range(2)] == expected
    assert store.frame_ids(0, 2) == ["a", "b"]
    assert (store.num_records, store.num_chunks, store.num_frames) == (2, 2, 2)
    assert store.chunk_end.tolist() == [4, 3]


@pytest.mark.parametrize("content", [None, *META_OF_OTHER_FORM])
def test_a_store_with_another_meta_is_damaged(store: FrameStore, content: bytes | None) -> None:
    path = store.folder / "meta.json"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DamagedFileError, match=r"not a complete frame store: meta\.json is invalid"):
        FrameStore.open(store.folder)


def test_another_schema_version_is_refused(store: FrameStore) -> None:
    path = store.folder / "meta.json"
    path.write_text(path.read_text().replace(f'"schema_version": {SCHEMA_VERSION}', '"schema_version": 99'))
    with pytest.raises(DamagedFileError, match="version 99"):
        FrameStore.open(store.folder)


@pytest.mark.parametrize("name", ["dna.bin", "record_name.offsets.bin", "frame_number.bin"])
@pytest.mark.parametrize("is_missing", [False, True])
def test_a_cut_or_missing_column_is_damage(store: FrameStore, name: str, is_missing: bool) -> None:
    path = store.folder / name
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    if is_missing:
        path.unlink()
    found = 0 if is_missing else len(content) - 1
    with pytest.raises(DamagedFileError, match=f"{name} has {found} bytes instead of {len(content)}"):
        FrameStore.open(store.folder)


def test_every_record_is_used_or_listed(tmp_path: Path) -> None:
    store = build(tmp_path, ">a\nACGT\n>b\n>c\nEEEEFFFF\n>\nGGG\n>\n")
    file = str(tmp_path / "input.fa")
    assert store.record_names(0, 2) == ["a", "record_4"]
    assert (store.record_number.tolist(), store.record_length.tolist()) == ([1, 4], [4, 3])
    assert table(store.rejected_path) == [
        ["record", "id", "file", "length", "reason"],
        ["2", "b", file, "0", "empty sequence"],
        ["3", "c", file, "8", "not DNA: 8 of 8 letters are not IUPAC nucleotide codes"],
        ["5", "record_5", file, "0", "empty sequence"],
    ]
    assert (store.meta.num_records, store.meta.num_rejected) == (2, 3)


MANY = [f"c{i}" for i in range(70_000)]  # more than are looked through at once


@pytest.mark.parametrize(
    ("names", "expected", "num_renamed", "is_hostile"),
    [
        (["a", "b", "A", "a_dup2"], ["a", "b", "A", "a_dup2"], 0, False),
        (["a", "b", "a", "b", "a"], ["a", "b", "a_dup2", "b_dup2", "a_dup3"], 3, False),
        (["a", "a", "a_dup2", "a", "a_dup3"], ["a", "a_dup4", "a_dup2", "a_dup5", "a_dup3"], 2, False),
        ([*MANY, "c5", "Möwe", "Möwe"], [*MANY, "c5_dup2", "Möwe", "Möwe_dup2"], 2, False),
        ([f"{'a' * 2000}{i}" for i in range(2)], ["a" * 1000, "a" * 1000 + "_dup2"], 1, True),
        (["=1+1", "\x1b[2J", "../x", "\u202ex", "+1", "%2B1", "=1+1"],
         ["%3D1+1", "%1B[2J", "../x", "%E2%80%AEx", "%2B1", "%2B1_dup2", "%3D1+1_dup2"], 2, True),
    ],
    ids=["no repeat", "in order", "not a name of the input", "several blocks", "long", "hostile"],
)  # fmt: skip
def test_names_are_made_harmless_and_unique(
    tmp_path: Path,
    names: list[str],
    expected: list[str],
    num_renamed: int,
    is_hostile: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = build(tmp_path, "".join(f">{name} words\nA\n" for name in names))
    assert store.record_names(0, len(names)) == expected
    assert store.meta.num_renamed == num_renamed
    assert (f"{num_renamed} records have duplicate names" in caplog.text) == bool(num_renamed)
    assert ("names unsafe for" in caplog.text) == is_hostile
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["frames", "input.fa"]
    assert not list(store.folder.glob("*/"))


def test_hostile_file_names_and_rejected_records(tmp_path: Path) -> None:
    path = tmp_path / "=in\x1b.fa"
    path.write_text(">=1\n!!!!\n>ok\nACGTACGT\n", encoding="utf-8")
    build_frame_store([path], tmp_path / "frames", 60, rejected_copy=tmp_path / "rejected.tsv")
    _, row = table(tmp_path / "rejected.tsv")
    assert row[:3] == ["1", "%3D1", f"{tmp_path}/=in%1B.fa"]


def test_several_files_are_one_input(tmp_path: Path) -> None:
    paths = [tmp_path / "empty.fa", tmp_path / "a.fa", tmp_path / "b.fa.gz"]
    paths[0].write_text("")
    paths[1].write_text(">x\nACGT\n")
    paths[2].write_bytes(gzip.compress(b">none\n>x\nGGG\n"))
    store = build_frame_store(paths, tmp_path / "frames", 300)
    assert store.record_names(0, 2) == ["x", "x_dup2"]
    assert store.record_number.tolist() == [1, 3]
    assert table(store.rejected_path)[1][:3] == ["2", "none", str(paths[2])]
    assert store.meta.inputs == tuple(input_digest(path) for path in paths)


@pytest.mark.parametrize("text", ["", ">a\n>b\n", ">p\nMEEPLQFILE\n"])
def test_nothing_usable_is_an_error_that_leaves_the_list_only(tmp_path: Path, text: str) -> None:
    path, listed = tmp_path / "input.fa", tmp_path / "rejected.tsv"
    path.write_text(text)
    with pytest.raises(InputError, match=r"no sequence record|can be used"):
        build_frame_store([path], tmp_path / "frames", 500, rejected_copy=listed)
    assert sorted(tmp_path.iterdir()) == [path, *[listed] * bool(text)]
    assert not text or len(table(listed)) == 1 + text.count(">")


def test_a_store_is_replaced_by_a_complete_one_only(tmp_path: Path) -> None:
    store = build(tmp_path, ">a\nACGTACGT\n")
    bad = tmp_path / "bad.fa.gz"
    bad.write_bytes(gzip.compress(b">b\nACGT\n")[:-9])
    with pytest.raises(InputError, match="truncated"):
        build_frame_store([bad], store.folder, 500)
    assert FrameStore.open(store.folder).record_names(0, 1) == ["a"]
    (tmp_path / ".frames.tmp").mkdir()
    (tmp_path / ".frames.tmp" / "protein.bin").write_bytes(b"of a killed process")
    assert build(tmp_path, ">b\nACGTACGT\n").record_names(0, 1) == ["b"]
    assert not (tmp_path / ".frames.tmp").exists()


def test_a_folder_of_something_else_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "frames").mkdir()
    (tmp_path / "frames" / "thesis.tex").write_text("x")
    with pytest.raises(UsageError, match="exists and is not a frame store"):
        build(tmp_path, ">a\nACGT\n")
    assert (tmp_path / "frames" / "thesis.tex").exists()


def test_a_store_says_how_records_were_cut(tmp_path: Path) -> None:
    store = build(tmp_path, fasta({"a": "GCA" * 400, "b": "GCA" * 1200, "c": "GCA" * 2000}), CHUNKS_BY_RECORD)
    assert store.meta.chunk_length == CHUNKS_BY_RECORD
    assert store.chunk_record.tolist() == [0] * 3 + [1] * 4 + [2] * 6
    meta = store.folder / "meta.json"
    meta.write_text(meta.read_text().replace(CHUNKS_BY_RECORD, "auto:500<2000"))
    with pytest.raises(DamagedFileError, match="not a complete frame store"):
        FrameStore.open(store.folder)


def test_records_over_several_batches_give_the_frames_of_each_alone(tmp_path: Path) -> None:
    letters = random.Random(1)
    records = ["".join(letters.choices("ACG", k=length)) for length in (2_600_000, 700_000, 700_001, 480_000)]
    store = build(tmp_path, fasta({f"r{i}": record for i, record in enumerate(records)}))
    write_frames_tsv(store, tmp_path / "all.tsv")
    parts = []
    for i, record in enumerate(records):
        # A leading record shifts every batch boundary.
        store = build(tmp_path, fasta({"front": "GCC" * 120, f"r{i}": record}))
        write_frames_tsv(store, tmp_path / "one.tsv")
        parts += [row for row in table(tmp_path / "one.tsv") if row[0].startswith(f"r{i}_")]
    assert table(tmp_path / "all.tsv")[1:] == parts


def test_the_digest_is_of_the_content(tmp_path: Path) -> None:
    texts = [">a\nACGTACGT\n", ">a  comment\nacgt\nACGT\n", ">b\nACGTACGT\n", ">a\nACGTACGA\n"]
    first, same, *others = (build(tmp_path, text).meta.content_sha256 for text in texts)
    assert same == first
    assert first not in others


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    record = "".join(random.Random(2).choices("ACGT", k=20_000))
    peaks = []
    for copies in (100, 1000):
        path = tmp_path / f"{copies}.fa"
        path.write_text("".join(f">r{i}\n{record}\n" for i in range(copies)))
        command = [sys.executable, "-c", PEAK_MEMORY, str(path), str(tmp_path / f"frames{copies}")]
        peaks.append(int(subprocess.run(command, capture_output=True, check=True).stdout))
    assert peaks[1] < peaks[0] + 20 * 1024, peaks
