from pathlib import Path

import pytest

from virnuc_core.errors import UsageError
from virnuc_core.results.run_opening import open_run_folder


def test_makes_the_folder_and_keeps_others_out(tmp_path: Path) -> None:
    root = tmp_path / "a" / "b"
    with open_run_folder(root, force=False) as folder:
        assert folder.root == root
        with pytest.raises(UsageError, match="another run"), open_run_folder(root, force=True):
            pass
    with open_run_folder(root, force=False):
        pass


def test_force_deletes_what_virnuc_wrote_and_nothing_else(tmp_path: Path) -> None:
    with open_run_folder(tmp_path, force=False) as folder:
        for path in (*folder.results, folder.plan, tmp_path / "mine.txt"):
            path.touch()
        folder.shards.mkdir()
        folder.shard(0).touch()
        folder.lanes.mkdir()
        for name in ("lane-0000-0123abcd", "plan-0123abcd"):
            folder.lane_journal(name).touch()
        folder.frames.mkdir()
        (folder.frames / "meta.json").touch()
    with open_run_folder(tmp_path, force=True):
        assert {path.name for path in tmp_path.iterdir()} == {"mine.txt", ".virnuc.lock"}


def test_force_leaves_a_persons_files_among_shards_and_journals(tmp_path: Path) -> None:
    with open_run_folder(tmp_path, force=False) as folder:
        folder.lanes.mkdir()
        (folder.lanes / "notes.txt").touch()
        folder.shards.mkdir()
        for name in ("shard_00000.h5", "shard_00001.h5.damaged", ".shard_00002.h5.tmp", "mine.h5"):
            (folder.shards / name).touch()
    with open_run_folder(tmp_path, force=True):
        assert [path.name for path in folder.shards.iterdir()] == ["mine.h5"]
        assert [path.name for path in folder.lanes.iterdir()] == ["notes.txt"]


def test_force_leaves_what_only_has_the_name_of_a_result(tmp_path: Path) -> None:
    (tmp_path / "contigs.tsv").touch()
    with open_run_folder(tmp_path, force=True) as folder:
        assert folder.contigs.exists()


@pytest.mark.parametrize("content", [{}, {"meta.json": '{"camera": 1}'}])
@pytest.mark.parametrize("force", [False, True])
def test_frames_that_are_not_of_a_run_are_refused(
    tmp_path: Path, content: dict[str, str], force: bool
) -> None:
    (tmp_path / "frames").mkdir()
    (tmp_path / "frames" / "mine.png").touch()
    for name, text in content.items():
        (tmp_path / "frames" / name).write_text(text)
    with pytest.raises(UsageError, match="not a frame store"), open_run_folder(tmp_path, force=force):
        pass
    assert (tmp_path / "frames" / "mine.png").exists()


def test_folder_that_cannot_be_made() -> None:
    with (
        pytest.raises(UsageError, match="/proc/none cannot be written"),
        open_run_folder(Path("/proc/none"), force=False),
    ):
        pass


def test_without_force_everything_stays(tmp_path: Path) -> None:
    with open_run_folder(tmp_path, force=False) as folder:
        folder.plan.touch()
    with open_run_folder(tmp_path, force=False) as folder:
        assert folder.plan.exists()


def test_file_is_not_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for root in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(UsageError, match="not a folder"), open_run_folder(root, force=False):
            pass


def test_what_killed_runs_left_is_removed(tmp_path: Path) -> None:
    names = [
        ".embeddings.h5.tmp",
        ".contigs.tsv.tmp",
        ".plan.json.0123456789abcdef.tmp",
        ".mine.tmp",
        "mine.tmp",
    ]
    for name in names:
        (tmp_path / name).touch()
    for name in (".next.tmp", ".incoming.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0").touch()
    with open_run_folder(tmp_path, force=False):
        assert {path.name for path in tmp_path.iterdir()} == {".mine.tmp", "mine.tmp", ".virnuc.lock"}


def test_folders_that_only_have_the_names_of_a_moved_run_stay(tmp_path: Path) -> None:
    for name in ("next", "incoming"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "plan.json").touch()
    for force in (False, True):
        with open_run_folder(tmp_path, force=force) as folder:
            assert folder.next.plan.exists()
            assert folder.incoming.plan.exists()
