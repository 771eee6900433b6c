"""The content of the wheel and the sdist."""

import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
# Package data.
DATA = (
    "virnuc_core/models/bundled/esm2_tiny/model.safetensors",
    "virnuc_core/models/bundled/dnabert_tiny/tokenizer.json",
    "virnuc_core/models/bundled/training.json",
    "virnuc_core/doctor/dnabert_s.fa",
    "virnuc_core/doctor/esm2.fa",
    "deployments/prefect.yaml",
    "deployments/examples/systemd/virnuc-worker.service",
    "deployments/examples/slurm/worker.sbatch",
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel and its sdist, built from the files that git tracks."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file() and not name.startswith(("tests/", "docs/", "benchmarks/")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).symlink_to(ROOT / name)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stdout[-2000:] + done.stderr[-2000:]
    return out


def test_wheel_holds_packages_data_and_licence(built: Path) -> None:
    [wheel] = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        [metadata] = [name for name in names if name.endswith("/METADATA")]
        fields = Parser().parsestr(archive.read(metadata).decode())
        [entries] = [archive.read(name).decode() for name in names if name.endswith("/entry_points.txt")]
    assert set(DATA) <= set(names)
    modules = {path.relative_to(ROOT).as_posix() for room in ("virnuc_core", "tasks", "flows", "deployments", "virnuc_cli")
               for path in (ROOT / room).rglob("*.py")}  # fmt: skip
    assert modules <= set(names)
    assert [name for name in names if name.endswith("licenses/LICENSE")]
    assert {name.partition("/")[0] for name in names if not name.startswith("virnuc-")} == {
        "virnuc_core", "tasks", "flows", "deployments", "virnuc_cli",
    }  # fmt: skip
    assert fields["License-Expression"] == "MIT"
    assert "virnuc = virnuc_cli.main:main" in entries


def test_sdist_holds_what_the_wheel_is_built_from(built: Path) -> None:
    [sdist] = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", *DATA} <= names
