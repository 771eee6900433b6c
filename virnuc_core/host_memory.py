"""Memory available to this process: physical, by its resource limit, and by its control groups; and its garbage collection."""

import gc
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

_PROC: Final = Path("/proc")


class _Files(NamedTuple):
    """Of a control group: limit, usage, and the key of its reclaimable page cache in memory.stat."""

    limit: str
    used: str
    cache: bytes


_FILES: Final = {
    "cgroup": _Files("memory.limit_in_bytes", "memory.usage_in_bytes", b"total_inactive_file"),
    "cgroup2": _Files("memory.max", "memory.current", b"inactive_file"),
}


def memory_limit(proc: Path = _PROC) -> int:
    """Upper bound on this process's memory, in bytes."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    own, _ = resource.getrlimit(resource.RLIMIT_AS)
    if own != resource.RLIM_INFINITY:
        limits.append(own)
    return min([*limits, *(limit for limit, _ in _group_limits(proc))])


def free_memory(proc: Path = _PROC) -> int | None:
    """Free bytes on the machine and within the control groups; None if unknown."""
    found = [max(0, limit - used) for limit, used in _group_limits(proc)]
    try:
        lines = dict(
            line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines() if ":" in line
        )
        found.append(1024 * int(lines["MemAvailable"].split()[0]))
    except (OSError, LookupError, ValueError):
        pass
    return min(found, default=None)


@contextmanager
def without_collection() -> Iterator[None]:
    """For slow imports: looking for garbage takes a fifth of their time, and they leave none."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()  # nor is what they made looked through later
        gc.enable()


def _group_limits(proc: Path) -> Iterator[tuple[int, int]]:
    """Limit and usage in bytes of this process's control group and its ancestors, where limited."""
    for files, folder in _group_folders(proc / "self"):
        try:
            limit, used = (int((folder / name).read_bytes()) for name in (files.limit, files.used))
        except (OSError, ValueError):  # no limit: there is no such file, or it says "max"
            continue
        try:
            counts = dict(line.split() for line in (folder / "memory.stat").read_bytes().splitlines())
            used -= int(counts[files.cache])
        except (OSError, LookupError, ValueError):
            pass
        yield limit, used


def _group_folders(process: Path) -> Iterator[tuple[_Files, Path]]:
    """Folders of a process's memory control group and its ancestors, cgroup v1 and v2."""
    try:
        groups = [line.split(":", 2) for line in (process / "cgroup").read_text().splitlines()]
        mounts = [line.split() for line in (process / "mountinfo").read_text().splitlines()]
    except (OSError, ValueError):
        return
    own = {"cgroup2" if not names else "cgroup": path for _, names, path in groups if _has_memory(names)}
    for mount in mounts:
        root, point, (kind, _, options) = mount[3], Path(mount[4]), mount[mount.index("-") + 1 :][:3]
        if kind not in own or (kind == "cgroup" and "memory" not in options.split(",")):
            continue
        group = PurePosixPath(own[kind])
        # In a container the mount may lack the parent folders: its root is then the process's own group.
        inside = group.relative_to(root) if group.is_relative_to(root) else PurePosixPath()
        for folder in (inside, *inside.parents):
            yield _FILES[kind], point / folder


def _has_memory(controllers: str) -> bool:
    """Whether a /proc/self/cgroup entry is v2, which lists no controllers, or v1 with the memory controller."""
    return not controllers or "memory" in controllers.split(",")
