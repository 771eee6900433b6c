"""A run's folder: one run at a time, and what is deleted and what is kept."""

from pathlib import Path

import pytest

from tests.made_plans import PLAN
from virnuc_core.errors import HostError, UsageError
from virnuc_core.inference.plan import write_plan
from virnuc_core.results.run_opening import open_run_folder
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.frame_store_build import REJECTED_HEADER

LOCK = ".virnuc.lock"
OF_A_RUN = [
    *(path.name for path in RunFolder(Path()).results),
    *("plan.json", "frames/meta.json", "sequences/genbank_1.fa", "training/records.tsv"),
    *("shards/shard_00000.h5", "shards/shard_00001.h5.damaged", "shards/.shard_00002.h5.tmp"),
    *("lanes/lane-0000-0123abcd.jsonl", "lanes/plan-0123abcd.jsonl", "lanes/token"),
]
OF_A_KILLED_RUN = [".embeddings.h5.tmp", ".plan.json.0123456789abcdef.tmp"]
MINE = ["mine.txt", ".mine.tmp", "mine.tmp", "lanes/notes.txt", "shards/mine.h5", "next/plan.json"]


def make(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if name == "plan.json":
            write_plan(folder / name, PLAN)
        else:
            (folder / name).touch()


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_makes_the_folder_and_keeps_others_out(tmp_path: Path) -> None:
    root = tmp_path / "a" / "b"
    with open_run_folder(root, force=False) as folder:
        assert folder.root == root
        with pytest.raises(UsageError, match="another run"), open_run_folder(root, force=True):
            pass
        write_plan(folder.plan, PLAN)
    with open_run_folder(root, force=False):
        assert folder.plan.exists()


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(
    ("made", "left", "left_with_force"),
    [
        ([*OF_A_RUN, *MINE], [*OF_A_RUN, *MINE], MINE),
        ([*OF_A_KILLED_RUN, *MINE], MINE, MINE),
    ],
    ids=["a run", "no plan"],
)
def test_what_is_removed(
    made: list[str], left: list[str], left_with_force: list[str], force: bool, tmp_path: Path
) -> None:
    make(tmp_path, *made)
    with open_run_folder(tmp_path, force=force):
        assert files(tmp_path) == {LOCK, *(left_with_force if force else left)}


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(
    ("made", "foreign"),
    [
        (["frames/mine.png"], "frames"),
        (["frames/meta.json"], "frames"),
        (["contigs.tsv"], "contigs.tsv"),
        (["rejected.tsv"], "rejected.tsv"),
        (["run.json"], "run.json"),
        (["plan.json", "contigs.tsv/mine"], "contigs.tsv"),
        (["plan.json", "shards"], "shards"),
        (["shards/shard_00000.h5"], "shards/shard_00000.h5"),
    ],
)
def test_what_no_run_made_is_refused(tmp_path: Path, made: list[str], foreign: str, force: bool) -> None:
    make(tmp_path, *made)
    before = files(tmp_path)
    message = f"{tmp_path}/{foreign} would be overwritten, and was not made by virnuc"
    with pytest.raises(UsageError, match=message), open_run_folder(tmp_path, force=force):
        pass
    assert files(tmp_path) == before


def test_what_a_killed_run_left_without_a_plan_is_its_own(tmp_path: Path) -> None:
    (tmp_path / "rejected.tsv").write_text(f"{REJECTED_HEADER}1\ta\tin.fa\t0\tempty sequence\n")
    make(tmp_path, LOCK, "lanes/token", "sequences/genbank_1.fa", "training/records.tsv")
    with open_run_folder(tmp_path, force=False):
        pass
    make(tmp_path, "contigs.tsv")  # there are tables only after a plan
    with pytest.raises(UsageError, match=r"contigs\.tsv would be"), open_run_folder(tmp_path, force=False):
        pass


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("file", "not a folder"),
        ("file/run", "not a folder"),
        ("/proc/none", "/proc/none cannot be written"),
        ("a\0b", "contains a NUL"),
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
    with pytest.raises(HostError, match="it belongs to another run"):
        folder.require_token("4567")
