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
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from Bio import SeqIO

from tests.made_hostile import HOSTILE_NAMES
from tests.made_models import NO_OPEN_FRAME, MadeModels, MadeRun, copy_of, plan_run
from virnuc_core.errors import DamagedFileError, MismatchError
from virnuc_core.inference import CPU_LIBRARIES
from virnuc_core.models.heads import ContigHead, load_head
from virnuc_core.results.aggregate import aggregate
from virnuc_core.results.embeddings import Embeddings
from virnuc_core.results.sample import Mixture
from virnuc_core.results.tables import CHUNK_SCHEMA, CONTIG_SCHEMA, frame_lines, write_tables
from virnuc_core.results.virus_files import SUMMARY_SCHEMA, terminal_repeats
from virnuc_core.run_folder import RunFolder
from virnuc_core.specs import FRAME_KINDS, CallRule, FrameRule


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
    table, parquet = read(folder.chunks), pd.read_parquet(folder.chunks_parquet)
    assert list(table.columns) == CHUNK_SCHEMA.names
    ids = table.seq_name + "_chunk_" + table.chunk.astype(str)
    assert ids.tolist() == store.chunk_id_column(0, store.num_chunks).to_pylist()
    assert (table.start - 1).tolist() == store.chunk_start.tolist()
    assert table.end.tolist() == store.chunk_end.tolist()
    is_scored = np.isin(np.arange(store.num_chunks), store.frame_chunk)
    assert (table.status == np.where(is_scored, "scored", FRAME_KINDS[frames].missing)).all()
    assert set((ids + table.best_frame)[is_scored]) <= set(read(folder.prediction_results).Sequence_ID)
    assert set(table.virus_score[~is_scored]) == set(table.best_frame[~is_scored]) == {"NA"}

    found = pd.read_parquet(folder.contigs_parquet)
    assert list(found.columns) == CONTIG_SCHEMA.names
    assert found.seq_name.tolist() == store.record_names(0, 40)
    for contig in found.itertuples():
        own = parquet[parquet.seq_name == contig.seq_name]
        scores = own.virus_score.dropna()
        assert (contig.chunks, contig.scored_chunks) == (len(own), len(scores))
        assert (contig.call == "unscored") == (not len(scores)) == pd.isna(contig.virus_score)
        assert pd.isna(contig.confidence) == (not len(scores))
        if frames == "open" and len(scores):
            assert contig.virus_score == pytest.approx(scores.mean(), abs=1e-6)
    require_agreement(folder, contigs)


def require_agreement(folder: RunFolder, fasta: Path) -> pd.DataFrame:
    """Requires that all files name the same viral sequences, each of which its contig's call is for; gives the summary."""
    contigs, summary = (
        pq.read_table(path).to_pylist() for path in (folder.contigs_parquet, folder.summary_parquet)
    )
    call, score = ({row["seq_name"]: row[name] for row in contigs} for name in ("call", "virus_score"))
    with fasta.open() as file:
        sequences = dict(zip(call, (str(record.seq) for record in SeqIO.parse(file, "fasta")), strict=True))
    expected, places = {}, []
    for row in summary:
        contig, *part = row["seq_name"].split("|provirus_")
        start, end = map(int, row["coordinates"].split("-")) if part else (1, row["length"])
        assert part == ([f"{start}_{end}"] if part else [])
        assert part or (row["coordinates"], row["virus_score"]) == (None, score[contig])
        expected[row["seq_name"]] = bases = sequences[contig][start - 1 : end]
        assert len(bases) == row["length"]
        assert row["topology"] == ("provirus" if part else terminal_repeats(bases.encode()))
        assert call[contig] == ("provirus" if part else "virus")
        places.append((contig, start, end, row["seq_name"]))
    assert {contig for contig, *_ in places} == {name for name in call if "virus" in call[name]}
    assert places == sorted(places, key=lambda place: (list(call).index(place[0]), place[1]))
    assert records_of(folder.virus_fasta) == expected
    bed = [line.split("\t") for line in folder.virus_bed.read_text().splitlines()]
    assert [(row[0], int(row[1]) + 1, int(row[2]), row[3]) for row in bed] == places
    features = [line.split("\t") for line in folder.virus_gff3.read_text().splitlines() if line[0] != "#"]
    assert [(row[0], int(row[3]), int(row[4]), row[8].split(";")[0][3:]) for row in features] == places
    return pd.read_parquet(folder.summary_parquet)


