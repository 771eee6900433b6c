"""A run's folder: one run at a time, and what is deleted and what is kept."""

from pathlib import Path

import pytest

from virnuc_core.errors import UsageError
from virnuc_core.results.run_opening import open_run_folder


def make(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_makes_the_folder_and_keeps_others_out(tmp_path: Path) -> None:
    root = tmp_path / "a" / "b"
    with open_run_folder(root, force=False) as folder:
        assert folder.root == root
        with pytest.raises(UsageError, match="another run"), open_run_folder(root, force=True):
            pass
        folder.plan.touch()
    with open_run_folder(root, force=False):
        assert folder.plan.exists()


def test_force_deletes_what_virnuc_wrote_and_nothing_else(tmp_path: Path) -> None:
    with open_run_folder(tmp_path, force=False) as folder:
        lanes = [folder.lane_journal(name) for name in ("lane-0000-0123abcd", "plan-0123abcd")]
        shards = [folder.shards / name for name in ("shard_00001.h5.damaged", ".shard_00002.h5.tmp")]
        make(*folder.results, folder.plan, folder.shard(0), *shards, *lanes, folder.frames / "meta.json")
        make(folder.sequences / "genbank_1.fa", folder.training / "records.tsv")
        mine = [folder.lanes / "notes.txt", folder.shards / "mine.h5", tmp_path / "mine.txt"]
        make(*mine)
    with open_run_folder(tmp_path, force=True):
        left = {path for path in tmp_path.rglob("*") if path.is_file()}
        assert left == {tmp_path / ".virnuc.lock", *mine}
        assert names(tmp_path) == {".virnuc.lock", "lanes", "shards", "mine.txt"}


@pytest.mark.parametrize("meta", [None, '{"camera": 1}'])
@pytest.mark.parametrize("force", [False, True])
def test_frames_that_are_not_of_a_run_are_refused(tmp_path: Path, meta: str | None, force: bool) -> None:
    mine = tmp_path / "frames" / "mine.png"
    make(mine)
    if meta is not None:
        mine.with_name("meta.json").write_text(meta)
    with pytest.raises(UsageError, match="not a frame store"), open_run_folder(tmp_path, force=force):
        pass
    assert mine.exists()


def test_paths_that_can_be_no_folder(tmp_path: Path) -> None:
    make(tmp_path / "file")
    for root, message in (
        (tmp_path / "file", "not a folder"),
        (tmp_path / "file" / "run", "not a folder"),
        (Path("/proc/none"), "/proc/none cannot be written"),
        (tmp_path / "a\0b", "the name of no folder"),
    ):
        with pytest.raises(UsageError, match=message), open_run_folder(root, force=False):
            pass


def test_what_killed_runs_left_is_removed_and_what_only_has_the_name_of_a_result_stays(
    tmp_path: Path,
) -> None:
    left = [".embeddings.h5.tmp", ".plan.json.0123456789abcdef.tmp", ".next.tmp/0", ".incoming.tmp/0"]
    mine = [".mine.tmp", "mine.tmp", "contigs.tsv", "next/plan.json", "incoming/plan.json"]
    make(*(tmp_path / name for name in (*left, *mine)))
    for force in (False, True):
        with open_run_folder(tmp_path, force=force):
            assert names(tmp_path) == {".virnuc.lock", *(name.split("/")[0] for name in mine)}
            assert all((tmp_path / name).exists() for name in mine)
