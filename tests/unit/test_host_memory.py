"""Memory of the machine and of both cgroup versions, from the kernel's files."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from virnuc_core.errors import InputError
from virnuc_core.host_memory import free_memory, memory_limit
from virnuc_core.sequences.reader import iter_records

MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
UNLIMITED = 0x7FFF_FFFF_FFFF_F000  # in cgroup v1


class Kernel:
    """A /proc with a process in a cgroup, and the cgroup mounts."""

    def __init__(self, root: Path) -> None:
        self.proc = root / "proc"
        self.mount = root / "mount"
        (self.proc / "self").mkdir(parents=True)

    @property
    def found(self) -> tuple[int, int | None]:
        return memory_limit(self.proc), free_memory(self.proc)

    def process_in(self, group: str, mounted: str = "/", version: int = 2) -> None:
        controllers = "0:" if version == 2 else "4:cpu,memory"
        kind = "cgroup2 cgroup2 rw" if version == 2 else "cgroup cgroup rw,cpu,memory"
        (self.proc / "self" / "cgroup").write_text(f"9:name=systemd:/x\n{controllers}:{group}\n")
        (self.proc / "self" / "mountinfo").write_text(
            f"30 1 0:27 / / rw - ext4 /dev/sda rw\n32 31 0:29 {mounted} {self.mount} rw,relatime shared:9 - {kind}\n"
        )

    def group(self, folder: str, **files: object) -> None:
        place = self.mount / folder
        place.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (place / f"memory.{name}").write_text(f"{content}\n")

    def free(self, kilobytes: int) -> None:
        (self.proc / "meminfo").write_text(f"MemTotal: 9000 kB\nMemAvailable: {kilobytes} kB\n")


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    return Kernel(tmp_path)


def test_without_control_groups_it_is_that_of_the_machine(kernel: Kernel) -> None:
    assert kernel.found == (MACHINE, None)
    kernel.free(4000)
    assert kernel.found == (MACHINE, 4000 * 1024)


def test_the_own_group_and_those_above_it_count(kernel: Kernel) -> None:
    kernel.free(4000)
    kernel.process_in("/user/job/step")
    kernel.group("user/job/step", max="max", current=100)
    kernel.group("other", max=1, current=1)
    assert kernel.found == (MACHINE, 4000 * 1024)
    kernel.group("user/job", max=1_000_000, current=400_000)
    assert kernel.found == (1_000_000, 600_000)
    kernel.group("user/job/step", max=700_000, current=200_000)
    assert kernel.found == (700_000, 500_000)


def test_version_1(kernel: Kernel) -> None:
    kernel.process_in("/slurm/job", version=1)
    kernel.group("", limit_in_bytes=UNLIMITED, usage_in_bytes=0)
    kernel.group("slurm/job", limit_in_bytes=800_000, usage_in_bytes=300_000)
    assert kernel.found == (800_000, 500_000)


@pytest.mark.parametrize(
    ("group", "mounted"), [("/docker/a1", "/docker/a1"), ("/docker/a1", "/b"), ("/", "/")]
)
def test_a_container_sees_its_own_group_as_the_root(kernel: Kernel, group: str, mounted: str) -> None:
    kernel.process_in(group, mounted)
    kernel.group("", max=900_000, current=100_000)
    assert kernel.found == (900_000, 800_000)


def test_a_cache_of_files_is_free_memory(kernel: Kernel) -> None:
    kernel.process_in("/job")
    kernel.group("job", max=900_000, current=850_000, stat="anon 50000\ninactive_file 700000\nactive_file 1")
    assert free_memory(kernel.proc) == 750_000
    kernel.group("job", current=950_000, stat="inactive_file none")
    assert free_memory(kernel.proc) == 0


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


def test_a_record_is_measured_against_the_limit_of_the_job(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kernel.process_in("/job")
    kernel.group("job", max=100_000, current=0)
    monkeypatch.setattr("virnuc_core.sequences.reader.memory_limit", lambda: memory_limit(kernel.proc))
    fasta = tmp_path / "in.fa"
    fasta.write_text(">short\nACGT\n")
    assert len(list(iter_records([fasta], "dna"))) == 1
    fasta.write_text(">long\n" + "A" * 10_000 + "\n")
    with pytest.raises(InputError, match="does not fit into the memory"):
        list(iter_records([fasta], "dna"))
