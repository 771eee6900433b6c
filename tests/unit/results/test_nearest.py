"""The index of training genomes, against a search one vector at a time."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from safetensors.numpy import load_file, save_file

from virnuc_core.errors import CheckpointError, MismatchError
from virnuc_core.results import nearest
from virnuc_core.results.nearest import (
    RANKS,
    UNKNOWN,
    GenomeIndex,
    Neighbours,
    choose_representatives,
    errors_by_novelty,
    fit_cuts,
    fit_unsure_above,
    load_index,
    quantise,
    save_index,
)

Float32 = npt.NDArray[np.float32]
# Few values, so that many vectors are equally similar.
VECTORS = arrays(
    np.float32, array_shapes(min_dims=2, max_dims=2, max_side=9), elements=st.sampled_from([-1, 0, 0.5, 1])
).map(lambda rows: np.concatenate((rows, np.ones((len(rows), 1), np.float32)), axis=1))


def unit(rows: npt.NDArray[np.float64]) -> Float32:
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def made_index(embeddings: Float32, labels: list[str] | None = None) -> GenomeIndex:
    labels = labels or [f"label {row}" for row in range(len(embeddings))]
    return GenomeIndex.build(embeddings, labels, dict.fromkeys(RANKS, labels), head="0123")


def families(seed: int, count: int, spread: float) -> tuple[Float32, list[str]]:
    """Ten members of each of so many families around random centres."""
    rng = np.random.default_rng(seed)
    centres = np.repeat(unit(rng.standard_normal((count, 64))), 10, axis=0)
    members = unit(centres + spread / 8 * rng.standard_normal(centres.shape))
    return members, [f"family {row // 10}" for row in range(len(members))]


@given(VECTORS, st.data())
def test_search_is_exact_and_takes_the_first_of_equal_ones(vectors: Float32, data: st.DataObject) -> None:
    queries = data.draw(
        arrays(np.float32, (3, vectors.shape[1]), elements=st.floats(0.125, 1, width=16)), "queries"
    )
    k = data.draw(st.integers(1, 12), "k")
    found = made_index(vectors).search(queries, k)
    codes, asked = quantise(vectors).astype(np.float64), quantise(queries).astype(np.float64)
    cosines = unit(asked).astype(np.float64) @ unit(codes).astype(np.float64).T
    for line, rows in enumerate(found.rows.tolist()):
        similarity = found.similarity[line].tolist()
        assert similarity == pytest.approx(cosines[line, rows], abs=1e-6)
        assert similarity == pytest.approx(np.sort(cosines[line])[::-1][:k], abs=1e-6)
        # Descending, and by row where equal.
        assert sorted(zip([-each for each in similarity], rows, strict=True)) == [
            (-each, row) for each, row in zip(similarity, rows, strict=True)
        ]
        # Of equal vectors, the first ones.
        for row in rows:
            earlier = np.flatnonzero((codes[:row] == codes[row]).all(1))
            assert set(earlier.tolist()) <= set(rows)


def test_blocks_and_rows_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    index = made_index(unit(rng.standard_normal((700, 64))))
    queries = unit(rng.standard_normal((150, 64)))
    found = index.search(queries, 5)
    monkeypatch.setattr(nearest, "_BLOCK_VALUES", 2000)
    again = index.search(queries, 5)
    alone = [index.search(queries[row : row + 1], 5) for row in range(len(queries))]
    assert (found.rows == again.rows).all()
    assert (found.similarity == again.similarity).all()
    assert (found.similarity == np.concatenate([each.similarity for each in alone])).all()


def test_quantised_cosines_are_close() -> None:
    rng = np.random.default_rng(2)
    vectors, queries = unit(rng.standard_normal((500, 64))), unit(rng.standard_normal((100, 64)))
    found = made_index(vectors).search(queries, 500)
    cosines = np.take_along_axis(queries @ vectors.T, found.rows, axis=1)
    assert np.abs(found.similarity - cosines).max() < 0.01
    assert np.sqrt(np.square(found.similarity - cosines).mean()) < 0.0015
    assert made_index(vectors).search(vectors).novelty.max() < 1e-6
    assert made_index(vectors).search(-vectors, 500).similarity.min() >= -1 - 1e-6


@pytest.mark.parametrize(
    ("queries", "k", "error"),
    [
        (np.ones((2, 3), np.float32), 1, MismatchError),
        (np.ones(4, np.float32), 1, MismatchError),
        (np.ones((2, 4), np.float32), 0, ValueError),
        (np.zeros((2, 4), np.float32), 1, ValueError),
        (np.full((2, 4), np.nan, np.float32), 1, ValueError),
        (np.full((2, 4), np.inf, np.float32), 1, ValueError),
    ],
)
def test_unusable_queries(queries: Float32, k: int, error: type[Exception]) -> None:
    with pytest.raises(error):
        made_index(np.ones((3, 4), np.float32)).search(queries, k)


def test_no_queries() -> None:
    found = made_index(np.ones((3, 4), np.float32)).search(np.empty((0, 4), np.float32), 2)
    assert found.rows.shape == found.similarity.shape == (0, 2)
    assert found.novelty.shape == (0,)


def test_a_file_gives_the_same_index(tmp_path: Path) -> None:
    members, labels = families(3, 4, 1.0)
    index = replace(made_index(members, [*labels[:-1], ""]), cuts=(0.25, None, 0.75), unsure_above=0.5)
    for name in ("a", "b"):
        save_index(index, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    loaded = load_index(tmp_path / "a", head="0123")
    assert (loaded.codes == index.codes).all()
    assert (loaded.cuts, loaded.head, loaded.unsure_above) == (index.cuts, index.head, 0.5)
    assert [loaded.lineage(row) for row in range(len(loaded))] == [index.lineage(row) for row in range(40)]
    assert [loaded.names[row] for row in range(40)] == [*labels[:-1], ""]
    with pytest.raises(MismatchError, match="another classifier head"):
        load_index(tmp_path / "a", head="4567")


def test_labels_may_all_be_unknown(tmp_path: Path) -> None:
    save_index(made_index(np.ones((2, 4), np.float32), ["", ""]), tmp_path / "index")
    loaded = load_index(tmp_path / "index")
    assert loaded.lineage(1) == dict.fromkeys(RANKS, "")


def test_every_changed_byte_is_found(tmp_path: Path) -> None:
    path = tmp_path / "index"
    index = replace(made_index(families(4, 2, 1.0)[0][:3, :4]), cuts=(0.25, None, 0.75), unsure_above=0.5)
    save_index(index, path)
    intact = path.read_bytes()
    for place in range(len(intact)):
        path.write_bytes(intact[:place] + bytes([intact[place] ^ 1]) + intact[place + 1 :])
        try:
            loaded = load_index(path, head="0123")
        except (CheckpointError, MismatchError):
            continue
        # A change that only concerns white space of the header.
        assert (loaded.codes == index.codes).all()
        assert (loaded.cuts, loaded.unsure_above) == (index.cuts, index.unsure_above)
    for size in (0, 4, 8, 100, len(intact) - 1):
        path.write_bytes(intact[:size])
        with pytest.raises(CheckpointError):
            load_index(path)
    with pytest.raises(CheckpointError):
        load_index(tmp_path / "missing")


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("vectors", np.zeros((3, 4), np.int8)),
        ("vectors", np.full((3, 4), -128, np.int8)),
        ("vectors", np.full((3, 4), 127, np.uint8)),
        ("vectors", np.full(3, 127, np.int8)),
        ("vectors", np.full((0, 4), 127, np.int8)),
        ("vectors", np.full((2, 4), 127, np.int8)),
        ("name.codes", np.array([0, 1, 3], np.int32)),
        ("name.codes", np.array([0, 1, -1], np.int32)),
        ("name.offsets", np.array([0, 9, 7, 21])),
        ("name.offsets", np.array([0, 7, 14, 99])),
        ("name.offsets", np.array([0])),
        ("name.data", np.full(21, 0xFF, np.uint8)),
        ("name.data", np.full(21, 9, np.uint8)),
        ("name.data", None),
    ],
)
def test_a_made_up_file_with_a_right_checksum(
    name: str, array: npt.NDArray[np.int8] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "index"
    monkeypatch.setattr(nearest, "_digest", lambda facts, tensors: "")
    save_index(made_index(np.ones((3, 4), np.float32)), path)
    tensors = load_file(path)
    header = path.read_bytes()
    tensors = {key: value for key, value in (tensors | {name: array}).items() if value is not None}
    with nearest.safe_open(path, framework="numpy") as file:
        metadata = file.metadata()
    save_file(tensors, path, metadata)
    assert path.read_bytes() != header
    with pytest.raises(CheckpointError, match="is not an index of genomes"):
        load_index(path)


@pytest.mark.parametrize(
    ("embeddings", "labels"),
    [
        (np.zeros((1, 4), np.float32), ["a"]),
        (np.ones((1, 4), np.float32), ["a", "b"]),
        (np.ones((1, 4), np.float32), ["a\tb"]),
        (np.ones((1, 4), np.float32), ["=1+1"]),
        (np.empty((0, 4), np.float32), []),
    ],
)
def test_what_no_index_is_built_from(embeddings: Float32, labels: list[str]) -> None:
    with pytest.raises(ValueError, match=r"zero|labels|printed"):
        GenomeIndex.build(embeddings, labels, dict.fromkeys(RANKS, labels), head="")


def test_limits_that_no_index_has_are_refused(tmp_path: Path) -> None:
    index = made_index(np.ones((3, 4), np.float32))
    for wrong in (
        {"cuts": (0.75, None, 0.25)},
        {"cuts": (0.5,)},
        {"unsure_above": 2.5},
        {"unsure_above": -1.0},
    ):
        save_index(replace(index, **wrong), tmp_path / "index")
        with pytest.raises(CheckpointError, match=r"its cuts are|its limit of novelty is"):
            load_index(tmp_path / "index")


def test_a_genome_is_named_as_far_as_its_lineage_is_supported() -> None:
    lineages = {"class": ["virus"] * 3, "family": ["x", "", "z"], "group": ["g", "h", ""]}
    index = GenomeIndex.build(np.eye(3, dtype=np.float32), ["a", "b", "c"], lineages, "")
    found = Neighbours(
        np.array([[0], [0], [0], [0], [1], [1], [2]]),
        np.array([0.95, 0.85, 0.6, 0.4, 0.99, 0.85, 0.99], np.float32)[:, None],
    )
    names, labels = replace(index, cuts=(0.5, 0.8, 0.9)).describe(found)
    assert names == ["a", "a", "a", UNKNOWN, "b", "b", "c"]
    assert labels == ["g", "x", "virus", None, "h", "virus", "z"]
    assert index.describe(found) == (["a"] * 4 + ["b", "b", "c"], [None] * 7)


NOVELTY = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.5]), min_size=1, max_size=30)


@given(NOVELTY, st.floats(0.05, 1))
def test_no_more_are_unsure_than_wanted(novelty: list[float], coverage: float) -> None:
    values = np.array(novelty, np.float32)
    limit = fit_unsure_above(values, coverage)
    assert limit in values
    tolerance = 1e-9 * len(values)
    assert (values > limit).sum() <= (1 - coverage) * len(values) + tolerance
    assert (values >= limit).sum() >= (1 - coverage) * len(values) - tolerance
    assert fit_unsure_above(values[:0]) is None


@given(NOVELTY, st.data())
def test_errors_by_novelty(novelty: list[float], data: st.DataObject) -> None:
    size = len(novelty)
    is_wrong = np.array(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    coverage = data.draw(st.sampled_from([0.1, 0.5, 0.8, 1.0]))
    values = np.array(novelty, np.float32)
    found = errors_by_novelty(values, is_wrong, coverage)
    order = data.draw(st.permutations(range(size)))
    assert errors_by_novelty(values[order], is_wrong[order], coverage) == pytest.approx(found, nan_ok=True)
    if not is_wrong.any():
        assert np.isnan(found)
        return
    # Each contig in tenths, so that whole numbers of them are covered; equally novel ones have the mean of their errors.
    mean = np.array([is_wrong[values == value].mean() for value in values])
    tenths = np.repeat(mean[np.argsort(values)], 10)[: round(coverage * size * 10)]
    assert found == pytest.approx(tenths.mean() / is_wrong.mean())


def test_errors_by_novelty_by_hand() -> None:
    novelty = np.arange(10, dtype=np.float32)
    is_wrong = np.isin(novelty, [3, 8, 9])
    # One of eight, and three of ten.
    assert errors_by_novelty(novelty, is_wrong) == pytest.approx((1 / 8) / (3 / 10))


def test_cuts_keep_their_precision_on_other_queries() -> None:
    """Half of the families are not in the index, so that the nearest genome of their members is always of another."""
    members, labels = families(5, 400, 0.9)
    known = np.arange(len(members)) % 10 < 5
    known[len(members) // 2 :] = False
    index = made_index(members[known], [label for label, is_in in zip(labels, known, strict=True) if is_in])
    rest = np.flatnonzero(~known)
    own, other = rest[::2], rest[1::2]
    precision = 0.95

    def lineages(rows: npt.NDArray[np.int64]) -> dict[str, list[str]]:
        return {rank: [labels[row] for row in rows] for rank in RANKS}

    fitted = fit_cuts(index, index.search(members[own]), lineages(own), precision)
    found = fitted.search(members[other])
    supported = fitted.supported_ranks(found) >= 0
    is_same = np.array(
        [index.names[row] == labels[at] for row, at in zip(found.rows[:, 0], other, strict=True)]
    )
    assert is_same[supported].mean() >= precision - 0.02
    assert supported[is_same].mean() > 0.7
    assert not supported.all()


def test_cuts_by_hand() -> None:
    """Forty queries: the 30 most similar ones are of the same class, the others are not, and no family is right."""
    index = GenomeIndex.build(
        np.eye(2, dtype=np.float32),
        ["a", "b"],
        {"class": ["x", ""], "family": ["y", ""], "group": ["", ""]},
        "",
    )
    similarity = np.linspace(0.99, 0.6, 40, dtype=np.float32)[:, None]
    neighbours = Neighbours(np.zeros((40, 1), np.int64), similarity)
    lineages = {"class": ["x"] * 30 + ["z"] * 10, "family": ["z"] * 40, "group": ["g"] * 40}
    fitted = fit_cuts(index, neighbours, lineages, 0.9)
    assert fitted.cuts == (pytest.approx(0.7), None, None)
    assert fitted.supported_ranks(neighbours).tolist() == [0] * 30 + [-1] * 10
    # The other vector has no labels.
    assert fitted.supported_ranks(replace(neighbours, rows=neighbours.rows + 1)).max() == -1
    # What supports a family supports its class.
    lineages = {"class": [""] * 40, "family": ["y"] * 40, "group": ["g"] * 40}
    fitted = fit_cuts(index, neighbours, lineages, 0.9)
    assert fitted.cuts == (pytest.approx(0.6), pytest.approx(0.6), None)
    assert (
        fit_cuts(
            index, Neighbours(neighbours.rows[:5], similarity[:5]), {rank: ["x"] * 5 for rank in RANKS}, 0.9
        ).cuts
        == (None,) * 3
    )


@given(VECTORS, st.integers(1, 4), st.data())
def test_representatives(vectors: Float32, most: int, data: st.DataObject) -> None:
    groups = np.array(data.draw(st.lists(st.integers(-2, 2), min_size=len(vectors), max_size=len(vectors))))
    chosen = choose_representatives(vectors, groups, most)
    assert chosen.tolist() == sorted(set(chosen.tolist()))
    for group in set(groups.tolist()):
        own = np.flatnonzero(groups == group)
        different = len(np.unique(quantise(vectors[own]), axis=0))
        assert np.isin(chosen, own).sum() <= min(most, different)
        assert np.isin(chosen, own).sum() >= min(most, 1)


def test_representatives_cover_their_group() -> None:
    members, labels = families(6, 6, 0.5)
    one_group = np.zeros(len(members), np.int64)
    chosen = choose_representatives(members, one_group, 6)
    assert {labels[row] for row in chosen} == set(labels)
    # All are within the tolerance of one of the six, so no seventh is chosen.
    assert len(choose_representatives(members, one_group, 60, tolerance=0.5)) == 6
    assert len(choose_representatives(members, one_group, 60)) == 60
    assert len(choose_representatives(np.ones((9, 4), np.float32), one_group[:9], 5)) == 1
    assert choose_representatives(np.empty((0, 4), np.float32), one_group[:0], 5).tolist() == []


def test_runs_without_torch() -> None:
    program = (
        "import sys, virnuc_core.results.nearest, virnuc_core.results.fdr; print('torch' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "False\n"
