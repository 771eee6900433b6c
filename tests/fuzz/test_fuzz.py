"""A short version of benchmarks/reliability/fuzz.py: hostile input gives a result or a VirnucError."""

import resource
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.reliability.child import limit_memory, make_material, run_inputs
from benchmarks.reliability.fuzz import MOST_SECONDS, fuzz_reader
from benchmarks.reliability.malicious_pickles import malicious_files
from benchmarks.reliability.readers import READERS, Reader

INPUTS = 120
# Skips the malicious pickles, which have their own test.
BEGINS = dict.fromkeys((".pt and .bin weights", ".pth heads"), len(malicious_files(Path("ran"))))


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("material")
    make_material(folder)
    return folder


@pytest.fixture
def two_gigabytes() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit_memory()
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.slow
@pytest.mark.usefixtures("two_gigabytes")
@pytest.mark.parametrize("reader", READERS, ids=[reader.name for reader in READERS])
def test_only_results_and_own_errors(reader: Reader, material: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(material)
    begin = BEGINS.get(reader.name, 0)
    results = [line for line in run_inputs(reader, 0, begin, begin + INPUTS) if "index" in line]
    assert [line for line in results if line["outcome"] not in ("accepted", "refused")] == []
    assert [line for line in results if line["seconds"] > MOST_SECONDS] == []
    assert len({line["outcome"] for line in results}) == 2 or reader.name in (
        "run.json",
        "HDF5 shards",
        "lane journals",
    )


def test_a_process_that_is_watched(tmp_path: Path) -> None:
    figures = fuzz_reader("weight index", 30, 1, tmp_path / "material")
    assert figures.outcomes.total() == 30
    assert figures.is_clean, figures.failures
    assert 0 < figures.peak_mb < 2048


def test_the_same_inputs_every_time(material: Path) -> None:
    reader = READERS[0]
    valid = {"in.fa": (material / "in.fa").read_bytes()}
    made = [reader.input_of(index, 7, valid) for index in range(200)]
    assert made == [reader.input_of(index, 7, valid) for index in range(200)]
    assert Counter(made).most_common(1)[0][1] < 20