@pytest.fixture(scope="module")
def with_proviruses(
    tmp_path_factory: pytest.TempPathFactory, made_models: MadeModels
) -> tuple[Path, MadeRun]:
    """A run over contigs of 30 chunks, whose scores are set: virus, provirus, two proviruses, nonviral, short."""
    root = tmp_path_factory.mktemp("proviruses")
    fasta, letters = root / "in.fa", np.random.default_rng(0)
    dna = ["".join(letters.choice(list("ACG"), length)) for length in (1800, 1800, 1800, 1800, 60)]
    fasta.write_text("".join(f">c{number}\n{bases}\n" for number, bases in enumerate(dna)))
    run = plan_run(root / "run", fasta, made_models.config())
    run.compute()
    aggregate(run.folder, run.plan, run.store)
    low, high = [0.02], [0.98]
    scores = [high * 30, low * 9 + high * 8 + low * 13, high * 7 + low * 15 + high * 8, low * 30, low]
    p_virus = np.concatenate(scores).astype(np.float32)[run.store.frame_chunk]
    with h5py.File(run.folder.embeddings, "r+") as file:
        file["scores"][...] = np.stack([1 - p_virus, p_virus], axis=1)
    return fasta, run


@pytest.mark.parametrize("block", [1, 1 << 15])
def test_proviruses_have_rows_of_their_own(with_proviruses: tuple[Path, MadeRun], block: int) -> None:
    fasta, run = with_proviruses
    counts = write_tables(run.folder, run.store, run.head, CallRule(), block)
    summary = require_agreement(run.folder, fasta)
    assert summary.coordinates.fillna("").tolist() == ["", "541-1020", "1-420", "1321-1800"]
    assert summary.virus_score.round(2).tolist() == [0.98] * 4
    calls = read(run.folder.contigs).call.tolist()
    assert calls == ["virus", "provirus", "provirus", "nonviral", "nonviral"]
    assert (counts.contigs_virus, counts.contigs_provirus, counts.contigs_nonviral) == (1, 2, 2)
    assert counts.proviruses == 3
    write_tables(run.folder, run.store, run.head, CallRule(threshold=0.99))
    assert not len(require_agreement(run.folder, fasta))
    assert set(read(run.folder.contigs).call) == {"nonviral"}


def test_threads_change_nothing_and_blocks_at_most_the_last_digits(each_run: MadeRun, tmp_path: Path) -> None:
    before, made = all_tables(each_run.folder), copy_of(each_run, tmp_path / "run")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        write_tables(made.folder, made.store, made.head, CallRule())
    finally:
        torch.set_num_threads(threads)
    assert all_tables(made.folder) == before
    for size in (1, 7, 1000):
        counts = write_tables(made.folder, made.store, made.head, CallRule(), size)
        assert (
            counts.contigs_virus + counts.contigs_provirus + counts.contigs_nonviral + counts.contigs_unscored
            == 40
        )
        assert counts.chunks == made.store.num_chunks
        for name in ("contigs_parquet", "chunks_parquet", "summary_parquet"):
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
    counts = write_tables(run.folder, run.store, run.head, CallRule(fdr=fdr))
    assert (counts.records, counts.rejected, counts.contigs_unscored) == (2, 1, 2 - scored)
    assert (counts.sample is None) == (scored == 0 or frames == "open")
    assert read(run.folder.contigs).seq_name.tolist() == ["a", "b"]
    assert read(run.folder.rejected).id.tolist() == ["empty"]
    if not scored:
        assert run.folder.highest_score.read_text() == "Modified_ID\tIs_Virus\n"
        assert run.folder.summary.read_text() == "\t".join(SUMMARY_SCHEMA.names) + "\n"
        assert run.folder.virus_bed.read_text() == ""
        assert records_of(run.folder.virus_fasta) == {}
        assert pd.read_parquet(run.folder.chunks_parquet).virus_score.isna().all()


def slow_lines(table: pa.Table) -> str:
    """A table as text, cell by cell."""

    def cell(value: object) -> str:
        return "NA" if value is None else f"{value:.6f}" if isinstance(value, float) else str(value)

    rows = [table.schema.names, *(map(cell, row.values()) for row in table.to_pylist())]
    return "".join("\t".join(row) + "\n" for row in rows)


