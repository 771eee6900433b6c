"""The bundled models, without any flags."""

import csv
import gzip
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from Bio import SeqIO

from tests.end_to_end.conftest import CommandLine

pytestmark = pytest.mark.usefixtures("fast_lanes")


@pytest.mark.parametrize("chunk_length", [pytest.param("300", marks=pytest.mark.slow), "500"])
def test_defaults_run_and_say_what_they_are(
    virnuc_flows: CommandLine, contigs: Path, tmp_path: Path, chunk_length: str
) -> None:
    out = tmp_path / "run"
    result = virnuc_flows("predict", contigs, "--out", out, "--chunk-length", chunk_length)
    assert result.code == 0, result.err
    assert "bundled" in result.out
    document = json.loads((out / "run.json").read_text())
    assert [model["name"] for model in document["models"]] == ["tiny", "tiny"]
    assert document["head"]["name"] == f"tiny-{chunk_length}"
    assert document["notes"]


def test_the_viral_contigs_of_the_examples_are_found(
    virnuc_flows: CommandLine, examples_dir: Path, tmp_path: Path
) -> None:
    out = tmp_path / "demo"
    result = virnuc_flows("predict", examples_dir / "contigs.fa.gz", "--out", out)
    assert result.code == 0, result.err
    with (examples_dir / "labels.tsv").open(newline="") as handle:
        labels = {row["contig"]: row["label"] for row in csv.DictReader(handle, delimiter="\t")}
    with (out / "contigs.tsv").open(newline="") as handle:
        calls = {row["contig"]: row["call"] for row in csv.DictReader(handle, delimiter="\t")}
    assert calls.keys() == labels.keys()
    assert {c for c in calls if calls[c] == "virus"} == {c for c in labels if labels[c] == "virus"}
    viral = [contig for contig in calls if calls[contig] == "virus"]
    with gzip.open(out / "viral_contigs.fa.gz", "rt") as file:
        assert [record.id for record in SeqIO.parse(file, "fasta")] == viral
    with (out / "regions.tsv").open(newline="") as handle:
        regions = list(csv.DictReader(handle, delimiter="\t"))
    assert {region["contig"] for region in regions} == set(viral)
    assert {region["tier"] for region in regions} == {"confident", "likely"}
    assert pq.read_table(out / "contigs.parquet")["contig"].to_pylist() == list(calls)
    assert virnuc_flows("fsck", out).code == 0
    (out / "regions.bed").write_text("")
    changed = virnuc_flows("fsck", out)
    assert changed.code == 4
    assert "regions.bed is not as it was" in changed.out
