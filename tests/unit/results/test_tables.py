"""The tables of a run, against a row-by-row computation with pandas."""

import csv
import gzip
import io
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from Bio import SeqIO

from tests.made_hostile import HOSTILE_NAMES
from tests.made_models import NO_OPEN_FRAME, MadeModels, MadeRun, plan_run
from tests.made_reports import slow_lines
from virnuc_core.errors import DamagedFileError, MismatchError
from virnuc_core.results.aggregate import aggregate
from virnuc_core.results.embeddings import Embeddings
from virnuc_core.results.regions import ChunkScores, find_regions
from virnuc_core.results.tables import contig_schema, frame_lines, prediction_schema, write_tables
from virnuc_core.run_folder import RunFolder
from virnuc_core.specs import FrameRule


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


def test_the_tables_of_virnucpro(finished_run: MadeRun) -> None:
    frames, store = read(finished_run.folder.prediction_results), finished_run.store
    assert list(frames.columns) == ["Sequence_ID", "Prediction", "score1", "score2"]
    assert frames.Sequence_ID.tolist() == store.frame_ids(0, store.num_frames)
    with Embeddings(finished_run.folder.embeddings, own=True) as file:
        scores = file.rows("scores", 0, len(file))
    np.testing.assert_array_equal(frames[["score1", "score2"]].to_numpy(np.float32), scores)
    frames["Modified_ID"] = frames["Sequence_ID"].str[:-2]
    highest = frames.groupby("Modified_ID")[["score1", "score2"]].max()
    expected = io.StringIO()
    calls = (highest.score2 >= highest.score1).rename("Is_Virus").reset_index()
    calls.to_csv(expected, sep="\t", index=False)
    assert finished_run.folder.highest_score.read_text() == expected.getvalue()


def test_every_chunk_has_its_row(finished_run: MadeRun) -> None:
    store, table = finished_run.store, read(finished_run.folder.predictions)
    assert list(table.columns) == prediction_schema("open").names
    ids = table.contig + "_chunk_" + table.chunk.astype(str)
    assert ids.tolist() == store.chunk_id_column(0, store.num_chunks).to_pylist()
    assert (table.start - 1).tolist() == store.chunk_start.tolist()
    assert table.end.tolist() == store.chunk_end.tolist()
    is_scored = table.status == "scored"
    calls = read(finished_run.folder.highest_score).set_index("Modified_ID").Is_Virus
    assert (table.call[is_scored] == "virus").tolist() == calls[ids[is_scored]].tolist()
    assert set(table.call[is_scored]) == {"virus", "other"}
    frames = read(finished_run.folder.prediction_results).Sequence_ID
    assert set((ids + table.best_frame)[is_scored]) <= set(frames)
    rest = table[~is_scored][["status", "call", "p_virus", "best_frame"]].drop_duplicates()
    assert rest.to_numpy().tolist() == [["no_open_frame", "unscored", "NA", "NA"]]


def test_contigs_and_regions_are_those_of_their_chunks(finished_run: MadeRun, contigs: Path) -> None:
    folder = finished_run.folder
    chunks, table = read(folder.predictions), read(folder.contigs)
    assert list(table.columns) == contig_schema("open").names
    assert table.record.tolist() == list(range(1, 41))
    assert table.contig.tolist() == finished_run.store.record_names(0, 40)
    for contig in table.itertuples():
        own = chunks[chunks.contig == contig.contig]
        p_virus = own.p_virus[own.status == "scored"].astype(float)
        viral = (own.call == "virus").sum()
        assert (contig.chunks, contig.scored_chunks, contig.viral_chunks) == (len(own), len(p_virus), viral)
        if len(p_virus):
            assert float(contig.mean_p) == pytest.approx(p_virus.mean(), abs=2e-6)
            assert float(contig.share_viral) == pytest.approx(viral / len(p_virus), abs=1e-6)
            assert contig.call == ("virus" if p_virus.mean() >= 0.5 else "other")
        else:
            nothing = (contig.share_viral, contig.mean_p, contig.call, contig.tier)
            assert nothing == ("NA", "NA", "unscored", "NA")
    places = {name: number for number, name in enumerate(table.contig)}
    scores = ChunkScores(
        contig=chunks.contig.map(places).to_numpy(),
        start=chunks.start.to_numpy() - 1,
        end=chunks.end.to_numpy(),
        p_virus=chunks.p_virus.replace("NA", "nan").astype(float).to_numpy(),
    )
    expected = [(table.contig[r.contig], r.start + 1, r.end, r.chunks) for r in find_regions(scores)]
    columns = read(folder.regions)[["contig", "start", "end", "chunks"]]
    assert list(columns.itertuples(index=False, name=None)) == expected
    assert len(expected) > 3
    with contigs.open() as file:
        bases = [str(record.seq) for record in SeqIO.parse(file, "fasta")]
    assert records_of(folder.viral_contigs) == {
        row.contig: bases[row.record - 1] for row in table.query("call == 'virus'").itertuples()
    }
    assert {"virus", "other"} <= set(table.call)


