"""A run's folder: one run at a time, and what is deleted and what is kept."""

from pathlib import Path

import pytest

from virnuc_core.errors import HostError, UsageError
from virnuc_core.results.run_opening import open_run_folder
from virnuc_core.run_folder import RunFolder

LOCK = ".virnuc.lock"
OF_A_RUN = [
    *(path.name for path in RunFolder(Path()).results),
    *("plan.json", "frames/meta.json", "sequences/genbank_1.fa", "training/records.tsv"),
    *("shards/shard_00000.h5", "shards/shard_00001.h5.damaged", "shards/.shard_00002.h5.tmp"),
    *("lanes/lane-0000-0123abcd.jsonl", "lanes/plan-0123abcd.jsonl", "lanes/token"),
]
OF_A_KILLED_RUN = [".embeddings.h5.tmp", ".plan.json.0123456789abcdef.tmp"]
MINE = ["mine.txt", ".mine.tmp", "mine.tmp", "lanes/notes.txt", "shards/mine.h5"]
NAMED_LIKE_ONES_OF_A_RUN = ["contigs.tsv", "next/plan.json", "incoming/plan.json"]


def make(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_makes_the_folder_and_keeps_others_out(tmp_path: Path) -> None:
    root = tmp_path / "a" / "b"
    with open_run_folder(root, force=False) as folder:
        assert folder.root == root
        with pytest.raises(UsageError, match="another run"), open_run_folder(root, force=True):
            pass
        folder.plan.touch()
    with open_run_folder(root, force=False):
        assert folder.plan.exists()


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(
    ("made", "left", "left_with_force"),
    [
        ([*OF_A_RUN, *MINE], [*OF_A_RUN, *MINE], MINE),
        ([*OF_A_KILLED_RUN, *MINE, *NAMED_LIKE_ONES_OF_A_RUN], *[[*MINE, *NAMED_LIKE_ONES_OF_A_RUN]] * 2),
    ],
    ids=["a run", "no plan"],
)
def test_what_is_removed(
    made: list[str], left: list[str], left_with_force: list[str], force: bool, tmp_path: Path
) -> None:
    make(tmp_path, *made)
    with open_run_folder(tmp_path, force=force):
        assert files(tmp_path) == {LOCK, *(left_with_force if force else left)}


@pytest.mark.parametrize("meta", [None, '{"camera": 1}'])
@pytest.mark.parametrize("force", [False, True])
def test_frames_that_are_not_of_a_run_are_refused(tmp_path: Path, meta: str | None, force: bool) -> None:
    make(tmp_path, "frames/mine.png")
    if meta is not None:
        (tmp_path / "frames" / "meta.json").write_text(meta)
    with pytest.raises(UsageError, match="not a frame store"), open_run_folder(tmp_path, force=force):
        pass
    assert "frames/mine.png" in files(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("file", "not a folder"),
        ("file/run", "not a folder"),
        ("/proc/none", "/proc/none cannot be written"),
        ("a\0b", "the name of no folder"),
    ],
)
def test_paths_that_can_be_no_folder(name: str, message: str, tmp_path: Path) -> None:
    make(tmp_path, "file")
    with pytest.raises(UsageError, match=message), open_run_folder(tmp_path / name, force=False):
        pass


def test_a_host_without_the_folder_of_the_run_is_told_from_others(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with pytest.raises(HostError, match="No such file or directory"):
        folder.require_token("0123")
    make(tmp_path, "lanes/token")
    folder.token.write_text("0123")
    folder.require_token("0123")
    with pytest.raises(HostError, match="it is of another run"):
        folder.require_token("4567")
