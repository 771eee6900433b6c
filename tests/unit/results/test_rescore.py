"""`virnuc score RUN`: all tables of a run with another head, from its stored vectors."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.made_models import (
    WIDTH,
    MadeModels,
    MadeRun,
    copy_of,
    make_contig_head,
    make_head,
    plan_run,
    write_results,
)
from virnuc_core.errors import DamagedFileError, InputError, MismatchError, UsageError
from virnuc_core.inference.plan import write_plan
from virnuc_core.models.heads import save_head
from virnuc_core.results.inspect import inspect_path
from virnuc_core.results.rescore import score_run
from virnuc_core.run_folder import RunFolder


@pytest.fixture(scope="module", params=["open", "longest"])
def other_head(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The frames that it is for, and its file."""
    path = tmp_path_factory.mktemp("head") / "other.safetensors"
    if request.param == "open":
        make_head(path, 2 * WIDTH, seed=5)
    else:
        save_head(make_contig_head(WIDTH, WIDTH, seed=5), path, {})
    return request.param, path


@pytest.fixture(scope="module")
def run(
    other_head: tuple[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
    contigs: Path,
    made_models: MadeModels,
) -> MadeRun:
    head = made_models.head if other_head[0] == "open" else made_models.longest_head
    made = plan_run(tmp_path_factory.mktemp("run"), contigs, made_models.config(head=str(head)))
    made.compute()
    write_results(made)
    made.folder.report.write_text("{}")
    return made


def tables(folder: RunFolder) -> dict[str, bytes]:
    apart = (folder.embeddings, *folder.timed)
    return {path.name: path.read_bytes() for path in folder.results if path not in apart}


def test_another_head_gives_the_tables_of_its_own_run(
    run: MadeRun,
    other_head: tuple[str, Path],
    contigs: Path,
    made_models: MadeModels,
    tmp_path: Path,
) -> None:
    before = {path: path.read_bytes() for path in run.folder.root.rglob("*") if path.is_file()}
    report = score_run(run.folder.root, str(other_head[1]), tmp_path / "out")
    out = RunFolder(tmp_path / "out")
    own = plan_run(tmp_path / "own", contigs, made_models.config(head=str(other_head[1])))
    own.compute()
    write_results(own)
    assert tables(out) == tables(own.folder) != tables(run.folder)
    assert report.plan.head == own.plan.head
    assert report.counts is not None
    assert all(path.exists() for path in out.timed)
    assert inspect_path(out.root).is_intact
    assert {path: path.read_bytes() for path in run.folder.root.rglob("*") if path.is_file()} == before


def test_a_scoring_that_was_stopped_goes_on(
    run: MadeRun, other_head: tuple[str, Path], tmp_path: Path
) -> None:
    out = RunFolder(tmp_path / "out")
    score_run(run.folder.root, str(other_head[1]), out.root)
    whole = tables(out)
    for path in (out.shard(0), out.contigs, out.report):
        path.unlink()
    score_run(run.folder.root, str(other_head[1]), out.root)
    assert tables(out) == whole


def test_what_cannot_be_scored(
    run: MadeRun, other_head: tuple[str, Path], made_models: MadeModels, contigs: Path, tmp_path: Path
) -> None:
    out, own = tmp_path / "out", str(other_head[1])
    for_other_frames = made_models.longest_head if other_head[0] == "open" else made_models.head
    with pytest.raises(MismatchError, match="was trained on the"):
        score_run(run.folder.root, str(for_other_frames), out)
    if other_head[0] == "open":
        wide = make_head(tmp_path / "wide.safetensors", 100)
    else:
        wide = tmp_path / "wide.safetensors"
        save_head(make_contig_head(100, 92), wide, {})
    with pytest.raises(MismatchError, match=r"takes .*100"):
        score_run(run.folder.root, str(wide), out)
    with pytest.raises(InputError, match="no finished run"):
        score_run(tmp_path, own, out)
    assert not out.exists()
    unfinished = copy_of(run, tmp_path / "copy").folder
    unfinished.report.write_text("{}")
    unfinished.embeddings.write_bytes(b"")
    with pytest.raises(DamagedFileError, match="embeddings"):
        score_run(unfinished.root, own, out)
    shutil.copyfile(run.folder.embeddings, unfinished.embeddings)
    write_plan(unfinished.plan, replace(run.plan, embeddings="float16"))
    with pytest.raises(MismatchError, match="does not belong to"):
        score_run(unfinished.root, own, out)
    write_plan(unfinished.plan, replace(run.plan, kind="embed"))
    with pytest.raises(UsageError, match="no predict run"):
        score_run(unfinished.root, own, out)
    scored = tmp_path / "scored"
    score_run(run.folder.root, own, scored)
    with pytest.raises(UsageError, match="--embeddings none"):
        score_run(scored, own, out)
    with pytest.raises(MismatchError, match="contains another run"):
        score_run(run.folder.root, str(Path(run.plan.head.location)) if run.plan.head else "", scored)
