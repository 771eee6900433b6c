"""The tables of a run, against a row-by-row computation with pandas."""

import csv
import gzip
import io
import os
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from Bio import SeqIO

from tests.made_hostile import HOSTILE_NAMES
from tests.made_models import NO_OPEN_FRAME, MadeModels, MadeRun, copy_of, plan_run
from tests.made_reports import slow_lines
from virnuc_core.errors import DamagedFileError, MismatchError
from virnuc_core.inference import CPU_LIBRARIES
from virnuc_core.models.heads import ContigHead, load_head
from virnuc_core.results.aggregate import aggregate
from virnuc_core.results.embeddings import Embeddings
from virnuc_core.results.fdr import call_sample
from virnuc_core.results.regions import ChunkScores, find_regions
from virnuc_core.results.tables import (
    contig_schema,
    frame_lines,
    prediction_schema,
    rows_of,
    write_tables,
)
from virnuc_core.run_folder import RunFolder
from virnuc_core.specs import FRAME_KINDS, FrameRule


def read(path: Path) -> pd.DataFrame:
    return pd.read_csv(path, sep="\t", keep_default_na=False)


def all_tables(folder: RunFolder) -> dict[str, bytes]:
    written = (path for path in folder.results if path not in folder.timed)
    return {path.name: path.read_bytes() for path in written}


def records_of(path: Path) -> dict[str, str]:
    with gzip.open(path, "rt") as file:
        return {record.description: str(record.seq) for record in SeqIO.parse(file, "fasta")}


def test_scores_of_frames_have_the_digits_of_virnucpro() -> None:
    scores = np.array([[0.9517528, 0.04824718], [1e-8, 1], [0.5, 0.5]], np.float32)
    lines = b"a\tothers\t0.9517528\t0.04824718\nb\tvirus\t1e-08\t1.0\nc\tothers\t0.5\t0.5\n"
    assert frame_lines(pa.array(["a", "b", "c"]), scores) == lines


def test_the_frames_of_virnucpro(each_run: MadeRun) -> None:
    frames, store = read(each_run.folder.prediction_results), each_run.store
    assert list(frames.columns) == ["Sequence_ID", "Prediction", "score1", "score2"]
    assert frames.Sequence_ID.tolist() == store.frame_ids(0, store.num_frames)
    with Embeddings(each_run.folder.embeddings, own=True) as file:
        scores = file.rows("scores", 0, len(file))
    np.testing.assert_array_equal(frames[["score1", "score2"]].to_numpy(np.float32), scores)
    assert frames.Prediction.tolist() == np.where(scores[:, 1] > scores[:, 0], "virus", "others").tolist()


def test_the_chunks_of_virnucpro(finished_run: MadeRun) -> None:
    frames = read(finished_run.folder.prediction_results)
    frames["Modified_ID"] = frames["Sequence_ID"].str[:-2]
    highest = frames.groupby("Modified_ID")[["score1", "score2"]].max()
    expected = io.StringIO()
    calls = (highest.score2 >= highest.score1).rename("Is_Virus").reset_index()
    calls.to_csv(expected, sep="\t", index=False)
    assert finished_run.folder.highest_score.read_text() == expected.getvalue()


