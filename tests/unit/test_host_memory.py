"""Memory of the machine and of both cgroup versions, from the kernel's files; garbage collection."""

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from virnuc_core.host_memory import memory_limit

MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
UNLIMITED = 0x7FFF_FFFF_FFFF_F000  # in cgroup v1


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """An empty /proc."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    return tmp_path / "proc"


def process_in(
    proc: Path, groups: dict[str, dict[str, object]], group: str, mounted: str = "/", version: int = 2
) -> None:
    """Puts the process into a control group; `groups` are the memory files of groups, by folder below the mount."""
    mount = proc.parent / "mount"
    controllers = "0:" if version == 2 else "4:cpu,memory"
    kind = "cgroup2 cgroup2 rw" if version == 2 else "cgroup cgroup rw,cpu,memory"
    (proc / "self" / "cgroup").write_text(f"9:name=systemd:/x\n{controllers}:{group}\n")
    (proc / "self" / "mountinfo").write_text(
        f"30 1 0:27 / / rw - ext4 /dev/sda rw\n32 31 0:29 {mounted} {mount} rw,relatime shared:9 - {kind}\n"
    )
    for folder, contents in groups.items():
        (mount / folder).mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            (mount / folder / f"memory.{name}").write_text(f"{content}\n")


def test_without_control_groups_it_is_that_of_the_machine(proc: Path) -> None:
    assert memory_limit(proc) == MACHINE


NO_LIMIT = {"user/job/step": {"max": "max", "current": 100}}
OTHER_GROUP = {"other": {"max": 1, "current": 1}}
OF_THE_JOB = {"user/job": {"max": 1_000_000, "current": 400_000}}
OF_THE_STEP = {"user/job/step": {"max": 700_000, "current": 200_000}}
OWN_ROOT = {"": {"max": 900_000, "current": 100_000}}


@pytest.mark.parametrize(
    ("place", "groups", "limit"),
    [
        # the own group and those above it count
        (("/user/job/step",), NO_LIMIT | OTHER_GROUP, MACHINE),
        (("/user/job/step",), NO_LIMIT | OTHER_GROUP | OF_THE_JOB, 1_000_000),
        (("/user/job/step",), OTHER_GROUP | OF_THE_JOB | OF_THE_STEP, 700_000),
        # version 1
        (
            ("/slurm/job", "/", 1),
            {
                "": {"limit_in_bytes": UNLIMITED, "usage_in_bytes": 0},
                "slurm/job": {"limit_in_bytes": 800_000, "usage_in_bytes": 300_000},
            },
            800_000,
        ),
        # a container sees its own group as the root
        (("/docker/a1", "/docker/a1"), OWN_ROOT, 900_000),
        (("/docker/a1", "/b"), OWN_ROOT, 900_000),
        (("/", "/"), OWN_ROOT, 900_000),
    ],
)
def test_control_groups(
    proc: Path, place: tuple[Any, ...], groups: dict[str, dict[str, object]], limit: int
) -> None:
    process_in(proc, groups, *place)
    assert memory_limit(proc) == limit


def test_the_limit_of_the_process_counts() -> None:
    code = "from virnuc_core.host_memory import memory_limit; print(memory_limit())"
    allowed = 1 << 32
    done = subprocess.run(
        [sys.executable, "-c", code],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (allowed, allowed)),
        capture_output=True,
        check=True,
    )
    assert int(done.stdout) == min(allowed, memory_limit())