@pytest.mark.parametrize("frames", ["open", "longest"])
def test_every_byte_is_that_of_a_table_written_cell_by_cell(
    frames: FrameRule, tmp_path: Path, made_models: MadeModels, contigs: Path
) -> None:
    fasta = tmp_path / "in.fa"
    fasta.write_text(contigs.read_text() + f">empty\n\n>no_frame\n{NO_OPEN_FRAME}\n>short\nACG\n")
    head = None if frames == "open" else made_models.longest_head
    config = made_models.config(**({"head": str(head)} if head else {}))
    run = plan_run(tmp_path / "run", fasta, config, shard_seconds=10.0)
    run.compute()
    aggregate(run.folder, run.plan, run.store)
    counts = write_tables(run.folder, run.store, run.head, CallRule(threshold=0.5))
    assert counts.rejected > 0
    for name, schema in (("chunks", CHUNK_SCHEMA), ("contigs", CONTIG_SCHEMA), ("summary", SUMMARY_SCHEMA)):
        table = pq.read_table(getattr(run.folder, f"{name}_parquet"))
        assert table.schema == schema
        assert getattr(run.folder, name).read_text() == slow_lines(table)
        assert "\tNA\t" in slow_lines(table)
    assert run.folder.rejected.read_bytes() == run.store.rejected_path.read_bytes()


@pytest.mark.parametrize("threshold", [0.5, 0.9])
def test_tables_agree_about_scores_near_the_threshold_which_changes_no_chunk(
    finished_run: MadeRun, tmp_path: Path, threshold: float
) -> None:
    folder = RunFolder(tmp_path)
    folder.embeddings.write_bytes(finished_run.folder.embeddings.read_bytes())
    near = [threshold + step for step in (-3e-7, -1e-7, 0, 1e-7, 3e-7, -2e-2, 2e-2)]
    with h5py.File(folder.embeddings, "r+") as file:
        p_virus = np.resize(np.array(near, np.float32), len(file["scores"]))
        file["scores"][...] = np.stack([np.float32(1) - p_virus, p_virus], axis=1)
    write_tables(folder, finished_run.store, finished_run.head, CallRule())
    usual = all_tables(folder)
    write_tables(folder, finished_run.store, finished_run.head, CallRule(threshold=threshold))
    for name in (
        "chunks.tsv",
        "prediction_results.txt",
        "prediction_results_highestscore.csv",
        "rejected.tsv",
    ):
        assert all_tables(folder)[name] == usual[name]
    frames = read(folder.prediction_results)
    highest = frames.groupby(frames.Sequence_ID.str[:-2])[["score1", "score2"]].max()
    calls = read(folder.highest_score).set_index("Modified_ID").Is_Virus
    assert (calls == (highest.score2 >= highest.score1)).all()
    contigs = read(folder.contigs).query("call != 'unscored'")
    assert ((contigs.virus_score.astype(float) >= threshold) == (contigs.call == "virus")).all()
    assert {"virus", "nonviral"} == set(contigs.query("chunks == 1").call)


def test_embeddings_of_another_run_are_refused(
    tmp_path: Path, finished_run: MadeRun, made_models: MadeModels
) -> None:
    fasta = tmp_path / "in.fa"
    fasta.write_text(">a\nATGAAAGTTCTG\n")
    run = plan_run(tmp_path / "run", fasta, made_models.config())
    run.folder.embeddings.write_bytes(finished_run.folder.embeddings.read_bytes())
    with pytest.raises(MismatchError, match="different runs"):
        write_tables(run.folder, run.store, run.head, CallRule())
    run.folder.embeddings.write_bytes(b"nothing")
    with pytest.raises(DamagedFileError, match="cannot be read"):
        write_tables(run.folder, run.store, run.head, CallRule())
    assert not run.folder.chunks.exists()