def test_every_chunk_and_contig_has_its_row(each_run: MadeRun, contigs: Path) -> None:
    store, folder, frames = each_run.store, each_run.folder, each_run.store.meta.frames
    table, parquet = read(folder.predictions), pd.read_parquet(folder.predictions_parquet)
    assert list(table.columns) == prediction_schema(frames).names
    ids = table.contig + "_chunk_" + table.chunk.astype(str)
    assert ids.tolist() == store.chunk_id_column(0, store.num_chunks).to_pylist()
    assert (table.start - 1).tolist() == store.chunk_start.tolist()
    assert table.end.tolist() == store.chunk_end.tolist()
    is_scored = np.isin(np.arange(store.num_chunks), store.frame_chunk)
    assert (table.status == np.where(is_scored, "scored", FRAME_KINDS[frames].missing)).all()
    assert (table.call[is_scored] == np.where(parquet.p_virus[is_scored] >= 0.5, "virus", "other")).all()
    assert set(table.call) == {"virus", "other", "unscored"}
    assert set((ids + table.best_frame)[is_scored]) <= set(read(folder.prediction_results).Sequence_ID)
    assert set(table.p_virus[~is_scored]) == set(table.best_frame[~is_scored]) == {"NA"}

    found = pd.read_parquet(folder.contigs_parquet)
    assert list(found.columns) == contig_schema(frames).names
    assert found.record.tolist() == list(range(1, 41))
    assert found.contig.tolist() == store.record_names(0, 40)
    for contig in found.itertuples():
        own = parquet[parquet.contig == contig.contig]
        p_virus, viral = own.p_virus.dropna(), (own.call == "virus").sum()
        assert (contig.chunks, contig.scored_chunks, contig.viral_chunks) == (len(own), len(p_virus), viral)
        if len(p_virus):
            assert contig.mean_p == pytest.approx(p_virus.mean())
            assert contig.share_viral == pytest.approx(viral / len(p_virus))
            assert contig.call == (
                "virus" if getattr(contig, FRAME_KINDS[frames].call_column) >= 0.5 else "other"
            )
        else:
            assert contig.call == "unscored"
            assert pd.isna([contig.mean_p, contig.tier, contig.share_viral]).all()
    with contigs.open() as file:
        bases = [str(record.seq) for record in SeqIO.parse(file, "fasta")]
    viral = {row.contig: bases[row.record - 1] for row in found[found.call == "virus"].itertuples()}
    assert records_of(folder.viral_contigs) == viral
    assert 0 < len(viral) < (found.scored_chunks > 0).sum()
    if frames == "open":  # of the longest stretches from other scores, see below
        assert regions_from(each_run, parquet.p_virus.to_numpy()) == places_of(folder)


def regions_from(run: MadeRun, p_virus: npt.NDArray[np.float64]) -> list[tuple[object, ...]]:
    """Contig, start, end and chunks of the regions that scores of chunks give."""
    store = run.store
    scores = ChunkScores(
        contig=store.chunk_record, start=store.chunk_start, end=store.chunk_end, p_virus=p_virus
    )
    names = store.record_names(0, store.num_records)
    found = [(names[r.contig], r.start + 1, r.end, r.chunks) for r in find_regions(scores)]
    assert len(found) > 3
    return found


def places_of(folder: RunFolder) -> list[tuple[object, ...]]:
    columns = pd.read_parquet(folder.regions_parquet)[["contig", "start", "end", "chunks"]]
    return list(columns.itertuples(index=False, name=None))


def test_threads_change_nothing_and_blocks_at_most_the_last_digits(each_run: MadeRun, tmp_path: Path) -> None:
    before, made = all_tables(each_run.folder), copy_of(each_run, tmp_path / "run")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        write_tables(made.folder, made.store, made.head)
    finally:
        torch.set_num_threads(threads)
    assert all_tables(made.folder) == before
    for size in (1, 7, 1000):
        counts = write_tables(made.folder, made.store, made.head, block_chunks=size)
        assert counts.contigs_virus + counts.contigs_other + counts.contigs_unscored == 40
        assert counts.chunks == made.store.num_chunks
        for name in ("contigs_parquet", "predictions_parquet", "regions_parquet"):
            found, expected = (pd.read_parquet(getattr(one.folder, name)) for one in (made, each_run))
            pd.testing.assert_frame_equal(found, expected, atol=1e-3)
        if each_run.store.meta.frames == "open":
            assert all_tables(made.folder) == before


