"""Embeddings files: opened and scored again, also those of other programs and hostile ones."""

import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import h5py
import hypothesis.strategies as st
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from tests.made_models import MadeModels, MadeRun, make_head, plan_run
from tests.made_pickles import CONTAINERS, payloads
from virnuc_core.checked_hdf5 import array_sha256, read_attributes, write_attributes
from virnuc_core.errors import (
    CheckpointError,
    DamagedFileError,
    InputError,
    MismatchError,
    UsageError,
    VirnucError,
)
from virnuc_core.inference.shard import read_shard, shard_identity
from virnuc_core.models.heads import MLPClassifier, save_head
from virnuc_core.results.aggregate import aggregate
from virnuc_core.results.embeddings import Embeddings
from virnuc_core.results.rescore import score_embeddings
from virnuc_core.specs import FRAMES_IN_WORDS

NO_CHECKSUMS = "has no virnuc checksums"


@pytest.fixture(scope="module")
def path(finished_run: MadeRun) -> Path:
    return finished_run.folder.embeddings


@pytest.fixture
def opened(path: Path) -> Iterator[Embeddings]:
    with Embeddings(path) as embeddings:
        yield embeddings


@pytest.fixture(scope="module")
def arrays(path: Path) -> dict[str, Any]:
    with h5py.File(path) as file:
        return {name: dataset[:] for name, dataset in file.items()}


def require_same(found: Embeddings, expected: Embeddings) -> None:
    assert found.ids == expected.ids
    assert np.array_equal(found.vectors[:], expected.vectors[:])


def write_hdf5(path: Path, arrays: Mapping[str, Any], attributes: Mapping[str, Any] | None = None) -> Path:
    with h5py.File(path, "w") as file:
        for name, values in arrays.items():
            file[name] = values
        file.attrs.update(attributes or {})
    return path


def test_ids_scores_and_vectors_are_those_of_the_file(
    opened: Embeddings, arrays: dict[str, Any], finished_run: MadeRun
) -> None:
    store = finished_run.store
    assert opened.ids == store.frame_ids(0, store.num_frames)
    assert np.array_equal(opened.scores, arrays["scores"])
    assert opened.datasets == ("dna", "protein")
    assert opened.vectors.shape == (len(opened), 192)
    assert np.array_equal(np.asarray(opened.vectors), np.hstack([arrays["dna"], arrays["protein"]]))
    assert np.array_equal(opened.matrix("protein")[:], arrays["protein"])
    with pytest.raises(UsageError, match="only dna and protein"):
        opened.matrix("embeddings")
    table = opened.as_dataframe(vectors=True)
    assert table.index.tolist() == opened.ids
    rebuilt = table["contig"] + "_chunk_" + table["chunk"].astype(str) + table["frame"]
    assert rebuilt.tolist() == opened.ids
    assert table["p_virus"].tolist() == arrays["scores"][:, 1].tolist()
    assert table.columns[5:7].tolist() == ["dna_0", "dna_1"]
    assert table["protein_95"].iloc[4] == arrays["protein"][4][95]


def test_rows_are_chosen_as_in_numpy(opened: Embeddings) -> None:
    rows, expected = opened.vectors, np.asarray(opened.vectors)
    count = len(rows)
    mask = np.arange(count) % 3 == 1
    for key in (0, -1, slice(2, 5), slice(None, None, -4), slice(7, 3), [3, 1, 3], [-1], mask):
        assert np.array_equal(rows[key], expected[key])
    assert rows[[]].shape == (0, 192)
    for wrong in (count, [count], mask[1:], [0.5], [[1]]):
        with pytest.raises(IndexError):
            rows[wrong]  # type: ignore[index]


def test_a_file_without_vectors_still_has_scores(
    tmp_path: Path, contigs: Path, made_models: MadeModels
) -> None:
    run = plan_run(tmp_path, contigs, made_models.config(embeddings="none"))
    run.compute()
    aggregate(run.folder, run.plan, run.store)
    with Embeddings(run.folder.embeddings) as opened:
        assert opened.names == ("frame_ids", "scores")
        assert len(opened.as_dataframe()) == run.store.num_frames
        with pytest.raises(UsageError, match="only scores"):
            _ = opened.vectors


