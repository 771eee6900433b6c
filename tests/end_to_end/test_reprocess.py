"""`virnuc reprocess`: a run with other models, heads and settings, interrupted and resumed."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import numpy.typing as npt
import pytest

from tests.end_to_end.conftest import Checkpoints, CommandLine
from tests.end_to_end.test_predict import RESULTS, is_empty_group, visible_names, wait_until
from tests.made_models import make_esm2, make_head
from virnuc_core.inference import sharding

pytestmark = pytest.mark.usefixtures("fast_lanes")


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seventeen frames in a few shards, with the same bounds for every model."""
    monkeypatch.setattr(sharding, "MAX_SHARD_ROWS", 4)


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory, checkpoints: Checkpoints) -> dict[str, tuple[str, ...]]:
    """Flags of other settings."""
    folder = tmp_path_factory.mktemp("others")
    large = make_esm2(folder / "esm2_large", num_layers=3, width=64)
    wide_head = make_head(folder / "wide_head.safetensors", 64 + 24, seed=4)
    return {
        "head": ("--head", str(checkpoints.other_head)),
        "larger ESM-2": ("--esm-model", str(large), "--head", str(wide_head)),
    }


def predict_flags(checkpoints: Checkpoints, changes: tuple[str, ...]) -> tuple[str, ...]:
    """`predict` flags of the equivalent new run."""
    flags = dict(zip(checkpoints.flags[::2], checkpoints.flags[1::2], strict=True))
    flags |= dict(zip(changes[::2], changes[1::2], strict=True))
    return tuple(part for pair in flags.items() for part in pair)


def content(folder: Path) -> dict[str, bytes]:
    """All files of a run except its reports and journals."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    names = {path: path.relative_to(folder).as_posix() for path in files}
    left_out = ("run.json", "report.html", "lanes/", ".virnuc.lock")
    return {name: path.read_bytes() for path, name in names.items() if not name.startswith(left_out)}


def vectors(run: Path) -> npt.NDArray[np.generic]:
    """Of the DNA model, which no test changes."""
    with h5py.File(run / "embeddings.h5") as file:
        return file["dna"][()]


@pytest.mark.parametrize("what", ["head", pytest.param("larger ESM-2", marks=pytest.mark.slow)])
def test_the_result_is_that_of_a_new_run(
    what: str,
    others: dict[str, tuple[str, ...]],
    virnuc_flows: CommandLine,
    checkpoints: Checkpoints,
    contigs: Path,
    tmp_path: Path,
) -> None:
    moved, fresh = tmp_path / "moved", tmp_path / "fresh"
    assert virnuc_flows("predict", contigs, "--out", moved, *checkpoints.flags).code == 0
    before, dna = content(moved), vectors(moved)
    nothing = virnuc_flows("reprocess", moved, "--devices", "cpu", "--json")
    assert json.loads(nothing.out)["shards"]["computed"] == 0
    assert content(moved) == before
    changes = others[what]

    refused = virnuc_flows("predict", contigs, "--out", moved, *predict_flags(checkpoints, changes))
    assert refused.code == 4
    assert f"`virnuc reprocess {moved}`" in refused.err

    result = virnuc_flows("reprocess", moved, *changes, "--devices", "cpu", "--json")
    assert result.code == 0, result.err
    flags = predict_flags(checkpoints, changes)
    assert virnuc_flows("predict", contigs, "--out", fresh, *flags).code == 0
    assert visible_names(moved) == RESULTS
    assert content(moved) == content(fresh)
    document = json.loads(result.out)
    assert document["plan_fingerprint"] == json.loads((moved / "plan.json").read_text())["fingerprint"]
    assert document["shards"]["computed"] == document["shards"]["total"] > 1
    np.testing.assert_array_equal(vectors(moved), dna)
    again = virnuc_flows("predict", contigs, "--out", moved, *flags, "--json")
    assert json.loads(again.out)["shards"]["computed"] == 0


@pytest.mark.slow
def test_killed_while_it_computes_it_goes_on(
    others: dict[str, tuple[str, ...]],
    virnuc_flows: CommandLine,
    checkpoints: Checkpoints,
    contigs: Path,
    tmp_path: Path,
) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    changes = (*others["larger ESM-2"], "--devices", "cpu")
    assert virnuc_flows("predict", contigs, "--out", run, *checkpoints.flags).code == 0
    shutil.copytree(run, whole)
    assert virnuc_flows("reprocess", whole, *changes).code == 0

    old = content(run)
    command = [sys.executable, "-m", "virnuc_cli", "reprocess", str(run), *changes]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True) as process:
        wait_until(lambda: any((run / "next").glob("shards/*.h5")), seconds=120)
        os.killpg(process.pid, signal.SIGKILL)
    wait_until(lambda: is_empty_group(process.pid), seconds=10)
    left = content(run)
    assert {name: left[name] for name in old} == old, "the old run is whole until the new one is"

    untouched = virnuc_flows("predict", contigs, "--out", run, "--json", *checkpoints.flags)
    assert json.loads(untouched.out)["shards"]["computed"] == 0
    other = virnuc_flows("reprocess", run, *others["head"], "--devices", "cpu")
    assert other.code == 4
    assert "throw away what was begun" in other.err
    assert virnuc_flows("reprocess", run, *changes).code == 0
    assert content(run) == content(whole)
    assert visible_names(run) == RESULTS


def test_what_cannot_be_moved(
    virnuc_flows: CommandLine, checkpoints: Checkpoints, contigs: Path, proteins: Path, tmp_path: Path
) -> None:
    assert virnuc_flows("reprocess", tmp_path).code == 3
    vectors = tmp_path / "vectors.h5"
    model = ("--model", f"esm2:{checkpoints.esm}", "--devices", "cpu")
    assert virnuc_flows("embed", proteins, "--out", vectors, *model).code == 0
    embedded = virnuc_flows("reprocess", f"{vectors}.run", "--repr-layer", "1", "--devices", "cpu")
    assert embedded.code == 2
    assert "embed run" in embedded.err

    run = tmp_path / "run"
    assert virnuc_flows("predict", contigs, "--out", run, *checkpoints.flags).code == 0
    before = content(run)
    without_head = virnuc_flows("reprocess", run, "--esm-model", checkpoints.esm, "--devices", "cpu")
    assert without_head.code == 2
    assert "--head" in without_head.err
    narrow = virnuc_flows("reprocess", run, "--repr-layer", "9", "--devices", "cpu")
    assert narrow.code == 2
    (run / "next" / "frames").unlink()
    (run / "next" / "mine.txt").touch()
    in_the_way = virnuc_flows("reprocess", run, "--repr-layer", "1", "--devices", "cpu")
    assert in_the_way.code == 2
    assert "in the way" in in_the_way.err
    (run / "next" / "mine.txt").unlink()
    assert content(run) == before