@pytest.mark.parametrize("fdr", [None, 0.1])
@pytest.mark.parametrize(("sequence", "scored"), [(NO_OPEN_FRAME, 0), ("ACGGCA" * 40, 1)])
@pytest.mark.parametrize("frames", ["open", "longest"])
def test_runs_with_one_scored_contig_and_with_none(
    frames: FrameRule, sequence: str, scored: int, fdr: float | None, made_models: MadeModels, tmp_path: Path
) -> None:
    fasta = tmp_path / "in.fa"
    fasta.write_text(f">a\n{NO_OPEN_FRAME}\n>empty\n\n>b\n{sequence}\n")
    head = made_models.head if frames == "open" else made_models.longest_head
    run = plan_run(tmp_path / "run", fasta, made_models.config(head=str(head)))
    run.compute()
    aggregate(run.folder, run.plan, run.store)
    counts = write_tables(run.folder, run.store, run.head, fdr=fdr if frames == "longest" else None)
    assert (counts.records, counts.rejected, counts.contigs_unscored) == (2, 1, 2 - scored)
    assert (counts.sample is None) == (scored == 0 or frames == "open")
    if counts.sample:
        assert counts.sample.fdr == fdr
        assert 0 < counts.sample.share_low <= counts.sample.share < 1
    assert read(run.folder.contigs).contig.tolist() == ["a", "b"]
    assert read(run.folder.rejected).id.tolist() == ["empty"]
    if not scored:
        assert run.folder.highest_score.read_text() == "Modified_ID\tIs_Virus\n"
        assert len(read(run.folder.regions)) == counts.regions == 0
        assert run.folder.regions_bed.read_text() == ""
        assert records_of(run.folder.viral_contigs) == records_of(run.folder.regions_fasta) == {}
        assert pd.read_parquet(run.folder.predictions_parquet).p_virus.isna().all()


@pytest.mark.parametrize("frames", ["open", "longest"])
@pytest.mark.parametrize("threshold", [0.5, 0.9])
def test_every_byte_is_that_of_a_table_written_cell_by_cell(
    frames: FrameRule, threshold: float, tmp_path: Path, made_models: MadeModels, contigs: Path
) -> None:
    fasta = tmp_path / "in.fa"
    fasta.write_text(contigs.read_text() + f">empty\n\n>no_frame\n{NO_OPEN_FRAME}\n>short\nACG\n")
    head = None if frames == "open" else made_models.longest_head
    config = made_models.config(**({"head": str(head)} if head else {}))
    run = plan_run(tmp_path / "run", fasta, config, shard_seconds=10.0)
    run.compute()
    aggregate(run.folder, run.plan, run.store)
    counts = write_tables(run.folder, run.store, run.head, threshold)
    assert counts.rejected > 0
    for name in ("predictions", "contigs"):
        table = pq.read_table(getattr(run.folder, f"{name}_parquet"))
        assert table.schema == (prediction_schema if name == "predictions" else contig_schema)(frames)
        assert getattr(run.folder, name).read_text() == slow_lines(table, threshold)
        assert "\tNA\t" in slow_lines(table, threshold)
    chunks = pq.read_table(run.folder.predictions_parquet).filter(pc.field("status") == "scored").to_pylist()
    calls = sorted((f"{row['contig']}_chunk_{row['chunk']}", row["p_virus"] >= 0.5) for row in chunks)
    lines = (f"{name}\t{is_virus}\n" for name, is_virus in calls)
    assert run.folder.highest_score.read_text() == "Modified_ID\tIs_Virus\n" + "".join(lines)
    assert run.folder.rejected.read_bytes() == run.store.rejected_path.read_bytes()


