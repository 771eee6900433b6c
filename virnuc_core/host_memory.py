"""Memory of this process: its limit, physical, by resource limit and control groups, and what it keeps of it."""

import ctypes
import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path, PurePosixPath


def memory_limit(proc: Path = Path("/proc")) -> int:
    """Upper bound on this process's memory, in bytes."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    own, _ = resource.getrlimit(resource.RLIMIT_AS)
    if own != resource.RLIM_INFINITY:
        limits.append(own)
    return min([*limits, *_group_limits(proc)])


def _group_limits(proc: Path) -> Iterator[int]:
    """Limits in bytes of this process's memory control group and its ancestors, cgroup v1 and v2, where limited."""
    try:
        groups = [line.split(":", 2) for line in (proc / "self" / "cgroup").read_text().splitlines()]
        mounts = [line.split() for line in (proc / "self" / "mountinfo").read_text().splitlines()]
    except (OSError, ValueError):
        return
    # Version 2 lists no controllers.
    own = {
        "cgroup" if names else "cgroup2": path
        for _, names, path in groups
        if not names or "memory" in names.split(",")
    }
    for mount in mounts:
        root, point, (kind, _, options) = mount[3], Path(mount[4]), mount[mount.index("-") + 1 :][:3]
        if kind not in own or (kind == "cgroup" and "memory" not in options.split(",")):
            continue
        group = PurePosixPath(own[kind])
        # In a container the mount may lack the parent folders: its root is then the process's own group.
        inside = group.relative_to(root) if group.is_relative_to(root) else PurePosixPath()
        for folder in (inside, *inside.parents):
            with suppress(OSError, ValueError):  # no limit: there is no such file, or it says "max"
                name = "memory.max" if kind == "cgroup2" else "memory.limit_in_bytes"
                yield int((point / folder / name).read_bytes())


@cache
def keep_freed_memory() -> None:
    """Has glibc keep up to 256 MB of freed memory; new pages for every large array would take a tenth of the time of indexing."""
    trim_threshold, mmap_threshold = -1, -3  # malloc.h
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # other C libraries lack it
        libc.mallopt(mmap_threshold, 1 << 25)
        libc.mallopt(trim_threshold, 1 << 28)
