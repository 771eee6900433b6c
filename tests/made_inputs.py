"""Difficult inputs and the expected results; docs/hard-inputs.md lists them."""

import gzip
import random
from collections.abc import Sequence
from dataclasses import dataclass

Record = tuple[str, str]
IUPAC = "RYSWKMBDHVN"
CODONS = [a + b + c for a in "ACGT" for b in "ACGT" for c in "ACGT" if a + b + c not in ("TAA", "TAG", "TGA")]


@dataclass(frozen=True, kw_only=True, slots=True)
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
    """Random codons without stops, so that every chunk has a stop-free frame."""
    return "".join(random.Random(seed).choices(CODONS, k=length // 3 + 1))[:length]


def protein(length: int, seed: int) -> str:
    return "".join(random.Random(seed).choices("ACDEFGHIKLMNPQRSTVWY", k=length))


def fasta(records: Sequence[Record], width: int = 70, newline: str = "\n") -> bytes:
    """FASTA with wrapped lines."""
    lines: list[str] = []
    for name, sequence in records:
        lines += [f">{name}", *(sequence[i : i + width] for i in range(0, len(sequence), width))]
    return "".join(line + newline for line in lines).encode()


def hard_inputs() -> list[HardInput]:
    return [*_letters(), *_layouts(), *_records(), *_refused()]


def _letters() -> list[HardInput]:
    upper = (("lower", dna(1700, 1)), ("soft_masked", dna(2300, 2)))
    (_, first), (_, second) = upper
    masked = "".join(second[i : i + 90].lower() + second[i + 90 : i + 200] for i in range(0, 2300, 200))
    lower = fasta([("lower", first.lower()), ("soft_masked", masked)])
    ambiguous = "".join(
        IUPAC[i // 37 % len(IUPAC)] if i % 37 == 0 else base for i, base in enumerate(dna(1500, 3))
    )
    iupac = (("every_37_bp", ambiguous), ("nothing_else", IUPAC * 60))
    bases = dna(1800, 4)
    scaffold = bases[:400] + "N" * 120 + bases[400:900] + "N" * 900 + bases[900:]
    runs = (("scaffold", scaffold), ("only_n", "N" * 700), ("n_90_percent", "N" * 900 + dna(100, 5)))
    rna = (("rna", dna(1100, 6)), ("dna", dna(1100, 6)))
    gaps = (("gapped", "".join(f"{bases[i : i + 99]}---" for i in range(0, 900, 99))),)
    return [
        HardInput(name="lower_case.fa", content=lower, records=upper),
        HardInput(name="lower_case.fa.gz", content=gzip.compress(lower, mtime=0), records=upper),
        HardInput(name="iupac.fa", content=fasta(iupac), records=iupac),
        HardInput(name="n_runs.fa", content=fasta(runs), records=runs),
        HardInput(
            name="rna.fa",
            content=fasta([("rna", rna[0][1].replace("T", "U")), rna[1]]),
            records=rna,
        ),
        HardInput(name="gaps.fa", content=fasta(gaps), records=gaps),
    ]


def _layouts() -> list[HardInput]:
    records = (("one", dna(900, 10)), ("two", dna(650, 11)))
    (_, first), (_, second) = records
    uneven = (
        f">one\n{first[:7]}\n\n{first[7:300]}  \n{first[300:310]} {first[310:]}\t\n\n>two\n{second}\n\n\n"
    )
    fastq = "".join(f"@{name}\n{sequence}\n+\n{'I' * len(sequence)}\n" for name, sequence in records)
    return [
        HardInput(name="windows_crlf.fa", content=fasta(records, newline="\r\n"), records=records),
        HardInput(name="old_mac_cr.fa", content=fasta(records, newline="\r"), records=records),
        HardInput(name="byte_order_mark.fa", content=b"\xef\xbb\xbf" + fasta(records), records=records),
        HardInput(name="uneven_lines.fa", content=uneven.encode(), records=records),
        HardInput(name="no_final_newline.fa", content=fasta(records).rstrip(), records=records),
        HardInput(name="fastq.fa", content=fastq.encode(), records=records),
    ]


def _records() -> list[HardInput]:
    first, last = dna(520, 20), dna(480, 21)
    empty = f">none_first\n>first\n{first}\n>none_middle\n>\n{last}\n>none_last\n".encode()
    same = [dna(600, seed) for seed in range(22, 26)]
    twice = fasta(list(zip(["contig", "contig", "CONTIG", "contig"], same, strict=True)))
    names = ["contig", "contig_dup2", "CONTIG", "contig_dup3"]
    lengths = (1, 2, 3, 4, 5, 299, 300, 301, 498, 499, 500, 501, 502, 600, 999, 1000, 1001, 1500, 1501)
    borders = tuple((f"length_{length}", dna(length, length)) for length in lengths)
    reads = tuple((f"gi|{i}|gb|READ{i}.1|", dna(25, 30 + i)) for i in range(3))
    among = (("contig", dna(700, 40)),)
    return [
        HardInput(
            name="empty_records.fa",
            content=empty,
            records=(("first", first), ("record_4", last)),
            num_rejected=3,
        ),
        HardInput(
            name="repeated_names.fa",
            content=twice,
            records=tuple(zip(names, same, strict=True)),
            num_renamed=2,
        ),
        HardInput(name="borders.fa", content=fasta(borders), records=borders),
        HardInput(name="reads_of_25_bp.fa", content=fasta(reads), records=reads),
        HardInput(
            name="protein_among_dna.fa",
            content=fasta([("protein", protein(300, 41)), *among]),
            records=among,
            num_rejected=1,
        ),
    ]


def _refused() -> list[HardInput]:
    proteins = fasta([(f"protein_{i}", protein(200 + i, 50 + i)) for i in range(3)])
    compressed = gzip.compress(fasta([("contig", dna(8000, 60))]), mtime=0)
    return [
        HardInput(
            name="proteins.fa",
            content=proteins,
            error="none of the 3 records can be used; the first one: not DNA",
        ),
        HardInput(name="empty.fa", content=b"", error="no sequence record found"),
        HardInput(name="text.txt", content=b"a text without any header\n", error="neither FASTA nor FASTQ"),
        HardInput(name="truncated.fa.gz", content=compressed[: len(compressed) // 2], error="truncated"),
    ]
