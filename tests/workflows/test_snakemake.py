"""The example workflow with its wrapper, run by Snakemake itself."""

import shutil
from pathlib import Path

import pytest
import yaml

from tests.workflows.conftest import ROOT, Run, Tool, names_in, write_contigs


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_failed_job_resumes_and_a_finished_workflow_has_nothing_to_do(
    tool: Tool, run: Run, tmp_path: Path
) -> None:
    workflow = shutil.copytree(ROOT / "workflows" / "snakemake", tmp_path / "workflow")
    settings = yaml.safe_load((workflow / "config.yaml").read_text())
    settings["samples"] = {
        "gut": str(write_contigs(tmp_path / "gut.fa.gz", "contig_03", "contig_10")),
        "bees": str(write_contigs(tmp_path / "bees.fa.gz", "contig_08", "contig_09")),
    }
    settings |= {"threads": 1, "extra": "--relaxed"}
    (workflow / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    snakemake = (tool("snakemake") / "snakemake", "--cores", "2")

    in_the_way = workflow / "results/virnuc/gut/report.html"
    (in_the_way / "folder").mkdir(parents=True)
    failed = run(*snakemake, "--keep-going", cwd=workflow)
    assert failed.returncode == 1, failed.stderr
    assert "report.html" in (workflow / "logs/virnuc_predict/gut.log").read_text()
    assert names_in(workflow / "results/virnuc/bees/virus.fa.gz") == ["contig_08"]

    shutil.rmtree(in_the_way)
    resumed = run(*snakemake, cwd=workflow)
    assert resumed.returncode == 0, resumed.stderr
    assert names_in(workflow / "results/viruses.fa.gz") == ["gut|contig_03", "bees|contig_08"]

    again = run(*snakemake, cwd=workflow)
    assert again.returncode == 0, again.stderr
    assert "Nothing to be done" in again.stdout + again.stderr
