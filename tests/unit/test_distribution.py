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
MAX_MODEL_BYTES = 60_000_000
PACKAGES = ("virnuc_core", "tasks", "flows", "deployments", "virnuc_cli")
DATA = {
    "virnuc_core/models/bundled/esm2_tiny/model.safetensors",
    "virnuc_core/models/bundled/dnabert_tiny/tokenizer.json",
    "virnuc_core/models/bundled/heads/tiny.safetensors",
    "virnuc_core/models/bundled/training.json",
    "virnuc_core/doctor/dnabert_s.fa",
    "virnuc_core/doctor/esm2.fa",
    "deployments/prefect.yaml",
    "deployments/kubernetes.json",
    "deployments/examples/systemd/virnuc-gpu@.service",
    "deployments/examples/slurm/worker.sbatch",
}


def test_wheel_and_sdist_hold_packages_data_and_licence(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "dist"
    list_files = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(list_files, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file() and not name.startswith(("tests/", "docs/", "benchmarks/")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).symlink_to(ROOT / name)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stdout[-2000:] + done.stderr[-2000:]

    [wheel], [sdist] = out.glob("*.whl"), out.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        models = [info for info in archive.infolist() if "/bundled/" in info.filename]
        [metadata] = [name for name in names if name.endswith("/METADATA")]
        fields = Parser().parsestr(archive.read(metadata).decode())
        [entries] = [archive.read(name).decode() for name in names if name.endswith("/entry_points.txt")]
    modules = {
        path.relative_to(ROOT).as_posix() for package in PACKAGES for path in (ROOT / package).rglob("*.py")
    }
    assert DATA | modules <= set(names)
    assert sum(info.file_size for info in models) <= MAX_MODEL_BYTES
    assert [name for name in names if name.endswith("licenses/LICENSE")]
    assert {name.partition("/")[0] for name in names if not name.startswith("virnuc-")} == set(PACKAGES)
    assert fields["License-Expression"] == "MIT"
    assert "virnuc = virnuc_cli.main:run_and_exit" in entries
    with tarfile.open(sdist) as archive:
        names_of_source = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", *DATA} <= names_of_source
