"""The nf-core style module: parsed; its blocks run as Nextflow runs them; the pipeline in Nextflow where that can be had."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.workflows.conftest import ROOT, Run, Tool, names_in, write_contigs

NEXTFLOW = ROOT / "workflows" / "nextflow"
MODULE = NEXTFLOW / "modules/nf-core/virnuc/predict"
PROCESS = (MODULE / "main.nf").read_text()
PARSE = """
import json, sys
from reftrace import ConfigFile, Module
files = [(Module if name.endswith(".nf") else ConfigFile).from_file(name) for name in sys.argv[1:]]
print(json.dumps([type(file).__name__ for file in files]))
"""


def interpolated(template: str, variables: Mapping[str, object]) -> str:
    """Does what Groovy does with a string in double quotes: escapes, `$name.key` and `${name.key}`."""
    name = r"\w+(?:\.\w+)*"

    def replace(match: re.Match[str]) -> str:
        escaped, braced, plain = match.groups()
        return escaped or str(variables[braced or plain])

    return re.sub(rf"\\(.)|\$\{{({name})\}}|\$({name})", replace, template, flags=re.DOTALL)


def outputs(prefix: str) -> set[str]:
    """The files that the process promises."""
    return {interpolated(path, {"prefix": prefix}) for path in re.findall(r'path\("(.+?)"\)', PROCESS)}


@pytest.mark.slow
@pytest.mark.parametrize(("block", "viral"), [("script", ["contig_03"]), ("stub", [])])
def test_blocks_write_what_the_process_promises(
    block: str, viral: list[str], run: Run, tmp_path: Path
) -> None:
    write_contigs(tmp_path / "gut.fa.gz", "contig_03", "contig_10")
    inputs = {"task.cpus": 1, "fasta": "gut.fa.gz", "prefix": "gut", "devices": "cpu"}
    template = PROCESS.split(f"    {block}:\n")[1].split('"""')[1]
    script = interpolated(template, {**inputs, "args": "--min-length 1000 --relaxed"})
    done = run("bash", "-C", "-e", "-u", "-o", "pipefail", "-c", script)
    assert done.returncode == 0, done.stderr
    assert {path for path in outputs("gut") if not (tmp_path / path).is_file()} == set()
    assert names_in(tmp_path / "gut/virus.fa.gz") == viral


@pytest.mark.slow
def test_it_parses_and_runs_in_nextflow(tool: Tool, run: Run, tmp_path: Path) -> None:
    files = (MODULE / "main.nf", NEXTFLOW / "main.nf", NEXTFLOW / "nextflow.config")
    done = run(tool("nextflow") / "python", "-c", PARSE, *files)
    assert json.loads(done.stdout) == ["Module", "Module", "ConfigFileResult"]
    nextflow = tool("nextflow") / "nextflow"
    if run(nextflow, "-version").returncode:
        pytest.skip("the launcher of Nextflow cannot fetch Nextflow, or there is no Java for it")
    write_contigs(tmp_path / "gut.fa.gz", "contig_03")
    done = run(nextflow, "run", NEXTFLOW / "main.nf", "--input", f"{tmp_path}/*.fa.gz")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path for path in outputs("gut") if not (tmp_path / "results" / path).is_file()} == set()