@pytest.mark.parametrize("threshold", [0.5, 0.9])
def test_all_tables_agree_about_scores_near_the_threshold(
    finished_run: MadeRun, tmp_path: Path, threshold: float
) -> None:
    folder = RunFolder(tmp_path)
    folder.embeddings.write_bytes(finished_run.folder.embeddings.read_bytes())
    near = [threshold + step for step in (-3e-7, -1e-7, 0, 1e-7, 3e-7, -2e-2, 2e-2)]
    with h5py.File(folder.embeddings, "r+") as file:
        p_virus = np.resize(np.array(near, np.float32), len(file["scores"]))
        file["scores"][...] = np.stack([np.float32(1) - p_virus, p_virus], axis=1)
    write_tables(folder, finished_run.store, finished_run.head)
    usual = all_tables(folder)
    write_tables(folder, finished_run.store, finished_run.head, threshold)
    for name in ("prediction_results.txt", "prediction_results_highestscore.csv", "rejected.tsv"):
        assert all_tables(folder)[name] == usual[name], "tables of VirNucPro do not depend on the threshold"
    chunks = read(folder.predictions).query("status == 'scored'")
    assert {"0.499999", "0.500000"} <= set(chunks.p_virus) or threshold != 0.5
    contigs = read(folder.contigs).query("call != 'unscored'")
    parquet = pd.read_parquet(folder.predictions_parquet).query("status == 'scored'")
    calls = ((chunks.p_virus, chunks.call), (parquet.p_virus, parquet.call), (contigs.mean_p, contigs.call))
    for p, call in calls:
        assert ((p.astype(float) >= threshold) == (call == "virus")).all()
    single = contigs.query("chunks == 1")
    assert {"virus", "other"} == set(single.call)
    regions = set(read(folder.regions).contig)
    assert (single.contig.isin(regions) == (single.call == "virus")).all()


def test_embeddings_of_another_run_are_refused(
    tmp_path: Path, finished_run: MadeRun, made_models: MadeModels
) -> None:
    fasta = tmp_path / "in.fa"
    fasta.write_text(">a\nATGAAAGTTCTG\n")
    run = plan_run(tmp_path / "run", fasta, made_models.config())
    run.folder.embeddings.write_bytes(finished_run.folder.embeddings.read_bytes())
    with pytest.raises(MismatchError, match="different runs"):
        write_tables(run.folder, run.store, run.head)
    run.folder.embeddings.write_bytes(b"nothing")
    with pytest.raises(DamagedFileError, match="cannot be read"):
        write_tables(run.folder, run.store, run.head)
    assert not run.folder.predictions.exists()


def test_hostile_names_change_no_row_and_no_cell(made_models: MadeModels, tmp_path: Path) -> None:
    fasta = tmp_path / "in.fa"
    fasta.write_bytes(b"".join(b">%b\n%b\n" % (name.encode(), b"ACG" * 30) for name in HOSTILE_NAMES * 2))
    run = plan_run(tmp_path / "run", fasta, made_models.config(), shard_seconds=10.0)
    run.compute()
    aggregate(run.folder, run.plan, run.store)
    counts = write_tables(run.folder, run.store, run.head)
    rows = {
        run.folder.predictions: counts.chunks,
        run.folder.contigs: counts.records,
        run.folder.prediction_results: counts.frames,
        run.folder.highest_score: counts.scored_chunks,
    }
    for path, number in rows.items():
        for quoting in (csv.QUOTE_MINIMAL, csv.QUOTE_NONE):
            with path.open(encoding="utf-8", newline="") as file:
                table = list(csv.reader(file, delimiter="\t", quoting=quoting))
            assert len(table) == number + 1
            assert {len(row) for row in table} == {len(table[0])}
            assert all(cell.isprintable() and cell[:1] not in set("=+-@\"'") for row in table for cell in row)
    with Embeddings(run.folder.embeddings, own=True) as embeddings:
        ids = embeddings.ids
    assert read(run.folder.prediction_results).Sequence_ID.tolist() == ids
    assert len(set(ids)) == len(ids)
    assert {path.name for path in tmp_path.iterdir()} == {"in.fa", "run"}