def test_hostile_names_change_no_row_and_no_cell(made_models: MadeModels, tmp_path: Path) -> None:
    fasta = tmp_path / "in.fa"
    fasta.write_bytes(b"".join(b">%b\n%b\n" % (name.encode(), b"ACG" * 30) for name in HOSTILE_NAMES * 2))
    run = plan_run(tmp_path / "run", fasta, made_models.config(), shard_seconds=10.0)
    run.compute()
    aggregate(run.folder, run.plan, run.store)
    counts = write_tables(run.folder, run.store, run.head, CallRule(threshold=1e-6))
    rows = {
        run.folder.chunks: counts.chunks,
        run.folder.contigs: counts.records,
        run.folder.summary: counts.contigs_virus,
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
    assert records_of(run.folder.virus_fasta).keys() == set(read(run.folder.summary).seq_name)
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


def test_scores_are_those_of_each_contig_alone(
    longest_run: MadeRun, made_models: MadeModels, tmp_path: Path
) -> None:
    run, head = copy_of(longest_run, tmp_path / "run"), contig_head(made_models)
    write_tables(run.folder, run.store, head, CallRule(threshold=0.5))
    store = run.store
    with Embeddings(run.folder.embeddings, own=True) as file:
        codes = torch.from_numpy(file.rows("codes", 0, len(file))).float()
    chunks, contigs = (
        pd.read_parquet(path) for path in (run.folder.chunks_parquet, run.folder.contigs_parquet)
    )
    names, virus = np.array(head.spec.classes), head.spec.num_virus
    frame_record = store.chunk_record[store.frame_chunk]
    embeddings = np.full((40, 64), np.nan, np.float32)
    means = np.full(40, np.nan)
    for record, contig in enumerate(contigs.itertuples()):
        rows = np.flatnonzero(frame_record == record)
        if not len(rows):
            assert (contig.call, contig.scored_chunks) == ("unscored", 0)
            assert contigs.loc[record, ["virus_score", "confidence", "class"]].isna().all()
            continue
        own, number = np.unique(store.frame_chunk[rows], return_inverse=True)
        pooled = head.chunk_codes(codes[rows], torch.from_numpy(number), len(own))
        p_chunk = (head.virus_margin(head.chunk(pooled)) / head.chunk_temperature).sigmoid().numpy()
        np.testing.assert_allclose(chunks.virus_score[own], p_chunk, atol=1e-5)
        found = head.contigs(pooled, torch.zeros(len(own), dtype=torch.int64), 1)
        p_contig = head.contig_margin(found.logits, torch.tensor([len(own)])).sigmoid().item()
        assert contig.virus_score == pytest.approx(p_contig, abs=1e-4)
        assert contig.call == ("virus" if contig.virus_score >= 0.5 else "nonviral")
        [other, viral] = found.logits[0].tensor_split([virus])[::-1]
        best = viral.argmax() if contig.call == "virus" else other.argmax() + virus
        assert contigs["class"][record] == names[best]
        means[record], embeddings[record] = p_chunk.mean(), found.embedding[0]
    assert set(contigs.call) == {"virus", "nonviral", "unscored"}
    assert ((contigs.virus_score >= 0.5) != (means >= 0.5)).any()
    assert contigs.novelty.isna().all()

    head = contig_head(made_models, 0.3)
    write_tables(run.folder, store, head, CallRule(threshold=0.5))
    usual = pd.read_parquet(run.folder.contigs_parquet)
    centroids = embeddings[~np.isnan(embeddings[:, 0])][:4]
    expected = 1 - (embeddings @ centroids.T).max(1)
    head.centroids = torch.from_numpy(centroids)
    head.novelty_limit.fill_(float(np.nanmedian(expected)))
    write_tables(run.folder, store, head, CallRule(threshold=0.5))
    novel = pd.read_parquet(run.folder.contigs_parquet)
    np.testing.assert_allclose(novel.novelty, expected, atol=1e-6)
    is_novel = expected > np.nanmedian(expected)
    assert {*usual.confidence[is_novel]} > {"unsure"} == {*novel.confidence[is_novel]}
    novel.loc[is_novel, "confidence"] = usual.confidence[is_novel]
    pd.testing.assert_frame_equal(novel.drop(columns="novelty"), usual.drop(columns="novelty"))


@pytest.mark.parametrize("block", [1 << 16, 7])
@pytest.mark.parametrize(
    "rule",
    [CallRule(), CallRule(fdr=1e-6), CallRule(fdr=0.9), CallRule(prior=0.9), CallRule(threshold=0.8)],
    ids=str,
)
def test_contigs_are_called_from_what_the_sample_says(
    longest_run: MadeRun, made_models: MadeModels, contigs: Path, tmp_path: Path, rule: CallRule, block: int
) -> None:
    made, head = copy_of(longest_run, tmp_path / "run"), contig_head(made_models, 0.3)
    write_tables(made.folder, made.store, head, CallRule(threshold=0.5), block)
    balanced = all_tables(made.folder)
    counts = write_tables(made.folder, made.store, head, rule, block)
    scores = pd.read_parquet(made.folder.contigs_parquet).virus_score.to_numpy(np.float64)
    mixture, sample = Mixture.of(scores, rule.prior), counts.sample
    assert mixture is not None
    assert sample is not None
    limit = mixture.threshold(rule)
    assert sample.share == mixture.share
    assert sample.threshold == (limit if np.isfinite(limit) else None)
    summary = require_agreement(made.folder, contigs)
    assert counts.contigs_virus == len(summary) == (scores >= limit).sum()
    assert (counts.contigs_virus > 0) == (rule.fdr != 1e-6)
    assert sample.expected_false == pytest.approx((1 - mixture.p_virus(scores[scores >= limit])).sum())
    assert summary.fdr.tolist() == mixture.fdr(summary.virus_score.to_numpy()).tolist()
    assert summary.fdr.max() <= (rule.fdr or 1) or not len(summary)
    changed = {name for name, before in balanced.items() if all_tables(made.folder)[name] != before}
    assert not any(name.startswith(("chunks", "prediction", "embeddings")) for name in changed)


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
