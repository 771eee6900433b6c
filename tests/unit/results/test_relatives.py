"""Novelty, nearest genome and lineage in the tables of a run, and `search_run`, against the head and the index by hand."""

import csv
import json
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
import pytest

from tests.made_indexes import head_with_index, made_index
from tests.made_lanes import counters
from tests.made_models import (
    WIDTH,
    MadeModels,
    MadeRun,
    copy_of,
    make_contig_head,
    plan_run,
    write_contigs,
    write_results,
)
from virnuc_core import search
from virnuc_core.errors import CheckpointError, InputError, MismatchError, UsageError
from virnuc_core.inference.planning import open_plan
from virnuc_core.models.catalogue import index_path
from virnuc_core.models.contig_head import ContigHead, save_contig_head
from virnuc_core.models.heads import load_head
from virnuc_core.results import nearest, tables
from virnuc_core.results.contig_scores import genome_index_of, score_contigs
from virnuc_core.results.embeddings import Embeddings
from virnuc_core.results.integrity import check_run, inspect_path
from virnuc_core.results.nearest import LEAST_CHUNKS, UNKNOWN, quantise, save_index
from virnuc_core.results.run_json import RunReport
from virnuc_core.results.search import search_lines, search_run, write_search
from virnuc_core.results.tables import differing_tables, write_tables

LIMITS = {"cuts": (0.5, 0.9, 0.99), "unsure_above": 0.2}


@dataclass(frozen=True)
class IndexedRun:
    """A run, its head with an index, and the embeddings of its contigs, NaN without a score."""

    made: MadeRun
    head: Path
    embeddings: npt.NDArray[np.float32]


def embeddings_of(run: MadeRun, head: Path) -> npt.NDArray[np.float32]:
    loaded, store = load_head(head), run.store
    assert isinstance(loaded, ContigHead)
    with Embeddings(run.folder.embeddings, own=True) as file:
        codes = file.rows("codes", 0, len(file))
    scores = score_contigs(
        loaded, lambda a, b: codes[a:b], store.frame_chunk, store.chunk_record, store.num_records
    )
    return scores.embedding


def finish(run: MadeRun) -> None:
    """Tables and as much of run.json as a search wants."""
    run.compute()
    write_results(run)
    run.folder.report.write_text(json.dumps({"files": []}))


