"""A run that another release of virnuc has begun: continued within a release series, refused beyond it."""

import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

import virnuc_core
from tests.made_models import MadeModels, write_contigs
from virnuc_core import __version__
from virnuc_core.inference.shard import read_identity
from virnuc_core.run_folder import RunFolder
from virnuc_core.versions import series

RUN = "import sys; from virnuc_core import predict; predict(sys.argv[1], out=sys.argv[2], esm_model=sys.argv[3], dnabert_model=sys.argv[4], head=sys.argv[5], chunk_length=60, devices='cpu', shard_seconds=0.01)"


def release(folder: Path, version: str) -> Path:
    """A copy of the library that calls itself another version."""
    package = folder / version / "virnuc_core"
    package.mkdir(parents=True)
    for path in Path(virnuc_core.__file__).parent.iterdir():
        if path.name not in ("__init__.py", "__pycache__"):
            (package / path.name).symlink_to(path)
    text = Path(virnuc_core.__file__).read_text()
    (package / "__init__.py").write_text(text.replace(f'"{__version__}"', f'"{version}"'))
    return package.parent


def run(library: Path, *arguments: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", RUN, *map(str, arguments)]
    return subprocess.run(command, cwd=library, capture_output=True, text=True, check=False)


@pytest.fixture
def arguments(made_models: MadeModels, tmp_path: Path) -> tuple[Path, ...]:
    contigs = write_contigs(tmp_path / "in.fa", 16)
    return contigs, tmp_path / "run", made_models.esm2, made_models.dnabert, made_models.head


@pytest.mark.slow
def test_an_upgrade_in_the_middle_of_a_run(arguments: tuple[Path, ...], tmp_path: Path) -> None:
    contigs, out, *models = arguments
    here, newer = Path(virnuc_core.__file__).parents[1], f"{series(__version__)}.99"
    for folder in (out, tmp_path / "undisturbed"):
        done = run(here, contigs, folder, *models)
        assert done.returncode == 0, done.stderr
    folder, undisturbed = RunFolder(out), RunFolder(tmp_path / "undisturbed")
    shards = sorted(folder.shards.iterdir())
    assert len(shards) > 2
    for path in (*shards[1:], folder.predictions, folder.contigs, folder.embeddings, folder.report):
        path.unlink()

    refused = run(release(tmp_path, "99.0.1"), *arguments)
    assert refused.returncode != 0
    assert f"virnuc_version: was {series(__version__)}, now 99.0" in refused.stderr
    assert "start over with --force" in refused.stderr

    done = run(release(tmp_path, newer), *arguments)
    assert done.returncode == 0, done.stderr
    assert [read_identity(path)["virnuc_version"] for path in shards[:2]] == [__version__, newer]
    for name in ("predictions.tsv", "contigs.tsv"):
        assert (out / name).read_bytes() == (undisturbed.root / name).read_bytes()
    with h5py.File(folder.embeddings) as one, h5py.File(undisturbed.embeddings) as other:
        assert set(one) == set(other)
        for name in one:
            np.testing.assert_array_equal(one[name][()], other[name][()])
