"""The bundled models, without any flags."""

import csv
import gzip
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from Bio import SeqIO

from tests.end_to_end.conftest import CommandLine
from virnuc_core.specs import CHUNKS_BY_RECORD

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
    assert document["frames"] == "longest"
    assert document["chunk_length"] == CHUNKS_BY_RECORD
    assert document["notes"]

    labels = column(examples_dir / "labels.tsv", "seq_name", "label")
    calls = column(out / "contigs.tsv", "contig", "call")
    viral = [contig for contig in calls if calls[contig] == "virus"]
    assert calls.keys() == labels.keys()
    assert set(viral) == {contig for contig in labels if labels[contig] == "virus"}
    p_virus, classes, novelty = (
        column(out / "contigs.tsv", "contig", name) for name in ("p_virus", "class", "novelty")
    )
    assert {contig for contig, p in p_virus.items() if float(p) >= 0.5} == set(viral)
    assert {contig for contig, name in classes.items() if name.endswith("virus")} == set(viral)
    assert all(0 <= float(distance) <= 2 for distance in novelty.values())
    with gzip.open(out / "viral_contigs.fa.gz", "rt") as file:
        assert [record.id for record in SeqIO.parse(file, "fasta")] == viral
    tiers = column(out / "regions.tsv", "contig", "tier")
    assert tiers.keys() == set(viral)
    assert set(tiers.values()) <= {"confident", "likely"}
    assert pq.read_table(out / "contigs.parquet")["contig"].to_pylist() == list(calls)

    virnuc.done("inspect", out)
    (out / "regions.bed").write_text("")
    changed = virnuc("inspect", out)
    assert changed.code == 4
    assert "regions.bed is not as it was" in changed.out