@pytest.fixture(scope="session")
def contigs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Most of them of several chunks, so that their nearest genomes are given."""
    return write_contigs(tmp_path_factory.mktemp("long") / "contigs.fa", lengths=(60, 300, 400, 600))


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory, contigs: Path, made_models: MadeModels) -> MadeRun:
    """A run of a head without an index."""
    config = made_models.config(head=str(made_models.longest_head))
    made = plan_run(tmp_path_factory.mktemp("bare"), contigs, config)
    finish(made)
    return made


@pytest.fixture(scope="module")
def indexed(
    tmp_path_factory: pytest.TempPathFactory, contigs: Path, made_models: MadeModels, bare: MadeRun
) -> IndexedRun:
    """The same run with an index of nine of its contigs, one of them turned around."""
    embeddings = embeddings_of(bare, made_models.longest_head)
    scored = np.flatnonzero(~np.isnan(embeddings[:, 0]))
    genomes = embeddings[scored[:9]] * np.where(np.arange(9) == 4, -1, 1)[:, None].astype(np.float32)
    spread = 1 - (embeddings[scored] @ genomes.T).max(1)
    limits = {**LIMITS, "cuts": cuts_for(spread), "unsure_above": float(np.median(spread))}
    head = head_with_index(made_models.longest_head, tmp_path_factory.mktemp("head"), genomes, **limits)
    made = plan_run(tmp_path_factory.mktemp("indexed"), contigs, made_models.config(head=str(head)))
    finish(made)
    return IndexedRun(made, head, embeddings)


def cuts_for(novelty: npt.NDArray[np.float32]) -> tuple[float, ...]:
    """So that all ranks, and none, are supported somewhere."""
    return tuple(float(1 - value) for value in np.quantile(novelty, (0.8, 0.5, 0.3)))


def read(path: Path) -> pd.DataFrame:
    return pd.read_csv(path, sep="\t", keep_default_na=False, quoting=csv.QUOTE_NONE)


def cosines(embeddings: npt.NDArray[np.float32], indexed: IndexedRun) -> npt.NDArray[np.float64]:
    index = genome_index_of(indexed.made.plan)
    assert index is not None
    asked, codes = quantise(embeddings).astype(float), index.codes.astype(float)
    return (asked @ codes.T) / np.linalg.norm(asked, axis=1)[:, None] / np.linalg.norm(codes, axis=1)


def test_each_contig_has_its_nearest_genome(indexed: IndexedRun, bare: MadeRun) -> None:
    found, without = (pd.read_parquet(run.folder.contigs_parquet) for run in (indexed.made, bare))
    index = genome_index_of(indexed.made.plan)
    assert index is not None
    assert index.unsure_above is not None
    assert list(found.columns[-5:]) == ["p_virus", "class", "novelty", "nearest", "lineage"]
    assert (found.call == without.call).all()
    seen = set()
    for row, contig in enumerate(found.itertuples()):
        if np.isnan(indexed.embeddings[row, 0]):
            assert contig.call == "unscored"
            assert found.loc[row, ["novelty", "nearest", "lineage"]].isna().all()
            continue
        similarity = cosines(indexed.embeddings[row : row + 1], indexed)[0]
        best = int(similarity.argmax())
        assert contig.novelty == pytest.approx(1 - similarity[best], abs=1e-6)
        labels = index.lineage(best)
        supported = [
            rank
            for rank, cut in zip(labels, index.cuts, strict=True)
            if labels[rank] and contig.novelty <= 1 - cut
        ]
        lineage = None if pd.isna(contig.lineage) else contig.lineage
        if contig.scored_chunks < LEAST_CHUNKS:
            assert pd.isna(contig.nearest)
            assert lineage is None
        else:
            assert contig.nearest == (f"genome {best}" if supported else UNKNOWN)
            assert lineage == (labels[supported[-1]] if supported else None)
        is_far = contig.novelty > index.unsure_above
        assert contig.tier == ("unsure" if is_far else without.tier[row])
        depth = len(supported) if contig.scored_chunks >= LEAST_CHUNKS else None
        seen.add((is_far, without.tier[row] != "unsure", depth))
    assert {(far, sure) for far, sure, _ in seen} == {(a, b) for a in (True, False) for b in (True, False)}
    assert {depth for _, _, depth in seen} >= {0, 1, 2}
    table = read(indexed.made.folder.contigs)
    assert table.novelty.tolist() == ["NA" if np.isnan(n) else f"{n:.6f}" for n in found.novelty]
    assert table.nearest.tolist() == found.nearest.fillna("NA").tolist()


def test_results_are_the_same_bytes_whatever_the_size_of_blocks(
    indexed: IndexedRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made, head = copy_of(indexed.made, tmp_path / "run"), load_head(indexed.head)
    assert isinstance(head, ContigHead)
    index = genome_index_of(made.plan)
    monkeypatch.setattr(nearest, "_BLOCK_VALUES", 300)
    assert differing_tables(made.folder, made.store, 0.5, head, index=index) == set()
    monkeypatch.setattr(tables, "_BLOCK_CHUNKS", 7)
    write_tables(made.folder, made.store, head=head, index=index)
    found, expected = (read(one.folder.contigs) for one in (made, indexed.made))
    columns = ["novelty", "nearest", "lineage", "tier", "class", "call"]
    pd.testing.assert_frame_equal(found[columns], expected[columns])


def test_a_run_without_an_index_says_so(
    bare: MadeRun, made_models: MadeModels, contigs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = read(bare.folder.contigs)
    assert set(found[["novelty", "nearest", "lineage"]].to_numpy().ravel()) == {"NA"}
    assert bare.plan.head is not None
    assert (bare.plan.head.index, genome_index_of(bare.plan)) == (None, None)
    with caplog.at_level(logging.INFO):
        plan_run(tmp_path / "run", contigs, made_models.config(head=str(made_models.longest_head)))
    assert "has no index of genomes (longest.index.safetensors)" in caplog.text
    with pytest.raises(UsageError, match=r"head longest.safetensors has no index of genomes: give --index"):
        search_run(bare.folder.root)


def test_the_report_says_that_columns_are_empty(bare: MadeRun, indexed: IndexedRun) -> None:
    notes = [
        RunReport(
            plan=run.plan, out="run", counts=None, work=counters(1), lanes=[], seconds={}, links={}
        ).notes
        for run in (bare, indexed.made)
    ]
    assert notes == [
        (
            "head longest.safetensors has no index of training genomes, so novelty, nearest and lineage are empty.",
        ),
        (),
    ]


def other_index(head: Path, embeddings: npt.NDArray[np.float32]) -> None:
    save_index(made_index(head, embeddings), index_path(head))


def test_an_index_that_has_changed_is_noticed(
    indexed: IndexedRun, made_models: MadeModels, tmp_path: Path
) -> None:
    made = copy_of(indexed.made, tmp_path / "run")
    config = made_models.config(head=str(indexed.head))
    path = index_path(indexed.head)
    intact = path.read_bytes()
    try:
        other_index(indexed.head, np.eye(3, 64, dtype=np.float32))
        with pytest.raises(MismatchError, match=r"index of head longest.safetensors .* has changed since"):
            genome_index_of(made.plan)
        message = rf"head\.index: was {made.plan.head.index[:12]}, now [0-9a-f]{{12}}\n"
        with pytest.raises(MismatchError, match=message):
            open_plan(config, made.store, "predict", ("cpu",), made.folder)
        problems = [one.message for one in check_run(made.folder, thorough=True) if one.is_bad]
        assert any("tables cannot be compared with the shards: the index of head" in one for one in problems)
        path.unlink()
        with pytest.raises(CheckpointError, match="is not there any more: put it back"):
            genome_index_of(made.plan)
        with pytest.raises(MismatchError, match=f"was {made.plan.head.index[:12]}, now none"):
            open_plan(config, made.store, "predict", ("cpu",), made.folder)
    finally:
        path.write_bytes(intact)
    assert genome_index_of(made.plan) is not None


def test_an_index_of_another_head_is_refused(
    indexed: IndexedRun, contigs: Path, made_models: MadeModels, tmp_path: Path
) -> None:
    head = tmp_path / "head.safetensors"
    save_contig_head(make_contig_head(WIDTH, WIDTH, seed=1), head, {})
    shutil.copyfile(index_path(indexed.head), index_path(head))
    made = plan_run(tmp_path / "run", contigs, made_models.config(head=str(head)))
    with pytest.raises(MismatchError, match="another classifier head"):
        genome_index_of(made.plan)


def test_changed_columns_are_found(indexed: IndexedRun, tmp_path: Path) -> None:
    made = copy_of(indexed.made, tmp_path / "run")
    text = made.folder.contigs.read_text()
    made.folder.contigs.write_text(text.replace("\tgenome ", "\tgenus ", 1))
    found = [one.message for one in check_run(made.folder, thorough=True) if one.is_bad]
    assert any(f"{made.folder.contigs} is not what the shards give" in message for message in found)


def test_an_index_can_be_inspected(indexed: IndexedRun) -> None:
    found = inspect_path(index_path(indexed.head))
    assert (found.kind, found.is_complete) == ("index of genomes", True)
    assert dict(found.facts)["pieces"] == "9 of 9 genomes"


def test_the_first_that_a_search_finds_is_that_of_the_table(indexed: IndexedRun, tmp_path: Path) -> None:
    found = search(indexed.made.folder.root, top=4)
    contigs = pd.read_parquet(indexed.made.folder.contigs_parquet)
    scored = contigs[contigs.call != "unscored"]
    assert found.contig.tolist() == np.repeat(scored.contig, 4).tolist()
    assert found["rank"].tolist() == [1, 2, 3, 4] * len(scored)
    first = found[found["rank"] == 1]
    assert (1 - first.similarity.to_numpy()) == pytest.approx(scored.novelty.to_numpy(), abs=1e-7)
    named = (scored.nearest.notna() & (scored.nearest != UNKNOWN)).to_numpy()
    assert first.name.to_numpy()[named].tolist() == scored.nearest[named].tolist()
    similarity = cosines(indexed.embeddings[scored.index], indexed)
    assert found.similarity.to_numpy().reshape(-1, 4) == pytest.approx(-np.sort(-similarity)[:, :4], abs=1e-6)
    index = genome_index_of(indexed.made.plan)
    assert index is not None
    for line in found.itertuples():
        labels = index.lineage(int(line.name.split()[1]))
        found_labels = ["" if pd.isna(value) else value for value in line[5:]]
        assert found_labels == list(labels.values())

    table = search_run(indexed.made.folder.root, top=99)
    assert len(table) == 9 * len(scored)
    write_search(table, tmp_path / "out.tsv")
    assert (tmp_path / "out.tsv").read_bytes() == search_lines(table)
    written = read(tmp_path / "out.tsv")
    assert list(written.columns) == ["contig", "rank", "name", "similarity", "class", "family", "group"]
    assert written.similarity.tolist() == [round(value, 6) for value in table["similarity"].to_pylist()]


def test_a_search_in_another_run_finds_its_contigs(indexed: IndexedRun, bare: MadeRun) -> None:
    found = search(bare.folder.root, index=indexed.made.folder.root, top=1)
    assert found.similarity.min() > 1 - 1e-6
    same = (found.contig == found.name).mean()
    assert same > 0.8, "contigs with equal embeddings apart"
    assert found["class"].isna().all()


def test_what_cannot_be_searched(
    indexed: IndexedRun,
    bare: MadeRun,
    finished_run: MadeRun,
    made_models: MadeModels,
    contigs: Path,
    tmp_path: Path,
) -> None:
    root, index = bare.folder.root, index_path(indexed.head)
    opened = copy_of(finished_run, tmp_path / "open")
    opened.folder.report.write_text(json.dumps({"files": []}))
    head = tmp_path / "head.safetensors"
    save_contig_head(make_contig_head(WIDTH, WIDTH, seed=1), head, {})
    of_other_head = plan_run(tmp_path / "other", contigs, made_models.config(head=str(head)))
    finish(of_other_head)
    with pytest.raises(MismatchError, match=r"only predict runs with a head for the longest stop-free"):
        search_run(opened.folder.root, index)
    with pytest.raises(MismatchError, match="a run of another head than the contigs to look up"):
        search_run(root, of_other_head.folder.root)
    with pytest.raises(MismatchError, match="another classifier head"):
        search_run(of_other_head.folder.root, index)
    with pytest.raises(CheckpointError, match="is not an index of genomes"):
        search_run(root, indexed.head)
    with pytest.raises(CheckpointError, match="is not an index of genomes"):
        search_run(root, tmp_path / "none")
    with pytest.raises(InputError, match=r"holds no finished run: it has no run\.json"):
        search_run(tmp_path)
    with pytest.raises(UsageError, match="top is 0"):
        search(root, index=index, top=0)
    mixed = copy_of(bare, tmp_path / "mixed")
    shutil.copyfile(of_other_head.folder.embeddings, mixed.folder.embeddings)
    with pytest.raises(MismatchError, match="is not of the plan beside it"):
        search_run(mixed.folder.root, index)


def test_without_contigs_there_is_nothing_to_search_in(
    bare: MadeRun, made_models: MadeModels, tmp_path: Path
) -> None:
    fasta = tmp_path / "in.fa"
    fasta.write_text(">a\nTAATTAGTTAATTAGTTAATAATTAGTTAATTAGTTAA\n")
    empty = plan_run(tmp_path / "run", fasta, made_models.config(head=str(made_models.longest_head)))
    finish(empty)
    assert len(search_run(empty.folder.root, bare.folder.root)) == 0
    with pytest.raises(InputError, match="has a score: there is nothing to search in"):
        search_run(bare.folder.root, empty.folder.root)
