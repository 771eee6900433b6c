"""Embeddings that other programs wrote: HDF5 without checksums, NumPy archives, VirNucPro's merged features."""

import io
import logging
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import h5py
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from benchmarks.reliability.malicious_pickles import CONTAINERS, malicious_files, payloads
from tests.made_models import GOLDEN, MadeModels, MadeRun, plan_run
from virnuc_core.errors import CheckpointError, DamagedFileError, UsageError, VirnucError
from virnuc_core.results.aggregate import aggregate
from virnuc_core.results.embeddings import Embeddings, export_embeddings
from virnuc_core.results.rescore import score_embeddings

CLASSIFIER = GOLDEN / "classifier"
NOTE = "carries no checksums of virnuc"


def scores_of(path: Path, head: Path, folder: Path, dna_head: Path | None = None) -> str:
    out = folder / f"{path.name}.tsv"
    score_embeddings(path, str(head), out, str(dna_head) if dna_head else None)
    return out.read_text()


def arrays_of(path: Path) -> dict[str, Any]:
    with h5py.File(path) as file:
        return {name: dataset[:] for name, dataset in file.items()}


def write_hdf5(path: Path, arrays: Mapping[str, Any], attributes: Mapping[str, Any] | None = None) -> Path:
    with h5py.File(path, "w") as file:
        for name, values in arrays.items():
            file[name] = values
        file.attrs.update(attributes or {})
    return path


def write_npz(path: Path, *, compressed: bool = False, **arrays: Any) -> Path:
    (np.savez_compressed if compressed else np.savez)(path, **arrays)
    return path


@pytest.fixture
def merged(tmp_path: Path) -> Path:
    """The golden features in VirNucPro's file."""
    with np.load(CLASSIFIER / "golden.npz") as golden:
        data = torch.from_numpy(golden["features"])
    path = tmp_path / "output_1_merged.pt"
    torch.save({"ids": [f"k141_{i}_chunk_1F1" for i in range(len(data))], "data": data}, path)
    return path


