"""Programs that users run virnuc inside of, each installed from the Python Package Index into an environment of its own."""

import gzip
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Tool = Callable[[str], Path]
Run = Callable[..., subprocess.CompletedProcess[str]]

# What each environment holds. They are kept between test sessions.
REQUIREMENTS = {
    "multiqc": ("multiqc==1.35",),
    "snakemake": ("snakemake==9.27.1",),
    "nextflow": ("nextflow==26.10.3", "reftrace==0.6.0"),
    "conda": ("py-rattler-build==0.73.0",),
}
ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "contigs.fa.gz"


@pytest.fixture(scope="session")
def tool() -> Tool:
    """Gives the folder of the programs of an environment in `REQUIREMENTS`; skips the test if it cannot be installed."""
    return _installed


def _installed(name: str) -> Path:
    environment = ROOT / ".tools" / name
    stamp, wanted = environment / "installed", "\n".join(REQUIREMENTS[name])
    if not stamp.exists() or stamp.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", environment], check=True)
        command = [f"{environment}/bin/python", "-m", "pip", "install", "--quiet", *REQUIREMENTS[name]]
        done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"{wanted} cannot be installed: {done.stderr.strip().splitlines()[-1]}")
        stamp.write_text(wanted)
    return environment / "bin"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a program with this virnuc on the PATH, in a home folder of the test's own."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    home = str(tmp_path / "home")
    environment = {**os.environ, "PATH": path, "HOME": home, "NXF_ANSI_LOG": "false", "NXF_HOME": home}

    def run(*command: str | Path, cwd: Path = tmp_path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True, check=False
        )

    return run


def write_contigs(file: Path, *names: str) -> Path:
    """Writes the named contigs of `examples/contigs.fa.gz` to `file`, compressed."""
    records = gzip.decompress(EXAMPLES.read_bytes()).decode().split(">")[1:]
    chosen = [record for record in records if record.split()[0] in names]
    assert len(chosen) == len(names)
    file.write_bytes(gzip.compress("".join(f">{record}" for record in chosen).encode()))
    return file


def names_in(file: Path) -> list[str]:
    """Returns the names of the records in a compressed FASTA file, in its order."""
    lines = gzip.decompress(file.read_bytes()).decode().splitlines()
    return [line[1:].split()[0] for line in lines if line.startswith(">")]
