"""MultiQC over the folders of several runs."""

import json
from pathlib import Path

import pytest

from tests.workflows.conftest import Run, Tool, write_contigs


@pytest.mark.slow
def test_multiqc_shows_a_row_for_each_run(tool: Tool, run: Run, tmp_path: Path) -> None:
    rows = {}
    for sample, contig in {"lake": "contig_03", "rocks": "contig_10"}.items():
        fasta = write_contigs(tmp_path / f"{sample}.fa.gz", contig)
        options = ("--out", tmp_path / "runs" / sample, "--devices", "cpu", "--relaxed")
        done = run("virnuc", "predict", fasta, *options)
        assert done.returncode == 0, done.stderr
        counts = json.loads((tmp_path / "runs" / sample / "run.json").read_text())["counts"]
        rows[sample] = {
            f"contigs_{call}": counts[f"contigs_{call}"]
            for call in ("virus", "provirus", "nonviral", "unscored")
        }
    assert [row["contigs_virus"] for row in rows.values()] == [1, 0]

    command = (
        tool("multiqc") / "multiqc",
        "--strict",
        "--no-version-check",
        "--no-ansi",
        "--outdir",
        "qc",
        "runs",
    )
    done = run(*command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "virnuc: Found 2 samples" in done.stdout + done.stderr
    data = json.loads((tmp_path / "qc" / "multiqc_data" / "multiqc_data.json").read_text())
    shown = data["report_saved_raw_data"]["multiqc_virnuc_runs"]
    assert {name: {key: row[key] for key in rows[name]} for name, row in shown.items()} == rows
