"""The bundled models, as somebody runs them who gives no flag at all."""

import csv
import json
from pathlib import Path

import pytest

from tests.end_to_end.conftest import CommandLine

pytestmark = pytest.mark.xdist_group("flows")


@pytest.mark.parametrize("chunk_length", ["300", "500"])
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