def test_files_of_other_kinds_are_called_by_their_name(
    path: Path, finished_run: MadeRun, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"none\.h5 does not exist: give the embeddings\.h5"):
        Embeddings(tmp_path / "none.h5")
    with pytest.raises(InputError, match="is a folder"):
        Embeddings(tmp_path)
    (tmp_path / "text.h5").write_text("text")
    (tmp_path / "cut.h5").write_bytes(path.read_bytes()[:-1])
    kinds = {
        finished_run.folder.shard(0): "shard",
        write_hdf5(tmp_path / "foreign.h5", {"dna": [1.0]}): "HDF5 file not written by virnuc",
        tmp_path / "text.h5": "neither an HDF5 nor a torch file",
        tmp_path / "cut.h5": "damaged HDF5 file",
    }
    for other, kind in kinds.items():
        with pytest.raises(
            DamagedFileError, match=f"{other} is a {kind}, not a complete embeddings file: give the "
        ):
            Embeddings(other)


def test_files_of_other_programs_open_with_a_warning(
    opened: Embeddings, arrays: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert NO_CHECKSUMS not in caplog.text
    described = {name: value for name, value in opened.attrs.items() if not name.endswith("_sha256")}
    ids, dna, protein = opened.ids, arrays["dna"], arrays["protein"]
    both = np.hstack([dna, protein])
    files = [
        write_hdf5(tmp_path / "described.h5", arrays, described),
        write_hdf5(tmp_path / "own.h5", arrays, {"author": "somebody", "versions": [1, 2]}),
        write_hdf5(tmp_path / "text.h5", {**arrays, "frame_ids": ids}),
        write_hdf5(tmp_path / "renamed.h5", {"ids": arrays["frame_ids"], "dna": dna, "protein": protein}),
        write_hdf5(tmp_path / "more.h5", {**arrays, "labels": np.arange(3)}),
    ]
    for number, vectors in enumerate((both, both.astype(np.float64))):
        files.append(write_hdf5(tmp_path / f"both_{number}.h5", {"ids": ids, "vectors": vectors}))
    for path in files:
        caplog.clear()
        with Embeddings(path) as found:
            require_same(found, opened)
        [record] = [record for record in caplog.records if NO_CHECKSUMS in record.getMessage()]
        assert record.levelname == "WARNING"
        assert str(path) in record.getMessage()


def test_a_wrong_checksum_stays_damage(
    path: Path, opened: Embeddings, arrays: dict[str, Any], tmp_path: Path
) -> None:
    copy, attributes = tmp_path / "copy.h5", dict(h5py.File(path).attrs)
    with Embeddings(write_hdf5(copy, arrays, attributes)) as found:
        require_same(found, opened)
    without = {name: value for name, value in attributes.items() if name != "attributes_sha256"}
    for values, described in (
        (arrays, {**attributes, "dtype": "float16"}),
        (arrays, {**attributes, "attributes_sha256": "0" * 64}),
        (arrays, without),
        ({**arrays, "dna": arrays["dna"] + 1}, attributes),
    ):
        with pytest.raises(DamagedFileError, match="checksum"):
            Embeddings(write_hdf5(copy, values, described))


def test_no_flipped_byte_changes_a_value(path: Path, tmp_path: Path) -> None:
    def read(path: Path) -> tuple[dict[str, list[object]], dict[str, object]]:
        with Embeddings(path, own=True) as file:
            return {name: file.rows(name, 0, len(file)).tolist() for name in file.names}, dict(file.attrs)

    content, expected = path.read_bytes(), read(path)
    for position in np.random.default_rng(2).choice(len(content), 100, replace=False).tolist():
        flipped = bytearray(content)
        flipped[position] ^= 0x12
        (tmp_path / "flipped.h5").write_bytes(flipped)
        with suppress(DamagedFileError):
            assert read(tmp_path / "flipped.h5") == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("is_zip", [True, False])
def test_features_of_virnucpro_open(dtype: torch.dtype, is_zip: bool, tmp_path: Path) -> None:
    path, count = tmp_path / "x_merged.pt", 20_000
    data = torch.arange(2 * count).reshape(count, 2).to(dtype)
    ids = [f"{i:0200d}_chunk_{i + 1}F1" for i in range(count)]  # many long ids are no attack
    torch.save({"ids": ids, "data": data, "labels": [1]}, path, _use_new_zipfile_serialization=is_zip)
    with Embeddings(path) as found:
        assert found.ids == ids
        assert found.datasets == ("vectors",)
        assert found.vectors[[2, 0]].tolist() == data[[2, 0]].tolist()
        assert found.scores is None
        table = found.as_dataframe(vectors=True)
        assert table["contig"].tolist() == [name[:200] for name in ids]
        assert table.columns[3:5].tolist() == ["vectors_0", "vectors_1"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"ids": ["a"], "data": torch.zeros(2, 4)}, "1 ids but 2 rows"),
        ({"ids": ["a"], "data": torch.zeros(1, 4).expand(1, 4).int()}, "data is not a numeric matrix"),
        ({"ids": [1], "data": torch.zeros(1, 4)}, "ids is not a list of names"),
        ({"proteins": ["a"], "data": [torch.zeros(4)]}, "neither ids nor data"),
        (torch.zeros(3, 4), "neither ids nor data"),
        ({"ids": ["a"] * 4096, "data": torch.zeros(1, 4).expand(4096, 4)}, "more than it contains"),
    ],
)
def test_other_torch_files_are_refused(content: object, message: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "x_merged.pt")
    with pytest.raises((DamagedFileError, CheckpointError), match=message):
        Embeddings(tmp_path / "x_merged.pt")


