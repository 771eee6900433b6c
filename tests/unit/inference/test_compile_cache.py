"""Compiled code is cached in the configured folder, within the configured size."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from virnuc_core.inference.compile_cache import (
    compile_cache_environment,
    hash_triton,
    trim_compile_cache,
    using_compile_cache,
)

MEGABYTE = 10**6
SetEnv = Callable[..., None]


@pytest.fixture
def cache(tmp_path: Path, set_env: SetEnv) -> Path:
    """Five entries of 2 MB, oldest use first, and a lock."""
    set_env(VIRNUC_HOME=tmp_path)
    cache = tmp_path / "compiled"
    for number in range(5):
        folder = cache / ("triton" if number % 2 else "inductor/fxgraph") / f"entry{number}"
        folder.mkdir(parents=True)
        for name in ("a", "b"):
            (folder / name).write_bytes(bytes(MEGABYTE))
            os.utime(folder / name, (1000 + number, 1000 + number))
    (cache / "inductor" / "a.lock").touch()
    return cache


def entries(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.rglob("entry*"))


def test_it_lies_in_the_home_folder_unless_another_is_named(tmp_path: Path, set_env: SetEnv) -> None:
    set_env(VIRNUC_HOME=tmp_path, TORCHINDUCTOR_CACHE_DIR="", TRITON_CACHE_DIR="")
    folders = compile_cache_environment()
    assert folders.pop("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED") == "1"
    assert {Path(folder).parent for folder in folders.values()} == {tmp_path / "compiled"}
    set_env(TRITON_CACHE_DIR="/elsewhere")
    assert compile_cache_environment().items() >= {**folders, "TRITON_CACHE_DIR": "/elsewhere"}.items()


def test_the_entries_used_longest_ago_go_first_and_whole(cache: Path, set_env: SetEnv) -> None:
    assert trim_compile_cache() == 10 * MEGABYTE
    set_env(VIRNUC_COMPILE_CACHE_GB=0.005)
    assert trim_compile_cache() == 4 * MEGABYTE
    assert entries(cache) == ["entry3", "entry4"]
    assert (cache / "inductor" / "a.lock").exists()
    os.utime(cache / "triton" / "entry3" / "a", (2000, 1000))  # used after the other
    set_env(VIRNUC_COMPILE_CACHE_GB=0.002)
    assert trim_compile_cache() == 2 * MEGABYTE
    assert entries(cache) == ["entry3"]


# Uses the cache until its standard input ends.
LANE = """
import sys
from virnuc_core.inference.compile_cache import using_compile_cache

with using_compile_cache():
    print("at work", flush=True)
    sys.stdin.read()
"""


def test_nothing_is_removed_while_another_process_may_open_it(cache: Path, set_env: SetEnv) -> None:
    set_env(VIRNUC_COMPILE_CACHE_GB=0.002)
    with subprocess.Popen(
        [sys.executable, "-c", LANE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "at work\n"
        with using_compile_cache():
            pass
        assert len(entries(cache)) == 5
        other.communicate()  # the last user trims the cache
    assert other.returncode == 0
    assert entries(cache) == ["entry4"]


def test_a_home_folder_that_cannot_be_written_costs_no_lane(tmp_path: Path, set_env: SetEnv) -> None:
    home = tmp_path / "home"
    home.write_text("a file")
    set_env(VIRNUC_HOME=home)
    with using_compile_cache():
        pass
    assert home.read_text() == "a file"


def test_triton_hashes_itself_once_in_the_background() -> None:
    cache = pytest.importorskip("triton.runtime.cache", reason="Triton is not installed")
    cache.triton_key.cache_clear()
    hash_triton.cache_clear()
    before = set(threading.enumerate())
    for _ in range(2):
        hash_triton()
    threads = set(threading.enumerate()) - before
    for thread in threads:
        thread.join()
    assert len(threads) == 1
    assert cache.triton_key.cache_info().currsize == 1