def test_hdf5_of_another_program_is_scored_with_a_note(
    finished_run: MadeRun, made_models: MadeModels, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = finished_run.folder.embeddings
    expected = scores_of(source, made_models.head, tmp_path)
    assert NOTE not in caplog.text
    arrays = arrays_of(source)
    with h5py.File(source) as file:
        described = {n: v for n, v in file.attrs.items() if not n.endswith("_sha256")}
    as_text = {**arrays, "frame_ids": [name.decode() for name in arrays["frame_ids"].tolist()]}
    renamed = {"ids": arrays["frame_ids"], "dna": arrays["dna"], "protein": arrays["protein"]}
    files = [
        write_hdf5(tmp_path / "plain.h5", arrays),
        write_hdf5(tmp_path / "described.h5", arrays, described),
        write_hdf5(tmp_path / "own.h5", arrays, {"author": "somebody", "versions": [1, 2]}),
        write_hdf5(tmp_path / "text.h5", as_text),
        write_hdf5(tmp_path / "renamed.h5", renamed),
        write_hdf5(tmp_path / "more.h5", {**arrays, "labels": np.arange(3)}),
    ]
    for path in files:
        caplog.clear()
        assert scores_of(path, made_models.head, tmp_path) == expected
        [record] = [record for record in caplog.records if NOTE in record.getMessage()]
        assert record.levelno == logging.WARNING
        assert str(path) in record.getMessage()


def test_a_wrong_checksum_stays_damage(
    finished_run: MadeRun, made_models: MadeModels, tmp_path: Path
) -> None:
    source = finished_run.folder.embeddings
    arrays = arrays_of(source)
    with h5py.File(source) as file:
        attributes = dict(file.attrs)
    write_hdf5(tmp_path / "copy.h5", arrays, attributes)
    assert scores_of(tmp_path / "copy.h5", made_models.head, tmp_path)
    wrong = {
        "attribute": write_hdf5(tmp_path / "1.h5", arrays, {**attributes, "dtype": "float16"}),
        "seal": write_hdf5(tmp_path / "2.h5", arrays, {**attributes, "attributes_sha256": "0" * 64}),
        "no seal": write_hdf5(
            tmp_path / "3.h5", arrays, {n: v for n, v in attributes.items() if n != "attributes_sha256"}
        ),
        "values": write_hdf5(tmp_path / "4.h5", {**arrays, "dna": arrays["dna"] + 1}, attributes),
    }
    for path in wrong.values():
        with pytest.raises(DamagedFileError, match=r"checksum"):
            scores_of(path, made_models.head, tmp_path)
        with pytest.raises(DamagedFileError, match=r"checksum"):
            Embeddings(path)


@pytest.mark.parametrize("compressed", [False, True])
def test_npz_is_scored(
    compressed: bool,
    finished_run: MadeRun,
    made_models: MadeModels,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = finished_run.folder.embeddings
    expected = scores_of(source, made_models.head, tmp_path)
    with Embeddings(source) as opened:
        ids, dna, protein = opened.ids, opened.matrix("dna")[:], opened.matrix("protein")[:]
    both = np.hstack([dna, protein])
    files = [
        write_npz(tmp_path / "pair.npz", compressed=compressed, ids=ids, dna=dna, protein=protein),
        write_npz(tmp_path / "one.npz", compressed=compressed, ids=ids, vectors=both),
        write_npz(tmp_path / "f.npz", compressed=compressed, ids=ids, vectors=np.asfortranarray(both)),
        write_npz(tmp_path / "double.npz", compressed=compressed, ids=ids, vectors=both.astype(np.float64)),
        write_npz(tmp_path / "bytes.npz", compressed=compressed, frame_ids=np.array(ids, "S"), vectors=both),
    ]
    for path in files:
        caplog.clear()
        assert scores_of(path, made_models.head, tmp_path) == expected
        assert NOTE in caplog.text


def test_an_export_comes_back(
    tmp_path: Path, contigs: Path, made_models: MadeModels, caplog: pytest.LogCaptureFixture
) -> None:
    run = plan_run(tmp_path / "run", contigs, made_models.config(dna_head=str(made_models.dna_head)))
    run.compute()
    aggregate(run.folder, run.plan, run.store)
    back = tmp_path / "back.npz"
    export_embeddings(run.folder.embeddings, back)
    for dna_head in (None, made_models.dna_head):
        ours = scores_of(run.folder.embeddings, made_models.head, tmp_path, dna_head)
        assert scores_of(back, made_models.head, tmp_path, dna_head) == ours
    with Embeddings(run.folder.embeddings) as ours_opened, Embeddings(back) as opened:
        assert opened.attrs == ours_opened.attrs
        assert opened.datasets == ("dna", "protein")
        assert np.array_equal(opened.vectors[:], ours_opened.vectors[:])
        assert opened.as_dataframe().equals(ours_opened.as_dataframe())
    again = tmp_path / "again.npz"
    export_embeddings(back, again)
    assert again.read_bytes() == back.read_bytes()


def test_merged_features_get_the_scores_of_virnucpro(
    merged: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = scores_of(merged, CLASSIFIER / "pickled_module.pth", tmp_path).splitlines()[1:]
    with np.load(CLASSIFIER / "golden.npz") as golden:
        probabilities = golden["probabilities"]
    assert [line.split("\t")[0] for line in lines] == [f"k141_{i}_chunk_1F1" for i in range(len(lines))]
    found = np.array([[float(text) for text in line.split("\t")[2:]] for line in lines])
    np.testing.assert_allclose(found, probabilities, rtol=0, atol=1e-6)
    assert NOTE in caplog.text


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("is_zip", [True, False])
def test_merged_features_open(dtype: torch.dtype, is_zip: bool, tmp_path: Path) -> None:
    data = torch.arange(12).reshape(3, 4).to(dtype)
    ids = ["a_chunk_1F1", "a_chunk_1R2", "b_chunk_2F3"]
    path = tmp_path / "x_merged.pt"
    content = {"ids": ids, "data": data, "labels": [1]}
    torch.save(content, path, _use_new_zipfile_serialization=is_zip)
    with Embeddings(path) as opened:
        assert opened.ids == ids
        assert opened.datasets == ("vectors",)
        assert opened.vectors[[2, 0]].tolist() == data[[2, 0]].tolist()
        assert opened.scores is None
        table = opened.as_dataframe(vectors=True)
        assert table["contig"].tolist() == ["a", "a", "b"]
        assert table["chunk"].tolist() == [1, 1, 2]
        assert table.columns[3:5].tolist() == ["vectors_0", "vectors_1"]


def test_many_long_ids_are_no_attack(tmp_path: Path) -> None:
    path = tmp_path / "x_merged.pt"
    ids = [f"{i:0200d}_chunk_1F1" for i in range(20_000)]
    torch.save({"ids": ids, "data": torch.zeros(len(ids), 2)}, path)
    with Embeddings(path) as opened:
        assert opened.ids == ids


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"ids": ["a"], "data": torch.zeros(2, 4)}, "1 ids and 2 rows"),
        ({"ids": ["a"], "data": torch.zeros(1, 4).expand(1, 4).int()}, "data is no matrix"),
        ({"ids": [1], "data": torch.zeros(1, 4)}, "ids is no list of names"),
        ({"proteins": ["a"], "data": [torch.zeros(4)]}, "neither ids nor data"),
        (torch.zeros(3, 4), "neither ids nor data"),
        ({"ids": ["a"] * 4096, "data": torch.zeros(1, 4).expand(4096, 4)}, "more than it holds"),
    ],
)
def test_other_torch_files_are_refused(content: object, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x_merged.pt"
    torch.save(content, path)
    with pytest.raises((DamagedFileError, CheckpointError), match=message):
        Embeddings(path)


@pytest.mark.parametrize("name", sorted(malicious_files(Path("ran"))))
def test_no_code_runs_from_features(name: str, made_models: MadeModels, tmp_path: Path) -> None:
    marker, path = tmp_path / "ran", tmp_path / "evil_merged.pt"
    payload, _, container = name.rpartition(", ")
    path.write_bytes(CONTAINERS[container](payloads(marker)[payload]))
    with pytest.raises((CheckpointError, DamagedFileError), match=r"evil_merged\.pt"):
        scores_of(path, made_models.head, tmp_path)
    assert not marker.exists()


def _object_array(ids: list[str]) -> Any:
    values = np.empty(len(ids), object)
    values[:] = ids
    return values


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"ids": _object_array(["a", "b"]), "vectors": np.zeros((2, 3))}, "ids.npy holds Python objects"),
        ({"ids": ["a"], "vectors": np.zeros((2, 3))}, "another form"),
        ({"ids": ["a", "b"], "vectors": np.zeros(2)}, "another form"),
        ({"ids": ["a", "b"], "vectors": np.zeros((2, 3), np.int64)}, "another form"),
        ({"ids": [1, 2], "vectors": np.zeros((2, 3))}, "another form"),
        ({"vectors": np.zeros((2, 3))}, "no ids"),
        ({"ids": ["a", "b"], "X": np.zeros((2, 3))}, "no vectors"),
        ({"ids": ["a"], "vectors": np.zeros((1, 3)), "attributes": np.array("[")}, "cannot be read"),
    ],
)
def test_other_archives_are_refused(arrays: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write_npz(tmp_path / "x.npz", **arrays)
    with pytest.raises(DamagedFileError, match=message):
        Embeddings(path)


def test_archives_that_are_damaged_or_lie(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "x.npz", ids=["a", "b"], vectors=np.ones((2, 300), np.float32))
    content = bytearray(path.read_bytes())
    at = content.index(np.ones(8, np.float32).tobytes())
    content[at] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedFileError, match="CRC"):
        Embeddings(path)
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "<f4", "fortran_order": False, "shape": (2, 1 << 40)}
    )
    with zipfile.ZipFile(path, "w") as archive:
        ids = io.BytesIO()
        np.lib.format.write_array(ids, np.array(["a", "b"]))
        archive.writestr("ids.npy", ids.getvalue())
        archive.writestr("vectors.npy", header.getvalue())
    with pytest.raises(DamagedFileError, match="declares"):
        Embeddings(path)


