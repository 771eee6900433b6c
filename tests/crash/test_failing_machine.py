"""Folders that vanish, full disks and truncated files during a run."""

import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.made_models import MadeRun
from virnuc_cli.main import main
from virnuc_core.errors import LaneError, StorageError, storage_error
from virnuc_core.inference.events import LaneEvent, ModelsLoaded, ShardDone
from virnuc_core.inference.lane_process import LaneProcess
from virnuc_core.inference.planning import index_inputs
from virnuc_core.inference.shard import pending_shards


@contextmanager
def no_file_larger_than(limit: int) -> Iterator[None]:
    """Simulates a full disk, except for the errno."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_takes_no_more_in_the_middle_of_a_shard(run: MadeRun) -> None:
    with no_file_larger_than(3000), pytest.raises(OSError, match="shard_00000") as caught:
        run.compute()
    assert list(run.folder.shards.iterdir()) == []
    assert isinstance(storage_error(caught.value), StorageError)
    run.compute()
    assert pending_shards(run.folder, run.plan) == ()


def test_a_command_on_a_full_disk_says_so(
    tmp_path: Path, contigs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "frames.tsv"
    with no_file_larger_than(1000):
        code = main(["frames", str(contigs), "--chunk-length", "60", "--out", str(out)])
    assert code == StorageError.exit_code == 6
    assert "virnuc: error: " in (said := capsys.readouterr().err)
    assert "its free space" in said
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_vanishes(run: MadeRun) -> None:
    def remove(event: LaneEvent) -> None:
        if isinstance(event, ShardDone):
            shutil.rmtree(run.folder.root, ignore_errors=True)

    with LaneProcess("cpu") as lane, pytest.raises(OSError, match=r"shard_|plan\.json") as caught:
        lane.run(run.folder, range(len(run.plan.shards)), 0, remove)
    assert "No such file" in str(storage_error(caught.value))


def test_a_frame_store_that_is_cut_while_it_is_read(run: MadeRun, contigs: Path) -> None:
    column = run.folder.frames / "protein.bin"
    whole = column.read_bytes()

    def cut(event: LaneEvent) -> None:
        if isinstance(event, ModelsLoaded):
            os.truncate(column, 0)

    with LaneProcess("cpu") as lane, pytest.raises(LaneError, match=r"SIGBUS .*a truncated file of the run"):
        lane.run(run.folder, range(len(run.plan.shards)), 0, cut)
    index_inputs(run.folder, [str(contigs)], run.plan.chunk_length, "dna")
    assert column.read_bytes() == whole


def test_a_byte_of_the_frame_store_that_changed_is_noticed_when_a_run_goes_on(
    run: MadeRun, contigs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    column = run.folder.frames / "dna.bin"
    whole = column.read_bytes()
    column.write_bytes(b"A" + whole[1:] if whole[:1] != b"A" else b"C" + whole[1:])
    index_inputs(run.folder, [str(contigs)], run.plan.chunk_length, "dna")
    assert "was modified: rebuilding it" in caplog.text
    assert column.read_bytes() == whole
