"""Small assemblies for the workflows to run on."""

import gzip
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples/contigs.fa.gz"


def write_contigs(file: Path, *names: str) -> Path:
    """Writes the named contigs of `examples/contigs.fa.gz` to `file`, compressed."""
    records = gzip.decompress(EXAMPLES.read_bytes()).decode().split(">")[1:]
    chosen = [record for record in records if record.split()[0] in names]
    assert len(chosen) == len(names)
    file.write_bytes(gzip.compress("".join(f">{record}" for record in chosen).encode()))
    return file


def names_in(file: Path) -> list[str]:
    """Returns the names of the records in a compressed FASTA file, in its order."""
    lines = gzip.decompress(file.read_bytes()).decode().splitlines()
    return [line[1:].split()[0] for line in lines if line.startswith(">")]
