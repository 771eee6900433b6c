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
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from Bio import SeqIO

DOC: Final = "usr/share/doc"


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A range of one sequence in a package.

    Attributes:
        package: file name of an sdist or a Debian package.
        member: path inside the package.
        file_format: "fasta" or "genbank", as in Biopython.
        accession, organism, label: for labels.tsv; label is virus or other.
        begin, end: 0-based, half-open range in bp of the sequence; end None is its end.
        num_contigs: equal pieces the range is cut into.
    """

    package: str
    sha256: str
    member: str
    file_format: str = "fasta"
    accession: str
    organism: str
    label: str
    begin: int = 0
    end: int | None = None
    num_contigs: int


BIOPYTHON: Final = (
    "biopython-1.88.tar.gz",
    "9aaa31c0bda4d059f7b2ee00bfdb5cbb73ade3057aa4b737a7cc0187091d071a",
)
SOURCES: Final = (
    Source(
        package=BIOPYTHON[0],
        sha256=BIOPYTHON[1],
        member="biopython-1.88/Tests/GFF/NC_001422.gbk",
        file_format="genbank",
        accession="NC_001422.1",
        organism="Escherichia phage phiX174",
        label="virus",
        num_contigs=1,
    ),
    Source(
        package=BIOPYTHON[0],
        sha256=BIOPYTHON[1],
        member="biopython-1.88/Tests/GFF/NC_001802.fna",
        accession="NC_001802.1",
        organism="Human immunodeficiency virus 1",
        label="virus",
        num_contigs=2,
    ),
    Source(
        package="gasic-examples_0.0.r19-8_all.deb",
        sha256="0aa190c025c9c69e4897c7cfa52f97c2d2daf917efe8439fae5fa4c21f1eb397",
        member=f"{DOC}/gasic/examples/genomes/dwv.fasta.gz",
        accession="NC_004830.2",
        organism="Deformed wing virus",
        label="virus",
        num_contigs=2,
    ),
    Source(
        package="bowtie-examples_1.3.1-1_all.deb",
        sha256="3cec5c9f6460ea2236cf3d2688665328ab18d90eb2f8eaa0183dd1cd05c212ee",
        member=f"{DOC}/bowtie/examples/genomes/NC_008253.fna.gz",
        accession="NC_008253.1",
        organism="Escherichia coli 536",
        label="other",
        end=24_000,
        num_contigs=4,
    ),
    Source(
        package="pyrodigal-3.7.1.tar.gz",
        sha256="0262fc5b5fd0b16c18eb3eb9b6079e1590e6d838c3f8431c46d9027c8e67f600",
        member="pyrodigal-3.7.1/src/pyrodigal/tests/data/GCF_001457455.1_NCTC11397_genomic_100kb.fna.gz",
        accession="NZ_LN831026.1",
        organism="Corynebacterium diphtheriae NCTC 11397",
        label="other",
        end=24_000,
        num_contigs=4,
    ),
    Source(
        package=BIOPYTHON[0],
        sha256=BIOPYTHON[1],
        member="biopython-1.88/Tests/Blat/hg38.fa",
        accession="hg38_chr13:75549820-75605809",
        organism="Homo sapiens",
        label="other",
        end=30_000,
        num_contigs=5,
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Contig:
    """A piece of a source: begin and end as in Source, on the given strand."""

    source: Source
    begin: int
    end: int
    strand: str
    sequence: str


def read_member(package: Path, member: str) -> bytes:
    """One file of an sdist or a Debian package, decompressed if gzipped."""
    content = package.read_bytes()
    if package.suffix == ".deb":
        unpack = ["dpkg-deb", "--fsys-tarfile", str(package)]
        content = subprocess.run(unpack, capture_output=True, check=True).stdout
        member = f"./{member}"
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        stored = archive.extractfile(member)
        if stored is None:
            raise SystemExit(f"{package}: {member} is not a file")
        sequences = stored.read()
    return gzip.decompress(sequences) if member.endswith(".gz") else sequences


def cut_contigs(source: Source, folder: Path) -> list[Contig]:
    """Equal pieces of a source; every second one is reverse-complemented."""
    package = folder / source.package
    digest = hashlib.sha256(package.read_bytes()).hexdigest()
    if digest != source.sha256:
        raise SystemExit(f"{package}: sha256 is {digest}, expected {source.sha256}")
    text = io.StringIO(read_member(package, source.member).decode())
    record = next(iter(SeqIO.parse(text, source.file_format)))
    end = len(record) if source.end is None else source.end
    bounds = [
        source.begin + (end - source.begin) * i // source.num_contigs for i in range(source.num_contigs + 1)
    ]
    contigs = []
    for piece, (begin, stop) in enumerate(itertools.pairwise(bounds)):
        sequence = record.seq[begin:stop].upper()
        strand = "-" if piece % 2 else "+"
        if strand == "-":
            sequence = sequence.reverse_complement()
        contigs.append(
            Contig(source=source, begin=begin, end=stop, strand=strand, sequence=str(sequence)),
        )
    return contigs


def write_examples(contigs: list[Contig], out: Path) -> None:
    """Writes contigs.fa.gz, 70 bp a line, and labels.tsv with 1-based, inclusive positions."""
    fasta, labels = [], ["contig\tlabel\torganism\tsource\taccession\tstart\tend\tstrand"]
    for number, contig in enumerate(contigs, start=1):
        name = f"contig_{number:02d}"
        fasta.append(f">{name}")
        fasta.extend(contig.sequence[i : i + 70] for i in range(0, len(contig.sequence), 70))
        source = contig.source
        labels.append(
            f"{name}\t{source.label}\t{source.organism}\t{source.package}\t{source.accession}"
            f"\t{contig.begin + 1}\t{contig.end}\t{contig.strand}"
        )
    out.mkdir(parents=True, exist_ok=True)
    (out / "contigs.fa.gz").write_bytes(gzip.compress(("\n".join(fasta) + "\n").encode(), mtime=0))
    (out / "labels.tsv").write_text("\n".join(labels) + "\n")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Build examples/ from sequences that public packages ship.")
    parser.add_argument("--sources", type=Path, required=True, help="folder that holds the packages")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    arguments = parser.parse_args()
    contigs = [contig for source in SOURCES for contig in cut_contigs(source, arguments.sources)]
    random.Random(0).shuffle(contigs)  # so that order and names do not reveal the labels
    write_examples(contigs, arguments.out)


if __name__ == "__main__":
    main()
