from pathlib import Path

import pytest

from tasks.run_folder import open_run_folder, result_files
from virnuc_core.errors import UsageError


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
        for path in (*result_files(folder), folder.plan, tmp_path / "mine.txt"):
            path.touch()
        folder.shards.mkdir()
        folder.shard(0).touch()
        folder.frames.mkdir()
    with open_run_folder(tmp_path, force=True):
        assert {path.name for path in tmp_path.iterdir()} == {"mine.txt", ".virnuc.lock"}


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