@pytest.mark.parametrize("container", CONTAINERS)
def test_no_code_runs_from_features(container: str, tmp_path: Path) -> None:
    marker, path = tmp_path / "ran", tmp_path / "evil_merged.pt"
    for payload in payloads(marker).values():
        path.write_bytes(CONTAINERS[container](payload))
        with pytest.raises((CheckpointError, DamagedFileError), match=r"evil_merged\.pt"):
            Embeddings(path)
    assert not marker.exists()


@pytest.mark.parametrize("suffix", ["h5", "pt", "old.pt"])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.booleans(), at=st.floats(0, 1, exclude_max=True), value=st.integers(0, 255))
def test_altered_files_are_read_or_refused(
    suffix: str, cut: bool, at: float, value: int, tmp_path: Path
) -> None:
    path = tmp_path / f"x.{suffix}"
    ids, vectors = ["a_chunk_1F1", "b_chunk_1R1"], np.ones((2, 3), np.float32)
    if suffix == "h5":
        write_hdf5(path, {"frame_ids": ids, "vectors": vectors})
    else:
        content = {"ids": ids, "data": torch.from_numpy(vectors)}
        torch.save(content, path, _use_new_zipfile_serialization="old" not in suffix)
    altered = bytearray(path.read_bytes())
    position = int(at * len(altered))
    altered[position] = value
    path.write_bytes(altered[:position] if cut else altered)
    with suppress(VirnucError), Embeddings(path) as opened:
        assert len(opened.ids) == len(opened.vectors[:])


def virtual(file: h5py.File, shape: tuple[int, ...]) -> None:
    layout = h5py.VirtualLayout(shape, np.float32)
    layout[:] = h5py.VirtualSource("other.h5", "dna", shape)
    file.create_virtual_dataset("dna", layout)


ELSEWHERE = [("/etc/passwd", 0, h5py.h5f.UNLIMITED)]
# Replaces the DNA vectors of shape (n, 96).
REPLACEMENTS: dict[str, Callable[[h5py.File, tuple[int, ...]], object]] = {
    "external link": lambda file, _: file.__setitem__("dna", h5py.ExternalLink("/etc/passwd", "/dna")),
    "soft link": lambda file, _: file.__setitem__("dna", h5py.SoftLink("/protein")),
    "external storage": lambda file, shape: file.create_dataset("dna", shape, "f4", external=ELSEWHERE),
    "virtual": virtual,
    "text": lambda file, shape: file.create_dataset("dna", shape, h5py.string_dtype()),
    "other rows": lambda file, shape: file.create_dataset("dna", data=np.zeros((shape[0] + 1, 96), "f4")),
    "nothing behind it": lambda file, shape: file.create_dataset("dna", shape, "f4", chunks=shape),
}


def edited(path: Path, edit: Callable[[h5py.File], object]) -> bytes:
    """The changed file with a valid checksum over its attributes."""
    buffer = io.BytesIO(path.read_bytes())
    with h5py.File(buffer, "r+", libver=("v110", "v110")) as file:
        attributes = read_attributes(file)
        edit(file)
        attributes |= {name: file.attrs[name] for name in attributes if name.endswith("_sha256")}
        write_attributes(file, attributes)
    return buffer.getvalue()


@pytest.mark.parametrize("name", REPLACEMENTS)
def test_datasets_of_another_form_are_damage(
    name: str, path: Path, finished_run: MadeRun, tmp_path: Path
) -> None:
    def replace(file: h5py.File) -> None:
        shape = file["dna"].shape
        del file["dna"]
        REPLACEMENTS[name](file, shape)

    shard, file = finished_run.plan.shards[0], tmp_path / "file.h5"
    file.write_bytes(edited(finished_run.folder.shard(shard.index), replace))
    with pytest.raises(DamagedFileError, match="is corrupt"):
        read_shard(file, shard_identity(finished_run.plan, shard))
    file.write_bytes(edited(path, replace))
    with pytest.raises(DamagedFileError, match="cannot be read"):
        Embeddings(file)


