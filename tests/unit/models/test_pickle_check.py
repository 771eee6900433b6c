"""No weight file can run code."""

import io
import pickle
import sys
import time
import warnings
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.made_hostile import module_of_modules, torch_files
from tests.made_models import ESM2
from tests.made_pickles import CONTAINERS, PAYLOADS, RUNS, archive, payloads
from virnuc_core.errors import CheckpointError
from virnuc_core.models.heads import load_head
from virnuc_core.models.tensor_files import read_pickle, read_tensors

HEARD: list[str] = []
FORBIDDEN = {
    "os.system",
    "os.posix_spawn",
    "subprocess.Popen",
    "os.exec",
    "pickle.find_class",
    "socket.connect",
}


@pytest.fixture(scope="module")
def _listening() -> None:
    sys.addaudithook(lambda event, arguments: HEARD.append(event) if event in FORBIDDEN else None)


@pytest.fixture
def heard(_listening: None) -> list[str]:
    """Audit events of the interpreter."""
    HEARD.clear()
    return HEARD


@pytest.mark.parametrize("name", RUNS)
def test_the_payloads_are_no_blanks(name: str, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    pickle.loads(payloads(marker)[name])
    assert marker.exists()


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("payload", PAYLOADS)
def test_no_code_runs(payload: str, container: str, tmp_path: Path, heard: list[str]) -> None:
    marker, path = tmp_path / "ran", tmp_path / "evil.pth"
    path.write_bytes(CONTAINERS[container](payloads(marker)[payload]))
    for read in (load_head, read_tensors, read_pickle):
        with pytest.raises(CheckpointError, match=r"evil\.pth"):
            read(path)
    assert not marker.exists()
    assert heard == []


HEAD_NAMES = ["hidden_layer.weight", "output_layer.weight", "bn1.weight"]


@pytest.mark.parametrize("name", sorted(torch_files(HEAD_NAMES)))
def test_small_files_stay_small(name: str, tmp_path: Path) -> None:
    path = tmp_path / "head.pth"
    path.write_bytes(torch_files(HEAD_NAMES)[name])
    with pytest.raises(CheckpointError, match=r"head\.pth"):
        load_head(path)


def test_tied_weights_are_read_and_repeated_values_are_not(tmp_path: Path) -> None:
    tied = torch.randn(500, 16)
    torch.save({"embedding": tied, "output": tied}, tmp_path / "a.pt")
    tensors = read_tensors(tmp_path / "a.pt")
    assert torch.equal(tensors["embedding"], tensors["output"])
    torch.save({"a": torch.zeros(1).expand(1000, 1000)}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="declares tensors of 4,000,000 bytes"):
        read_tensors(tmp_path / "a.pt")


def pickled(operations: bytes) -> bytes:
    return archive({"data.pkl": b"\x80\x02" + operations, "version": b"3\n"})


def compressed_archive() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as zipped:
        zipped.writestr("archive/data.pkl", b"\x80\x02" + bytes(1 << 22))
    return buffer.getvalue()


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (compressed_archive, "larger in memory than on disk"),
        (lambda: pickled(b"](" + b"K\x01" * 1_000_000 + b"e."), "contains no state dict"),
        (module_of_modules, r"a\.pt"),
    ],
)
def test_nothing_takes_for_ever(make: Callable[[], bytes], message: str, tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes(make())
    with pytest.raises(CheckpointError, match=message):
        load_head(tmp_path / "a.pt")


def test_threads_that_read_at_once_do_not_take_what_is_allowed_from_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load, before = torch.load, (set(torch.serialization.get_safe_globals()), list(warnings.filters))

    def load_slowly(*arguments: object, **options: object) -> object:
        time.sleep(0.02)
        return load(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(torch, "load", load_slowly)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(read_tensors, [ESM2] * 8))  # which holds a Namespace
    assert all(tensors.keys() == found[0].keys() for tensors in found)
    assert (set(torch.serialization.get_safe_globals()), list(warnings.filters)) == before
