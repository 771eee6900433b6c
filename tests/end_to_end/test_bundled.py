"""The bundled models, without any flags."""

import csv
import gzip
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from Bio import SeqIO

from tests.end_to_end.conftest import CommandLine

pytestmark = pytest.mark.usefixtures("prefect_server")


def column(path: Path, key: str, value: str) -> dict[str, str]:
    """Two columns of a table."""
    with path.open(newline="") as file:
        return {row[key]: row[value] for row in csv.DictReader(file, delimiter="\t")}


def test_the_viral_contigs_of_the_examples_are_found(
    virnuc: CommandLine, examples_dir: Path, tmp_path: Path
) -> None:
    out = tmp_path / "demo"
    result = virnuc.done("predict", examples_dir / "contigs.fa.gz", "--out", out)
    assert "bundled" in result.out
    document = json.loads((out / "run.json").read_text())
    assert [model["name"] for model in document["models"]] == ["tiny", "tiny"]
    assert document["head"]["name"] == "tiny"
    assert document["notes"]

    labels = column(examples_dir / "labels.tsv", "contig", "label")
    calls = column(out / "contigs.tsv", "contig", "call")
    viral = [contig for contig in calls if calls[contig] == "virus"]
    assert calls.keys() == labels.keys()
    assert set(viral) == {contig for contig in labels if labels[contig] == "virus"}
    with gzip.open(out / "viral_contigs.fa.gz", "rt") as file:
        assert [record.id for record in SeqIO.parse(file, "fasta")] == viral
    tiers = column(out / "regions.tsv", "contig", "tier")
    assert tiers.keys() == set(viral)
    assert set(tiers.values()) <= {"confident", "likely"}
    assert pq.read_table(out / "contigs.parquet")["contig"].to_pylist() == list(calls)

    virnuc.done("fsck", out)
    (out / "regions.bed").write_text("")
    changed = virnuc("fsck", out)
    assert changed.code == 4
    assert "regions.bed is not as it was" in changed.out