def test_a_file_without_names_is_damaged(path: Path, tmp_path: Path) -> None:
    file = tmp_path / "file.h5"
    file.write_bytes(edited(path, lambda file: file.__delitem__("frame_ids")))
    for own in (True, False):
        with pytest.raises(DamagedFileError, match="has no frame_ids"):
            Embeddings(file, own=own)


def test_the_same_head_gives_the_same_scores_and_one_for_other_frames_none(
    each_run: MadeRun, made_models: MadeModels, tmp_path: Path
) -> None:
    out, path = tmp_path / "scores.tsv", each_run.folder.embeddings
    assert each_run.plan.head is not None
    own, heads = each_run.plan.head.location, (made_models.head, made_models.longest_head)
    assert score_embeddings(path, own, out) == each_run.store.num_frames
    old, new = (
        pd.read_csv(file, sep="\t", index_col=0) for file in (each_run.folder.prediction_results, out)
    )
    pd.testing.assert_frame_equal(old, new, atol=1e-6)
    [other] = [head for head in heads if str(head) != own]
    words = FRAMES_IN_WORDS[each_run.plan.frames]
    with pytest.raises(MismatchError, match=f"of chunks, but these embeddings are of their {words}"):
        score_embeddings(path, str(other), out)
    pd.testing.assert_frame_equal(pd.read_csv(out, sep="\t", index_col=0), new)


def test_hostile_ids_cannot_tear_the_table_of_scores(
    path: Path, made_models: MadeModels, tmp_path: Path
) -> None:
    def rename(file: h5py.File) -> None:
        ids = np.full(len(file["frame_ids"]), b"=1\t1\n\x1b[2J")
        del file["frame_ids"]
        file["frame_ids"] = ids
        file.attrs["frame_ids_sha256"] = array_sha256(ids)

    hostile, table = tmp_path / "embeddings.h5", tmp_path / "scores.tsv"
    hostile.write_bytes(edited(path, rename))
    rows = score_embeddings(hostile, str(made_models.head), table)
    lines = table.read_text().splitlines()
    assert len(lines) == rows + 1
    assert {line.split("\t")[0] for line in lines[1:]} == {"%3D1%091%0A%1B[2J"}


def test_heads_that_do_not_fit(path: Path, tmp_path: Path) -> None:
    save_head(MLPClassifier(192), tmp_path / "300.safetensors", {"chunk_length": 300})
    make_head(tmp_path / "wide.safetensors", 100)
    for head, error, message in (
        ("wide.safetensors", MismatchError, "100"),
        ("nowhere", CheckpointError, "nowhere"),
        ("300.safetensors", MismatchError, "on chunks of 300 bp, but these have 60 bp"),
    ):
        with pytest.raises(error, match=message):
            score_embeddings(path, str(tmp_path / head), tmp_path / "scores.tsv")
    assert not (tmp_path / "scores.tsv").exists()


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        ({"dna": np.zeros((1, 96), np.float32)}, UsageError, "no protein embeddings"),
        ({"embeddings": np.zeros((1, 96), np.float32)}, UsageError, "no dna and no protein embeddings"),
        ({"vectors": np.full((1, 192), np.nan)}, DamagedFileError, r"row 0 .*non-finite"),
        (
            {"vectors": np.zeros((1, 192), np.float32), "frames": "longest"},
            MismatchError,
            "these embeddings are of their longest ORFs",
        ),
        (
            {"vectors": np.zeros((1, 192), np.float32), "frames": "all"},
            DamagedFileError,
            "'frames' is 'all', not open or longest",
        ),
    ],
)
def test_vectors_that_cannot_be_scored(
    content: dict[str, Any], error: type[Exception], message: str, made_models: MadeModels, tmp_path: Path
) -> None:
    attributes = {name: value for name, value in content.items() if name == "frames"}
    arrays = {name: value for name, value in content.items() if name != "frames"}
    path = write_hdf5(tmp_path / "x.h5", {"ids": ["a"], **arrays}, attributes)
    with pytest.raises(error, match=message):
        score_embeddings(path, str(made_models.head), tmp_path / "scores.tsv")
    assert not (tmp_path / "scores.tsv").exists()