def test_blocks_change_nothing(finished_run: MadeRun) -> None:
    before = all_tables(finished_run.folder)
    for chunks in (1, 5, 1000):
        counts = write_tables(finished_run.folder, finished_run.store, finished_run.head, block_chunks=chunks)
        assert all_tables(finished_run.folder) == before
        assert counts.contigs_virus + counts.contigs_other + counts.contigs_unscored == 40
        assert counts.chunks == finished_run.store.num_chunks


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
    with Embeddings(run.folder.embeddings, own=True) as file:
        rows = zip(file.ids, file.rows("scores", 0, len(file)), strict=True)
        lines = (f"{name}\t{'virus' if b > a else 'others'}\t{a!s}\t{b!s}\n" for name, (a, b) in rows)
        expected = "Sequence_ID\tPrediction\tscore1\tscore2\n" + "".join(lines)
    assert run.folder.prediction_results.read_text() == expected
    chunks = pq.read_table(run.folder.predictions_parquet).filter(pc.field("status") == "scored").to_pylist()
    calls = sorted((f"{row['contig']}_chunk_{row['chunk']}", row["p_virus"] >= 0.5) for row in chunks)
    lines = (f"{name}\t{is_virus}\n" for name, is_virus in calls)
    assert run.folder.highest_score.read_text() == "Modified_ID\tIs_Virus\n" + "".join(lines)
    assert run.folder.rejected.read_bytes() == run.store.rejected_path.read_bytes()
    viral = pq.read_table(run.folder.contigs_parquet).filter(pc.field("call") == "virus").to_pylist()
    assert [name.split()[0] for name in records_of(run.folder.viral_contigs)] == [
        row["contig"] for row in viral
    ]


@pytest.mark.parametrize("name", ["predictions", "contigs", "regions"])
def test_parquet_is_the_table(finished_run: MadeRun, name: str) -> None:
    folder = finished_run.folder
    table = pd.read_csv(getattr(folder, name), sep="\t", keep_default_na=False, na_values=["NA"])
    parquet = pd.read_parquet(getattr(folder, f"{name}_parquet"))
    rounded = {"p_virus": 5.1e-7, "share_viral": 5.1e-7, "mean_p": 5.1e-7, "score": 5.1e-3}
    for column in rounded.keys() & set(parquet):
        np.testing.assert_allclose(table.pop(column), parquet.pop(column), atol=rounded[column])
    pd.testing.assert_frame_equal(table, parquet)
    assert pq.read_metadata(getattr(folder, f"{name}_parquet")).num_row_groups == 1


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


def test_no_open_frame_at_all(tmp_path: Path, made_models: MadeModels) -> None:
    fasta = tmp_path / "in.fa"
    fasta.write_text(f">a\n{NO_OPEN_FRAME}\n>empty\n\n>b\n{NO_OPEN_FRAME}\n")
    run = plan_run(tmp_path / "run", fasta, made_models.config())
    aggregate(run.folder, run.plan, run.store)
    counts = write_tables(run.folder, run.store, run.head)
    assert (counts.records, counts.rejected, counts.scored_chunks, counts.contigs_unscored) == (2, 1, 0, 2)
    assert read(run.folder.contigs).contig.tolist() == ["a", "b"]
    assert run.folder.highest_score.read_text() == "Modified_ID\tIs_Virus\n"
    assert read(run.folder.rejected).id.tolist() == ["empty"]
    assert len(read(run.folder.regions)) == counts.regions == 0
    assert run.folder.regions_bed.read_text() == ""
    assert run.folder.regions_gff3.read_text().startswith("##gff-version 3\n")
    assert records_of(run.folder.viral_contigs) == records_of(run.folder.regions_fasta) == {}
    assert pd.read_parquet(run.folder.predictions_parquet).p_virus.isna().all()


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
