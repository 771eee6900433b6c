"""The example workflow and the wrapper, run by Snakemake itself."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.workflows.example_contigs import EXAMPLES, names_in, write_contigs
from virnuc_core import __version__

SNAKEMAKE = Path(__file__).parents[2] / "workflows/snakemake"
WRAPPER = Path("bio/virnuc/predict")

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def snakemake(tool: Callable[[str], Path], tmp_path: Path) -> Run:
    """Runs Snakemake, with this virnuc on the PATH, in the folder of the workflow; stdout and stderr are one text."""
    folders = (str(tool("snakemake")), str(Path(sys.executable).parent), os.environ["PATH"])
    environment = {**os.environ, "PATH": os.pathsep.join(folders), "XDG_CACHE_HOME": str(tmp_path / "cache")}

    def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["snakemake", "--cores", "2", *arguments],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )

    return run


@pytest.fixture
def workflow(tmp_path: Path) -> Path:
    """A copy of the example workflow, configured for two samples."""
    folder = shutil.copytree(SNAKEMAKE, tmp_path / "workflow")
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    settings["samples"] = {
        "gut": str(write_contigs(tmp_path / "gut.fa.gz", "contig_03", "contig_10")),
        "bees": str(write_contigs(tmp_path / "bees.fa.gz", "contig_08", "contig_09")),
    }
    settings["threads"] = 1
    (folder / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    return folder


@pytest.mark.slow
def test_a_failed_job_resumes_and_a_finished_workflow_has_nothing_to_do(
    snakemake: Run, workflow: Path
) -> None:
    run, log = workflow / "results/virnuc/gut", workflow / "logs/virnuc_predict/gut.log"
    in_the_way = run / "report.html"
    (in_the_way / "folder").mkdir(parents=True)
    failed = snakemake(workflow, "--keep-going")
    assert failed.returncode == 1, failed.stdout
    assert "report.html" in log.read_text()
    assert not (run / "viral_contigs.fa.gz").exists()
    assert names_in(workflow / "results/virnuc/bees/viral_contigs.fa.gz") == ["contig_08"]

    shutil.rmtree(in_the_way)
    resumed = snakemake(workflow)
    assert resumed.returncode == 0, resumed.stdout
    assert "1 of 1 shards kept from before" in log.read_text()
    assert names_in(workflow / "results/viral_contigs.fa.gz") == ["gut|contig_03", "bees|contig_08"]
    assert (run / "contigs.tsv").read_text().count("\n") == 3
    assert not list(workflow.glob("results/renamed/*"))

    again = snakemake(workflow)
    assert again.returncode == 0, again.stdout
    assert "Nothing to be done" in again.stdout


@pytest.mark.slow
def test_a_changed_option_is_refused_until_the_folder_of_the_run_is_removed(
    snakemake: Run, workflow: Path
) -> None:
    log, changed = workflow / "logs/virnuc_predict/bees.log", ("--config", "extra=--min-length 5300")
    first = snakemake(workflow)
    assert first.returncode == 0, first.stdout
    assert snakemake(workflow, *changed).returncode == 1
    assert "min_length (--min-length) was 0, now 5300" in log.read_text()
    shutil.rmtree(workflow / "results/virnuc")
    again = snakemake(workflow, *changed)
    assert again.returncode == 0, again.stdout
    assert names_in(workflow / "results/viral_contigs.fa.gz") == ["gut|contig_03"]


@pytest.mark.slow
def test_wrapper_in_the_layout_of_the_wrapper_repository(snakemake: Run, tmp_path: Path) -> None:
    (tmp_path / "master").symlink_to(SNAKEMAKE)
    folder = shutil.copytree(SNAKEMAKE / WRAPPER / "test", tmp_path / "test")
    done = snakemake(folder, "--wrapper-prefix", f"file:{tmp_path}/", "results/contigs/viral_contigs.fa.gz")
    assert done.returncode == 0, done.stdout
    viral = ["contig_03", "contig_08", "contig_15"]
    assert names_in(folder / "results/contigs/viral_contigs.fa.gz") == viral
    assert "16 contigs: 3 virus" in (folder / "logs/contigs.log").read_text()


@pytest.mark.slow
def test_outputs_in_several_folders_are_refused(snakemake: Run, tmp_path: Path) -> None:
    (tmp_path / "Snakefile").write_text(
        "rule:\n"
        f"    input: '{EXAMPLES}'\n"
        "    output: 'calls/viral_contigs.fa.gz', 'tables/contigs.tsv'\n"
        f"    wrapper: 'file:{SNAKEMAKE / WRAPPER}'\n"
    )
    done = snakemake(tmp_path)
    assert done.returncode == 1
    assert "must be in one folder, but are in ['calls', 'tables']" in done.stdout


@pytest.mark.slow
def test_lint_is_clean(snakemake: Run, workflow: Path) -> None:
    done = snakemake(workflow, "--lint")
    assert done.returncode == 0, done.stdout
    assert "in a good condition" in done.stdout


def test_environment_has_this_version() -> None:
    environment = yaml.safe_load((SNAKEMAKE / WRAPPER / "environment.yaml").read_text())
    assert environment["dependencies"] == [f"virnuc ={__version__}"]
