"""`virnuc reprocess`: a run with other models, heads and settings, interrupted and resumed."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import h5py
import pytest

from tests.end_to_end.conftest import CommandLine, virnuc_process, wait_until
from tests.end_to_end.test_predict import RESULTS, visible_names
from tests.made_models import WIDTH, MadeModels, make_esm2, make_head

pytestmark = pytest.mark.usefixtures("prefect_server", "small_shards")

Flags = tuple[str, ...]


@pytest.fixture(scope="module")
def changes(
    tmp_path_factory: pytest.TempPathFactory, models: MadeModels, other_head: Path
) -> dict[str, Flags]:
    """Flags of other settings."""
    folder = tmp_path_factory.mktemp("others")
    large = make_esm2(folder / "esm2_large", num_layers=3, width=64)
    wide_head = make_head(folder / "wide_head.safetensors", 64 + WIDTH, seed=4)
    return {
        "head": ("--head", str(other_head), "--devices", "cpu"),
        "larger ESM-2": ("--esm-model", str(large), "--head", str(wide_head), "--devices", "cpu"),
    }


def content(folder: Path) -> dict[str, bytes]:
    """All files of a run except its reports and journals."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    names = {path: path.relative_to(folder).as_posix() for path in files}
    left_out = ("run.json", "report.html", "virnuc_mqc.json", "lanes/", ".virnuc.lock")
    return {name: path.read_bytes() for path, name in names.items() if not name.startswith(left_out)}


def dna_vectors(run: Path) -> Any:
    with h5py.File(run / "embeddings.h5") as file:
        return file["dna"][()].tolist()


@pytest.mark.parametrize("what", ["head", pytest.param("larger ESM-2", marks=pytest.mark.slow)])
def test_the_result_is_that_of_a_new_run(
    what: str,
    changes: dict[str, Flags],
    virnuc: CommandLine,
    models: MadeModels,
    contigs: Path,
    run: Path,
    tmp_path: Path,
) -> None:
    before, dna = content(run), dna_vectors(run)
    nothing = virnuc.done("reprocess", run, "--devices", "cpu", "--json")
    assert nothing.document["shards"]["computed"] == 0
    assert content(run) == before

    new_run = ("predict", contigs, *models.flags, *changes[what])  # the last of two equal flags wins
    virnuc.refused(4, f"`virnuc reprocess {run}`", *new_run, "--out", run)
    document = virnuc.done("reprocess", run, *changes[what], "--json").document
    fresh = tmp_path / "fresh"
    assert (
        virnuc.done(*new_run, "--out", fresh, "--json").document["plan_fingerprint"]
        == (document["plan_fingerprint"])
    )
    assert visible_names(run) == RESULTS
    assert content(run) == content(fresh)
    assert document["shards"] == {"total": 5, "computed": 5}
    assert dna_vectors(run) == dna
    assert virnuc.done(*new_run, "--out", run, "--json").document["shards"]["computed"] == 0


@pytest.mark.slow
def test_killed_while_it_computes_it_goes_on(
    changes: dict[str, Flags],
    virnuc: CommandLine,
    models: MadeModels,
    contigs: Path,
    run: Path,
    tmp_path: Path,
) -> None:
    whole = shutil.copytree(run, tmp_path / "whole", symlinks=True)
    old, larger = content(run), changes["larger ESM-2"]
    virnuc.done("reprocess", whole, *larger)

    with virnuc_process("reprocess", run, *larger) as process:
        wait_until(lambda: any((run / "next").glob("shards/*.h5")))
        os.killpg(process.pid, signal.SIGKILL)
    left = content(run)
    assert {name: left[name] for name in old} == old, "the old run is whole until the new one is"

    untouched = virnuc.done("predict", contigs, "--out", run, "--json", *models.flags)
    assert untouched.document["shards"]["computed"] == 0
    virnuc.refused(4, "throw away what was begun", "reprocess", run, *changes["head"])
    virnuc.done("reprocess", run, *larger)
    assert content(run) == content(whole)
    assert visible_names(run) == RESULTS


def test_what_cannot_be_reprocessed(
    virnuc: CommandLine, models: MadeModels, proteins: Path, run: Path, tmp_path: Path
) -> None:
    virnuc.refused(3, "no folder of a run", "reprocess", tmp_path)
    vectors, cpu = tmp_path / "vectors.h5", ("--devices", "cpu")
    virnuc.done("embed", proteins, "--out", vectors, "--model", f"esm2:{models.esm2}", *cpu)
    virnuc.refused(2, "embed run", "reprocess", f"{vectors}.run", "--repr-layer", "1", *cpu)

    before = content(run)
    virnuc.refused(2, "--head", "reprocess", run, "--esm-model", models.esm2, *cpu)
    virnuc.refused(2, "layer 9", "reprocess", run, "--repr-layer", "9", *cpu)
    (run / "next" / "frames").unlink()
    (run / "next" / "mine.txt").touch()
    virnuc.refused(2, "in the way", "reprocess", run, "--repr-layer", "1", *cpu)
    (run / "next" / "mine.txt").unlink()
    assert content(run) == before
