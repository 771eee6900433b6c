"""MultiQC over the folders of several runs."""

import json
import re
import subprocess
import sys
from pathlib import Path

import dnaio
import pytest

from tests.workflows.conftest import Tool
from virnuc_core.run_folder import RunFolder

pytestmark = pytest.mark.slow


@pytest.fixture
def samples(examples_dir: Path, tmp_path: Path) -> list[Path]:
    """Two FASTA files with the example contigs, five of them viral; the second also has one that gets no score."""
    with dnaio.open(examples_dir / "contigs.fa.gz") as records:
        contigs = list(records)
    silent = dnaio.SequenceRecord("silent", "N" * 600)
    parts = {"lake": contigs[::2], "rocks": [*contigs[1::2], silent]}
    for name, part in parts.items():
        with dnaio.open(tmp_path / f"{name}.fa", mode="w") as file:
            for record in part:
                file.write(record)
    return [tmp_path / f"{name}.fa" for name in parts]


def predict(contigs: Path, out: Path) -> None:
    command = [sys.executable, "-m", "virnuc_cli", "predict", contigs, "--out", out, "--quiet"]
    subprocess.run([*command, "--devices", "cpu"], check=True)


def row_of(folder: RunFolder) -> dict[str, float]:
    """The row that MultiQC must show, from run.json."""
    document = json.loads(folder.report.read_text())
    counts, speed = document["counts"], document["throughput"]["sequences_per_second"]
    packing = {family: round(100 * share, 2) for family, share in document["packing_efficiency"].items()}
    return {
        **{f"contigs_{call}": counts[f"contigs_{call}"] for call in ("virus", "other", "unscored")},
        "scored": round(100 * counts["scored_chunks"] / counts["chunks"], 2),
        **({"throughput": speed} if speed else {}),
        **packing,
    }


def test_multiqc_shows_a_row_for_each_run(tool: Tool, samples: list[Path], tmp_path: Path) -> None:
    program = tool("multiqc") / "multiqc"
    folders = [RunFolder(tmp_path / "runs" / sample.stem) for sample in samples]
    for sample, folder in zip(samples, folders, strict=True):
        predict(sample, folder.root)
    predict(samples[0], folders[0].root)  # computes nothing, so it has no throughput
    rows = {folder.root.name: row_of(folder) for folder in folders}
    assert ["throughput" in row for row in rows.values()] == [False, True]
    assert sum(row["contigs_virus"] for row in rows.values()) == 5
    assert rows["rocks"]["contigs_unscored"] == 1

    command = [program, "--strict", "--no-version-check", "--no-ansi", "--outdir", tmp_path / "qc"]
    done = subprocess.run([*command, tmp_path / "runs"], capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "virnuc: Found 2 samples" in said
    log = (tmp_path / "qc" / "multiqc_data" / "multiqc.log").read_text()
    assert set(re.findall(r"\[([A-Z]+) *\]", log)) == {"DEBUG", "INFO"}
    data = json.loads((tmp_path / "qc" / "multiqc_data" / "multiqc_data.json").read_text())
    assert data["report_saved_raw_data"]["multiqc_virnuc_runs"] == rows
    for folder in folders:
        subprocess.run([sys.executable, "-m", "virnuc_cli", "inspect", folder.root], check=True)
