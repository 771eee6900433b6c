"""Difficult inputs behave as in docs/hard-inputs.md, in 500-bp chunks."""

import gzip
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.slow_frames import slow_chunks, slow_frames
from virnuc_cli.main import main
from virnuc_core.sequences.frame_store import write_frames_tsv
from virnuc_core.sequences.frame_store_build import build_frame_store

Record = tuple[str, str]
IUPAC = "RYSWKMBDHVN"
CODONS = [a + b + c for a in "ACGT" for b in "ACGT" for c in "ACGT" if a + b + c not in ("TAA", "TAG", "TGA")]


@dataclass(frozen=True, slots=True)
class HardInput:
    """A file and its expected result.

    Attributes:
        records: names and sequences (upper case, T for U) of the records that are used.
        num_renamed: records whose name another record has.
        error: part of the message when the file is refused, with exit code 3.
    """

    name: str
    content: bytes
    records: tuple[Record, ...] = ()
    num_rejected: int = 0
    num_renamed: int = 0
    error: str | None = None


def dna(length: int, seed: int) -> str:
    """Random codons without stops, so that every chunk has a open reading frame."""
    return "".join(random.Random(seed).choices(CODONS, k=length // 3 + 1))[:length]


def protein(length: int, seed: int) -> str:
    return "".join(random.Random(seed).choices("ACDEFGHIKLMNPQRSTVWY", k=length))


def fasta(records: Sequence[Record], newline: str = "\n") -> bytes:
    """FASTA with lines of 70 letters."""
    lines: list[str] = []
    for name, sequence in records:
        lines += [f">{name}", *(sequence[i : i + 70] for i in range(0, len(sequence), 70))]
    return "".join(line + newline for line in lines).encode()


def _letters() -> Iterator[HardInput]:
    first, second = dna(1700, 1), dna(2300, 2)
    masked = "".join(second[i : i + 90].lower() + second[i + 90 : i + 200] for i in range(0, 2300, 200))
    lower = fasta([("lower", first.lower()), ("soft_masked", masked)])
    upper = (("lower", first), ("soft_masked", second))
    yield HardInput("lower_case.fa", lower, upper)
    yield HardInput("lower_case.fa.gz", gzip.compress(lower, mtime=0), upper)
    ambiguous = "".join(
        IUPAC[i // 37 % len(IUPAC)] if i % 37 == 0 else base for i, base in enumerate(dna(1500, 3))
    )
    iupac = (("every_37_bp", ambiguous), ("nothing_else", IUPAC * 60))
    yield HardInput("iupac.fa", fasta(iupac), iupac)
    bases = dna(1800, 4)
    scaffold = bases[:400] + "N" * 120 + bases[400:900] + "N" * 900 + bases[900:]
    runs = (("scaffold", scaffold), ("only_n", "N" * 700), ("n_90_percent", "N" * 900 + dna(100, 5)))
    yield HardInput("n_runs.fa", fasta(runs), runs)
    rna = dna(1100, 6)
    yield HardInput(
        "rna.fa", fasta([("rna", rna.replace("T", "U")), ("dna", rna)]), (("rna", rna), ("dna", rna))
    )
    gaps = (("gapped", "".join(f"{bases[i : i + 99]}---" for i in range(0, 900, 99))),)
    yield HardInput("gaps.fa", fasta(gaps), gaps)


def _layouts() -> Iterator[HardInput]:
    first, second = dna(900, 10), dna(650, 11)
    records = (("one", first), ("two", second))
    uneven = (
        f">one\n{first[:7]}\n\n{first[7:300]}  \n{first[300:310]} {first[310:]}\t\n\n>two\n{second}\n\n\n"
    )
    fastq = "".join(f"@{name}\n{sequence}\n+\n{'I' * len(sequence)}\n" for name, sequence in records)
    yield HardInput("windows_crlf.fa", fasta(records, "\r\n"), records)
    yield HardInput("old_mac_cr.fa", fasta(records, "\r"), records)
    yield HardInput("byte_order_mark.fa", b"\xef\xbb\xbf" + fasta(records), records)
    yield HardInput("uneven_lines.fa", uneven.encode(), records)
    yield HardInput("no_final_newline.fa", fasta(records).rstrip(), records)
    yield HardInput("fastq.fa", fastq.encode(), records)


def _records() -> Iterator[HardInput]:
    first, last = dna(520, 20), dna(480, 21)
    empty = f">none_first\n>first\n{first}\n>none_middle\n>\n{last}\n>none_last\n".encode()
    yield HardInput("empty_records.fa", empty, (("first", first), ("record_4", last)), num_rejected=3)
    same = [dna(600, seed) for seed in range(22, 26)]
    twice = fasta(list(zip(["contig", "contig", "CONTIG", "contig"], same, strict=True)))
    renamed = tuple(zip(["contig", "contig_dup2", "CONTIG", "contig_dup3"], same, strict=True))
    yield HardInput("repeated_names.fa", twice, renamed, num_renamed=2)
    lengths = (1, 2, 3, 4, 5, 299, 300, 301, 498, 499, 500, 501, 502, 600, 999, 1000, 1001, 1500, 1501)
    borders = tuple((f"length_{length}", dna(length, length)) for length in lengths)
    yield HardInput("borders.fa", fasta(borders), borders)
    reads = tuple((f"gi|{i}|gb|READ{i}.1|", dna(25, 30 + i)) for i in range(3))
    yield HardInput("reads_of_25_bp.fa", fasta(reads), reads)
    among = (("contig", dna(700, 40)),)
    mixed = fasta([("protein", protein(300, 41)), *among])
    yield HardInput("protein_among_dna.fa", mixed, among, num_rejected=1)


def _refused() -> Iterator[HardInput]:
    proteins = fasta([(f"protein_{i}", protein(200 + i, 50 + i)) for i in range(3)])
    compressed = gzip.compress(fasta([("contig", dna(8000, 60))]), mtime=0)
    none_usable = "none of the 3 records can be used; the first: not DNA"
    yield HardInput("proteins.fa", proteins, error=none_usable)
    yield HardInput("empty.fa", b"", error="no sequence record found")
    yield HardInput("text.txt", b"a text without any header\n", error="neither FASTA nor FASTQ")
    yield HardInput("truncated.fa.gz", compressed[: len(compressed) // 2], error="truncated")


INPUTS = {made.name: made for made in (*_letters(), *_layouts(), *_records(), *_refused())}


def frames_of(made: HardInput) -> list[str]:
    """Rows of the frames table, by the slow oracle."""
    return [
        f"{name}_chunk_{index}{frame}\t{dna}\t{protein}"
        for name, sequence in made.records
        for index, (start, end) in enumerate(slow_chunks(len(sequence), 500), 1)
        for frame, _, dna, protein in slow_frames(sequence[start:end])
    ]


@pytest.mark.parametrize("name", [name for name, made in INPUTS.items() if made.error is None])
def test_every_record_is_used_or_rejected(tmp_path: Path, name: str) -> None:
    made, path = INPUTS[name], tmp_path / name
    path.write_bytes(made.content)
    store = build_frame_store([path], tmp_path / "frames", 500)
    assert store.sequences is not None
    names = store.record_names(0, store.num_records)
    assert tuple(zip(names, store.sequences.to_strings(), strict=True)) == made.records
    assert (store.meta.num_rejected, store.meta.num_renamed) == (made.num_rejected, made.num_renamed)
    write_frames_tsv(store, tmp_path / "frames.tsv")
    assert (tmp_path / "frames.tsv").read_text().splitlines()[1:] == frames_of(made)


@pytest.mark.parametrize("name", [name for name, made in INPUTS.items() if made.error is not None])
def test_what_cannot_be_used_is_one_clear_error(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    made, path, out = INPUTS[name], tmp_path / name, tmp_path / "frames.tsv"
    path.write_bytes(made.content)
    assert main(["frames", str(path), "--chunk-length", "500", "--out", str(out)]) == 3
    *warnings, error = capsys.readouterr().err.splitlines()
    assert all(line[9:].startswith("virnuc: warning: ") for line in warnings)
    assert error.startswith("virnuc: error: ")
    assert str(made.error) in error
    assert name in error
    assert not out.exists()