def test_numbers_that_are_none(made_models: MadeModels, tmp_path: Path) -> None:
    vectors = np.zeros((3, 192), np.float32)
    vectors[1, 7] = np.nan
    path = write_npz(tmp_path / "x.npz", ids=["a", "b", "c"], vectors=vectors)
    with pytest.raises(DamagedFileError, match=r"row 1 .*not finite"):
        scores_of(path, made_models.head, tmp_path)
    assert not (tmp_path / "x.npz.tsv").exists()


def test_rows_without_protein_need_their_own_matrix(merged: Path, tmp_path: Path) -> None:
    head = CLASSIFIER / "pickled_module.pth"
    with pytest.raises(UsageError, match="--dna-head"):
        scores_of(merged, head, tmp_path, head)


def test_vectors_of_one_model_are_not_enough(made_models: MadeModels, tmp_path: Path) -> None:
    path = write_npz(tmp_path / "x.npz", ids=["a"], dna=np.zeros((1, 96), np.float32))
    with pytest.raises(UsageError, match="no protein vectors"):
        scores_of(path, made_models.head, tmp_path)
    path = write_npz(tmp_path / "y.npz", ids=["a"], embeddings=np.zeros((1, 96), np.float32))
    with pytest.raises(UsageError, match="no dna and no protein vectors"):
        scores_of(path, made_models.head, tmp_path)


@pytest.mark.filterwarnings("ignore")  # of NumPy, about headers
@pytest.mark.parametrize("suffix", ["h5", "npz", "packed.npz", "pt", "old.pt"])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.booleans(), at=st.floats(0, 1, exclude_max=True), value=st.integers(0, 255))
def test_altered_files_are_read_or_refused(
    suffix: str, cut: bool, at: float, value: int, tmp_path: Path
) -> None:
    path = tmp_path / f"x.{suffix}"
    ids, vectors = ["a_chunk_1F1", "b_chunk_1R1"], np.ones((2, 3), np.float32)
    if suffix == "h5":
        write_hdf5(path, {"frame_ids": ids, "vectors": vectors})
    elif suffix.endswith("npz"):
        write_npz(path, compressed="packed" in suffix, ids=ids, vectors=vectors)
    else:
        content = {"ids": ids, "data": torch.from_numpy(vectors)}
        torch.save(content, path, _use_new_zipfile_serialization="old" not in suffix)
    altered = bytearray(path.read_bytes())
    position = int(at * len(altered))
    altered[position] = value
    path.write_bytes(altered[:position] if cut else altered)
    with suppress(VirnucError), Embeddings(path) as opened:
        assert len(opened.ids) == len(opened.vectors[:])