def contig_head(made_models: MadeModels, temperature: float | None = None) -> ContigHead:
    """A low temperature makes probabilities of contigs extreme."""
    head = load_head(made_models.longest_head)
    assert isinstance(head, ContigHead)
    if temperature is not None:
        head.contig_temperature.copy_(torch.tensor([temperature, 0.0]))
    return head


def test_calls_are_those_of_each_contig_alone(longest_run: MadeRun, made_models: MadeModels) -> None:
    run, head = longest_run, contig_head(made_models)
    store = run.store
    with Embeddings(run.folder.embeddings, own=True) as file:
        codes = torch.from_numpy(file.rows("codes", 0, len(file))).float()
    chunks, contigs = (
        pd.read_parquet(run.folder.predictions_parquet),
        pd.read_parquet(run.folder.contigs_parquet),
    )
    names, virus = np.array(head.spec.classes), head.spec.num_virus
    frame_record = store.chunk_record[store.frame_chunk]
    p_context = np.full(store.num_chunks, np.nan)
    for record, contig in enumerate(contigs.itertuples()):
        rows = np.flatnonzero(frame_record == record)
        if not len(rows):
            assert (contig.call, contig.scored_chunks) == ("unscored", 0)
            assert contigs.loc[record, ["p_virus", "mean_p", "tier", "class"]].isna().all()
            continue
        own, number = np.unique(store.frame_chunk[rows], return_inverse=True)
        pooled = head.chunk_codes(codes[rows], torch.from_numpy(number), len(own))
        logits = head.chunk(pooled)
        p_chunk = head.chunk_margin(logits).sigmoid().numpy()
        np.testing.assert_allclose(chunks.p_virus[own], p_chunk, atol=1e-5)
        best = np.where(p_chunk >= 0.5, logits[:, :virus].argmax(1), logits[:, virus:].argmax(1) + virus)
        assert chunks["class"][own].tolist() == names[best].tolist()
        found = head.contigs(pooled, torch.zeros(len(own), dtype=torch.int64), 1)
        p_contig = head.contig_margin(found.logits, torch.tensor([len(own)])).sigmoid().item()
        assert contig.p_virus == pytest.approx(p_contig, abs=1e-4)
        assert contig.call == ("virus" if contig.p_virus >= 0.5 else "other")
        [other, viral] = found.logits[0].tensor_split([virus])[::-1]
        is_viral = contig.p_virus >= 0.5
        assert contigs["class"][record] == names[viral.argmax() if is_viral else other.argmax() + virus]
        p_context[own] = head.chunk_margin(found.context).sigmoid().numpy()
    assert set(contigs.call) == {"virus", "other", "unscored"}
    assert (contigs.call != np.where(contigs.mean_p >= 0.5, "virus", "other"))[
        contigs.call != "unscored"
    ].any()
    assert regions_from(run, p_context) == places_of(run.folder)


def test_novelty_is_in_the_table_and_makes_contigs_unsure(
    longest_run: MadeRun, made_models: MadeModels, tmp_path: Path
) -> None:
    made, store, head = (
        copy_of(longest_run, tmp_path / "run"),
        longest_run.store,
        contig_head(made_models, 0.3),
    )
    write_tables(made.folder, store, head)
    usual = pd.read_parquet(made.folder.contigs_parquet)
    assert usual.novelty.isna().all()
    with Embeddings(longest_run.folder.embeddings, own=True) as file:
        embeddings = head.score_contigs(rows_of(store, file, 0, store.num_chunks)).embedding
    assert embeddings is not None
    centroids = embeddings[~np.isnan(embeddings[:, 0])][:4]
    expected = 1 - (embeddings @ centroids.T).max(1)
    head.centroids = torch.from_numpy(centroids)
    head.novelty_limit.fill_(float(np.nanmedian(expected)))
    write_tables(made.folder, store, head)
    found = pd.read_parquet(made.folder.contigs_parquet)
    np.testing.assert_allclose(found.novelty, expected, atol=1e-6)
    is_novel = found.novelty.to_numpy() > np.nanmedian(expected)
    assert "likely" in set(usual.tier[is_novel])
    assert set(found.tier[is_novel]) == {"unsure"}
    found.loc[is_novel, "tier"] = usual.tier[is_novel]
    pd.testing.assert_frame_equal(found.drop(columns="novelty"), usual.drop(columns="novelty"))


