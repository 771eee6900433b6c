"""Programs that users run virnuc inside of, each installed from the Python Package Index into an environment of its own."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Tool = Callable[[str], Path]

# What each environment holds. They are kept between test sessions.
REQUIREMENTS = {
    "multiqc": ("multiqc==1.35",),
    "snakemake": ("snakemake==9.27.1",),
    "nextflow": ("nextflow==26.10.3", "nf-core==4.2.1", "reftrace==0.6.0"),
    "galaxy": ("planemo==0.75.47", "galaxy-tool-util==26.1.2"),
    "gff": ("gffutils==0.14",),
    "conda": ("py-rattler-build==0.73.0",),
    "pre-commit": ("pre-commit==4.7.0",),
}
_ENVIRONMENTS = Path(__file__).parents[2] / ".tools"


@pytest.fixture(scope="session")
def tool() -> Tool:
    """Gives the folder of the programs of an environment in `REQUIREMENTS`; skips the test if it cannot be installed."""
    return _installed


def _installed(name: str) -> Path:
    environment = _ENVIRONMENTS / name
    stamp, wanted = environment / "installed", "\n".join(REQUIREMENTS[name])
    if not stamp.exists() or stamp.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", environment], check=True)
        command = [f"{environment}/bin/python", "-m", "pip", "install", "--quiet", *REQUIREMENTS[name]]
        done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"{wanted} cannot be installed: {done.stderr.strip().splitlines()[-1]}")
        stamp.write_text(wanted)
    return environment / "bin"
