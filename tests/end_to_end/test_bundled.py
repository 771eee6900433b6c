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
    calls = column(out / "contigs.tsv", "seq_name", "call")
    viral = [contig for contig in calls if calls[contig] == "virus"]
    assert calls.keys() == labels.keys()
    assert set(viral) == {contig for contig in labels if labels[contig] == "virus"}
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    found, expected, *_ = document["summary"].splitlines()
    assert f"    {found}\n    {expected.partition('(')[0]}(" in readme
    for row in pq.read_table(out / "virus_summary.parquet").to_pylist():
        numbers = f"{row['virus_score']:.3f} | {row['fdr']:.2f}"
        said = f"| {row['seq_name']} | {row['length']} | linear | NA | {numbers} | {row['class']} | {row['confidence']} |"
        assert said in readme
    classes, novelty = (column(out / "contigs.tsv", "seq_name", name) for name in ("class", "novelty"))
    assert {contig for contig, name in classes.items() if name.endswith("virus")} == set(viral)
    assert all(0 <= float(distance) <= 2 for distance in novelty.values())
    with gzip.open(out / "virus.fa.gz", "rt") as file:
        assert [record.id for record in SeqIO.parse(file, "fasta")] == viral
    assert column(out / "virus_summary.tsv", "seq_name", "topology") == dict.fromkeys(viral, "linear")
    assert pq.read_table(out / "contigs.parquet")["seq_name"].to_pylist() == list(calls)

    virnuc.done("inspect", out)
    (out / "virus.bed").write_text("")
    changed = virnuc("inspect", out)
    assert changed.code == 4
    assert "virus.bed was modified" in changed.out


def test_a_phage_in_a_bacterial_contig_is_a_provirus(
    virnuc: CommandLine, examples_dir: Path, tmp_path: Path
) -> None:
    with gzip.open(examples_dir / "contigs.fa.gz", "rt") as file:
        bases = {record.id: str(record.seq) for record in SeqIO.parse(file, "fasta")}
    coli, phage, more_coli = (bases[name] for name in ("contig_09", "contig_03", "contig_13"))
    fasta, out = tmp_path / "joined.fa", tmp_path / "run"
    fasta.write_text(f">lysogen\n{coli}{phage}{more_coli}\n>host\n{coli}{more_coli}\n")
    document = virnuc.done("predict", fasta, "--out", out, "--json").document
    assert column(out / "contigs.tsv", "seq_name", "call") == {"lysogen": "provirus", "host": "nonviral"}
    [(name, coordinates)] = column(out / "virus_summary.tsv", "seq_name", "coordinates").items()
    start, end = map(int, coordinates.split("-"))
    assert name == f"lysogen|provirus_{start}_{end}"
    begin, stop = len(coli), len(coli) + len(phage)
    shared = min(end, stop) - max(start - 1, begin)
    assert shared / (max(end, stop) - min(start - 1, begin)) >= 0.7
    assert column(out / "virus_summary.tsv", "topology", "class") == {"provirus": "prokaryotic virus"}
    assert (document["counts"]["contigs_provirus"], document["counts"]["proviruses"]) == (1, 1)