@pytest.mark.parametrize("block", [1 << 16, 7])
@pytest.mark.parametrize(("fdr", "is_strict"), [(0.0001, True), (0.05, True), (0.6, False), (0.999, False)])
def test_contigs_are_called_at_a_promised_rate(
    longest_run: MadeRun,
    made_models: MadeModels,
    tmp_path: Path,
    fdr: float,
    is_strict: bool,
    block: int,
) -> None:
    made, head = copy_of(longest_run, tmp_path / "run"), contig_head(made_models, 0.3)
    usual_calls = write_tables(made.folder, made.store, head).contigs_virus
    usual = {path: path.read_bytes() for path in made.folder.results if path.exists()}
    counts = write_tables(made.folder, made.store, head, fdr=fdr, block_chunks=block)
    contigs = pd.read_parquet(made.folder.contigs_parquet)
    p_virus = contigs.p_virus.to_numpy(np.float64)
    sample = counts.sample
    assert sample is not None
    assert sample == call_sample(p_virus, 0.5, fdr)
    limit = np.inf if sample.threshold is None else sample.threshold
    assert (contigs.call == "virus").tolist() == (p_virus >= limit).tolist()
    assert counts.contigs_virus == (p_virus >= limit).sum()
    assert (counts.contigs_virus < usual_calls) == is_strict
    assert (counts.contigs_virus > 0) == (fdr > 0.001)
    table = read(made.folder.contigs)
    for row in table[table.call != "unscored"].itertuples():
        assert (float(row.p_virus) >= limit) == (row.call == "virus")
    with gzip.open(made.folder.viral_contigs, "rt") as file:
        viral = [line[1:].split()[0] for line in file if line.startswith(">")]
    assert viral == table.contig[table.call == "virus"].tolist()
    assert {path.name for path, before in usual.items() if path.read_bytes() != before} <= {
        made.folder.contigs.name,
        made.folder.contigs_parquet.name,
        made.folder.viral_contigs.name,
    }


@pytest.mark.parametrize("threshold", [0.5, 0.8])
def test_false_calls_are_expected_of_a_threshold(
    longest_run: MadeRun, made_models: MadeModels, tmp_path: Path, threshold: float
) -> None:
    made = copy_of(longest_run, tmp_path / "run")
    counts = write_tables(made.folder, made.store, contig_head(made_models), threshold)
    p_virus = pd.read_parquet(made.folder.contigs_parquet).p_virus.to_numpy(np.float64)
    assert counts.contigs_virus == (p_virus >= threshold).sum()
    assert counts.sample == call_sample(p_virus, threshold)


def test_a_new_process_gives_the_same_tables(longest_run: MadeRun, tmp_path: Path) -> None:
    made = copy_of(longest_run, tmp_path / "run")
    for path in made.folder.results:
        path.unlink(missing_ok=True)
    script = f"""
from pathlib import Path
from tests.made_models import MadeRun
from tests.made_models import write_results
from virnuc_core.inference.plan import read_plan
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.frame_store import FrameStore
folder = RunFolder(Path({str(made.folder.root)!r}))
write_results(MadeRun(folder, FrameStore.open(folder.frames), read_plan(folder.plan)))
"""
    # These settle how products are rounded, and the importing process may have them by chance.
    environment = {name: value for name, value in os.environ.items() if name not in CPU_LIBRARIES}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)
    assert all_tables(made.folder) == all_tables(longest_run.folder)
