"""Builds examples/contigs.fa.gz and examples/labels.tsv from sequences that four public packages ship.

Fetch the packages into a folder, then run this script on it:

    mkdir sources && cd sources
    pip download --no-deps --no-binary :all: biopython==1.88 pyrodigal==3.7.1
    apt-get download bowtie-examples=1.3.1-1 gasic-examples=0.0.r19-8   # Debian 12
    cd .. && python scripts/make_examples.py --sources sources --out examples

Every package is checked against its sha256, so the sequences are the same whenever they are made.
"""

import argparse
import gzip
import hashlib
import io
import itertools
import random
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from Bio import SeqIO

PACKAGES: Final = {
    "biopython-1.88.tar.gz": "9aaa31c0bda4d059f7b2ee00bfdb5cbb73ade3057aa4b737a7cc0187091d071a",
    "pyrodigal-3.7.1.tar.gz": "0262fc5b5fd0b16c18eb3eb9b6079e1590e6d838c3f8431c46d9027c8e67f600",
    "gasic-examples_0.0.r19-8_all.deb": "0aa190c025c9c69e4897c7cfa52f97c2d2daf917efe8439fae5fa4c21f1eb397",
    "bowtie-examples_1.3.1-1_all.deb": "3cec5c9f6460ea2236cf3d2688665328ab18d90eb2f8eaa0183dd1cd05c212ee",
}


@dataclass(frozen=True, slots=True)
class Source:
    """The first `end` bases of one sequence of a package, all for None, cut into `num_contigs` equal pieces."""

    package: str
    member: str
    accession: str
    organism: str
    label: str
    num_contigs: int
    end: int | None = None


_BIOPYTHON, _PYRODIGAL, _GASIC, _BOWTIE = PACKAGES
_TESTS, _DOC = "biopython-1.88/Tests", "./usr/share/doc"
_NCTC: Final = "pyrodigal-3.7.1/src/pyrodigal/tests/data/GCF_001457455.1_NCTC11397_genomic_100kb.fna.gz"
_HUMAN: Final = "hg38_chr13:75549820-75605809"
SOURCES: Final = tuple(
    Source(*values)
    for values in (
        (_BIOPYTHON, f"{_TESTS}/GFF/NC_001422.gbk", "NC_001422.1", "Escherichia phage phiX174", "virus", 1),
        (
            _BIOPYTHON,
            f"{_TESTS}/GFF/NC_001802.fna",
            "NC_001802.1",
            "Human immunodeficiency virus 1",
            "virus",
            2,
        ),
        (
            _GASIC,
            f"{_DOC}/gasic/examples/genomes/dwv.fasta.gz",
            "NC_004830.2",
            "Deformed wing virus",
            "virus",
            2,
        ),
        (
            _BOWTIE,
            f"{_DOC}/bowtie/examples/genomes/NC_008253.fna.gz",
            "NC_008253.1",
            "Escherichia coli 536",
            "other",
            4,
            24_000,
        ),
        (_PYRODIGAL, _NCTC, "NZ_LN831026.1", "Corynebacterium diphtheriae NCTC 11397", "other", 4, 24_000),
        (_BIOPYTHON, f"{_TESTS}/Blat/hg38.fa", _HUMAN, "Homo sapiens", "other", 5, 30_000),
    )
)


def read_member(package: Path, member: str) -> str:
    """One file of an sdist or a Debian package, decompressed if gzipped."""
    content = package.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if digest != PACKAGES[package.name]:
        raise SystemExit(f"{package}: sha256 is {digest}, expected {PACKAGES[package.name]}")
    if package.suffix == ".deb":
        unpack = ["dpkg-deb", "--fsys-tarfile", str(package)]
        content = subprocess.run(unpack, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        stored = archive.extractfile(member)
        if stored is None:
            raise SystemExit(f"{package}: {member} is not a file")
        text = stored.read()
    return (gzip.decompress(text) if member.endswith(".gz") else text).decode()


def cut_contigs(source: Source, folder: Path) -> Iterator[tuple[str, str]]:
    """Equal pieces of a source, every second one reverse-complemented: sequence, and row of labels.tsv without the name."""
    file_format = "genbank" if source.member.endswith(".gbk") else "fasta"
    text = read_member(folder / source.package, source.member)
    record = next(iter(SeqIO.parse(io.StringIO(text), file_format)))
    end = len(record) if source.end is None else source.end
    bounds = [end * i // source.num_contigs for i in range(source.num_contigs + 1)]
    for (begin, stop), strand in zip(itertools.pairwise(bounds), itertools.cycle("+-"), strict=False):
        sequence = record.seq[begin:stop].upper()
        if strand == "-":
            sequence = sequence.reverse_complement()
        columns = (source.label, source.organism, source.package, source.accession, begin + 1, stop, strand)
        yield str(sequence), "\t".join(map(str, columns))


def main() -> None:
    """Writes contigs.fa.gz, 70 bp a line, and labels.tsv with 1-based, inclusive positions."""
    parser = argparse.ArgumentParser(description="Build examples/ from sequences that public packages ship.")
    parser.add_argument("--sources", type=Path, required=True, help="folder that holds the packages")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    arguments = parser.parse_args()
    contigs = [contig for source in SOURCES for contig in cut_contigs(source, arguments.sources)]
    random.Random(0).shuffle(contigs)  # so that order and names do not reveal the labels
    fasta, labels = [], ["contig\tlabel\torganism\tsource\taccession\tstart\tend\tstrand"]
    for number, (sequence, label) in enumerate(contigs, start=1):
        name = f"contig_{number:02d}"
        fasta += [f">{name}", *(sequence[i : i + 70] for i in range(0, len(sequence), 70))]
        labels.append(f"{name}\t{label}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    content = gzip.compress(("\n".join(fasta) + "\n").encode(), mtime=0)
    (arguments.out / "contigs.fa.gz").write_bytes(content)
    (arguments.out / "labels.tsv").write_text("\n".join(labels) + "\n")


if __name__ == "__main__":
    main()
