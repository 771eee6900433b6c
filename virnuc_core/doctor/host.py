"""The host: memory, disks, file limit, caches, and the bundled models."""

import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from virnuc_core.doctor.finding import Finding
from virnuc_core.env_config import env
from virnuc_core.errors import storage_error
from virnuc_core.host_memory import free_memory
from virnuc_core.inference.compile_cache import compile_cache_environment
from virnuc_core.models.catalogue import BUNDLED_HEADS, CATALOGUE
from virnuc_core.models.hub import cache_folder, verify
from virnuc_core.versions import State

_LEAST_MEMORY_GB: Final = (1.0, 4.0)  # for a run at all, and for one that is not cramped
_LEAST_DISK_GB: Final = (0.5, 10.0)
_LEAST_FILES: Final = 1024


def host_findings() -> Iterator[Finding]:
    """Memory, file limit, and the disks that a run writes to."""
    if (free := free_memory()) is not None:
        advice = "end other programs, or give the job more memory"
        state, advice = _graded(free / 1e9, _LEAST_MEMORY_GB, advice)
        yield Finding(
            topic="host", name="memory", state=state, found=f"{free / 1e9:.1f} GB free", advice=advice
        )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft < _LEAST_FILES and soft != resource.RLIM_INFINITY
    yield Finding(
        topic="host",
        name="open files",
        state="warning" if few else "ok",
        found="no limit" if soft == resource.RLIM_INFINITY else f"at most {soft}",
        advice=f"ulimit -n {min(4 * _LEAST_FILES, hard) if hard > 0 else 4 * _LEAST_FILES}" if few else "",
    )
    folders = {"working folder": Path.cwd(), "VIRNUC_HOME": env().home, "temporary folder": None}
    for name, folder in folders.items():
        yield _disk(name, folder)


def cache_findings() -> Iterator[Finding]:
    """What is kept from run to run, how large it is, and where."""
    compiled = compile_cache_environment()
    folders = {
        "models of the hub": cache_folder(),
        "code compiled by torch": Path(compiled["TORCHINDUCTOR_CACHE_DIR"]),
        "code compiled by Triton": Path(compiled["TRITON_CACHE_DIR"]),
        "runs in MLflow": env().home / "mlflow.db",
        "Prefect": Path(env().prefect_home or env().home / "prefect"),
    }
    for name, path in folders.items():
        yield Finding(topic="caches", name=name, state="ok", found=f"{_size(path) / 1e9:.3f} GB in {path}")


def bundled_findings() -> Iterator[Finding]:
    """Whether the models and heads of the package are byte for byte those that it was made with."""
    names = [entry.qualified_name for entry in CATALOGUE if isinstance(entry.source, Path)]
    for name in (*names, *BUNDLED_HEADS):
        found = verify(name)
        whole = found.is_whole and bool(found.hashes_from)
        reasons = "; ".join(found.problems) or "no hashes are known of its files"
        yield Finding(
            topic="bundled",
            name=name,
            state="ok" if whole else "problem",
            found=f"whole, fingerprint {found.fingerprint[:12]}" if whole else reasons,
            advice="" if whole else "install virnuc again",
        )


def _disk(name: str, folder: Path | None) -> Finding:
    """Room in a folder, and whether files can be made there; a home that is not there is made by the first run."""
    try:
        folder = folder or Path(tempfile.gettempdir())
        place = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
        with tempfile.TemporaryFile(dir=place):
            free = shutil.disk_usage(place).free / 1e9
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        advice = "set VIRNUC_HOME to one that can" if name == "VIRNUC_HOME" else storage_error(error).args[0]
        where = folder or "no folder for temporary files"
        return Finding(
            topic="host",
            name=name,
            state="problem",
            found=f"{where} cannot be written ({reason})",
            advice=advice,
        )
    state, advice = _graded(free, _LEAST_DISK_GB, "make room, or work on another disk")
    return Finding(
        topic="host", name=name, state=state, found=f"{free:.1f} GB free in {folder}", advice=advice
    )


def _graded(amount: float, least: tuple[float, float], advice: str) -> tuple[State, str]:
    """State and advice by how much of something is there."""
    if amount < least[0]:
        return "problem", advice
    return ("warning", advice) if amount < least[1] else ("ok", "")


def _size(path: Path) -> int:
    """Bytes of a file, or of all files below a folder; links are not followed."""
    total = 0
    for folder, _, names in os.walk(path):
        for file in (Path(folder, name) for name in names):
            total += file.lstat().st_size if os.path.lexists(file) else 0
    return total or (path.stat().st_size if path.is_file() else 0)
