"""The tables of a run, against the same things worked out row by row with pandas."""

import gzip
import io
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from Bio import SeqIO

from tests.made_models import NO_OPEN_FRAME, MadeModels, MadeRun, plan_run
from virnuc_core.errors import DamagedFileError, MismatchError
from virnuc_core.results import tables
from virnuc_core.results.aggregate import aggregate
from virnuc_core.results.chunk_tables import PREDICTION_COLUMNS, frame_rows
from virnuc_core.results.contig_tables import CONTIG_COLUMNS
from virnuc_core.results.embeddings import Embeddings
from virnuc_core.results.regions import ChunkScores, find_regions
from virnuc_core.results.report.tracks import read_tracks
from virnuc_core.results.tables import write_tables
from virnuc_core.run_folder import RunFolder


def read(path: Path) -> pd.DataFrame:
    return pd.read_csv(path, sep="\t", keep_default_na=False)


def all_tables(folder: RunFolder) -> dict[str, bytes]:
    written = (path for path in folder.results if path not in (folder.page, folder.report))
    return {path.name: path.read_bytes() for path in written}


def test_frames_have_the_digits_of_the_original() -> None:
    scores = np.array([[0.9517528, 0.04824718], [1e-8, 1], [0.5, 0.5]], np.float32)
    assert list(frame_rows(["a", "b", "c"], scores)) == [
        "a\tothers\t0.9517528\t0.04824718\n",
        "b\tvirus\t1e-08\t1.0\n",
        "c\tothers\t0.5\t0.5\n",
    ]


def test_frame_table(finished_run: MadeRun) -> None:
    table = read(finished_run.folder.prediction_results)
    store = finished_run.store
    assert list(table.columns) == ["Sequence_ID", "Prediction", "score1", "score2"]
    assert table.Sequence_ID.tolist() == store.frame_ids(0, store.num_frames)
    with Embeddings(finished_run.folder.embeddings, own=True) as file:
        scores = file.rows("scores", 0, len(file))
    np.testing.assert_array_equal(table[["score1", "score2"]].to_numpy(np.float32), scores)
    assert table.Prediction.tolist() == np.where(scores[:, 1] > scores[:, 0], "virus", "others").tolist()
    assert set(table.Prediction) == {"virus", "others"}


def test_highest_scores_are_what_the_original_makes_of_the_frame_table(finished_run: MadeRun) -> None:
    frames = read(finished_run.folder.prediction_results)
    frames["Modified_ID"] = frames["Sequence_ID"].str[:-2]
    highest = frames.groupby("Modified_ID")[["score1", "score2"]].max()
    expected = io.StringIO()
    verdicts = (highest.score2 >= highest.score1).rename("Is_Virus").reset_index()
    verdicts.to_csv(expected, sep="\t", index=False)
    assert finished_run.folder.highest_score.read_text() == expected.getvalue()


def test_every_chunk_has_its_row(finished_run: MadeRun) -> None:
    store = finished_run.store
    table = read(finished_run.folder.predictions)
    assert list(table.columns) == list(PREDICTION_COLUMNS)
    ids = [f"{contig}_chunk_{chunk}" for contig, chunk in zip(table.contig, table.chunk, strict=True)]
    assert ids == store.chunk_ids(0, store.num_chunks)
    assert (table.start - 1).tolist() == store.chunk_start.tolist()
    assert table.end.tolist() == store.chunk_end.tolist()
    scored = table[table.status == "scored"]
    verdicts = read(finished_run.folder.highest_score).set_index("Modified_ID").Is_Virus
    scored_ids = [ids[row] for row in scored.index]
    assert (scored.call == "virus").tolist() == verdicts[scored_ids].tolist()
    assert set(scored.call) == {"virus", "other"}
    frames = set(read(finished_run.folder.prediction_results).Sequence_ID)
    assert all(f"{name}{frame}" in frames for name, frame in zip(scored_ids, scored.best_frame, strict=True))


def test_chunks_without_an_open_frame_say_so(finished_run: MadeRun) -> None:
    table = read(finished_run.folder.predictions)
    rest = table[table.status != "scored"]
    assert set(rest.contig) >= {"contig3", "contig10"}
    for column, value in {"status": "no_open_frame", "call": "unscored", "p_virus": "NA"}.items():
        assert set(rest[column]) == {value}


def test_contigs_are_the_sums_of_their_chunks(finished_run: MadeRun) -> None:
    chunks = read(finished_run.folder.predictions)
    contigs = read(finished_run.folder.contigs)
    assert list(contigs.columns) == list(CONTIG_COLUMNS)
    assert contigs.record.tolist() == list(range(1, 41))
    assert contigs.contig.tolist() == finished_run.store.record_names(0, 40)
    for contig in contigs.itertuples():
        own = chunks[chunks.contig == contig.contig]
        scored = own[own.status == "scored"]
        assert (contig.chunks, contig.scored_chunks) == (len(own), len(scored))
        assert contig.viral_chunks == (own.call == "virus").sum()
        if len(scored):
            mean = scored.p_virus.astype(float).mean()
            assert float(contig.mean_p) == pytest.approx(mean, abs=2e-6)
            assert float(contig.share_viral) == pytest.approx(
                (own.call == "virus").sum() / len(scored), abs=1e-6
            )
            assert contig.call == ("virus" if mean >= 0.5 else "other")
        else:
            nothing = (contig.share_viral, contig.mean_p, contig.call, contig.tier)
            assert nothing == ("NA", "NA", "unscored", "NA")
        assert (contig.tier == "NA") == (contig.call == "unscored")


@pytest.mark.parametrize("name", ["predictions", "contigs", "regions"])
def test_parquet_is_the_table(finished_run: MadeRun, name: str) -> None:
    folder = finished_run.folder
    table = pd.read_csv(getattr(folder, name), sep="\t", keep_default_na=False, na_values=["NA"])
    parquet = pd.read_parquet(getattr(folder, f"{name}_parquet"))
    for column, error in {
        "p_virus": 5.1e-7,
        "share_viral": 5.1e-7,
        "mean_p": 5.1e-7,
        "score": 5.1e-3,
    }.items():
        if column in parquet:
            np.testing.assert_allclose(table[column], parquet[column], atol=error)
            table = table.drop(columns=column)
            parquet = parquet.drop(columns=column)
    pd.testing.assert_frame_equal(table, parquet)
    assert pq.read_metadata(getattr(folder, f"{name}_parquet")).num_row_groups == 1


def test_regions_are_those_of_the_chunks(finished_run: MadeRun) -> None:
    chunks = read(finished_run.folder.predictions)
    contigs = read(finished_run.folder.contigs)
    places = {name: number for number, name in enumerate(contigs.contig)}
    scores = ChunkScores(
        contig=chunks.contig.map(places).to_numpy(),
        start=chunks.start.to_numpy() - 1,
        end=chunks.end.to_numpy(),
        p_virus=chunks.p_virus.replace("NA", "nan").astype(float).to_numpy(),
        is_dna_alone=(chunks.status == "dna_alone").to_numpy(),
    )
    expected = [(contigs.contig[r.contig], r.start + 1, r.end, r.chunks) for r in find_regions(scores)]
    regions = read(finished_run.folder.regions)
    assert list(regions[["contig", "start", "end", "chunks"]].itertuples(index=False, name=None)) == expected
    assert len(expected) > 3


def test_viral_contigs_are_those_of_the_input(finished_run: MadeRun, contigs: Path) -> None:
    called = read(finished_run.folder.contigs).query("call == 'virus'")
    with contigs.open() as file:
        bases = [str(record.seq) for record in SeqIO.parse(file, "fasta")]
    with gzip.open(finished_run.folder.viral_contigs, "rt") as file:
        found = list(SeqIO.parse(file, "fasta"))
    assert [record.id for record in found] == called.contig.tolist()
    assert [str(record.seq) for record in found] == [bases[number - 1] for number in called.record]
    assert [record.description for record in found] == [
        f"{row.contig} mean_p={float(row.mean_p):.6f} tier={row.tier}" for row in called.itertuples()
    ]
    assert 0 < len(found) < len(bases)


def test_blocks_change_nothing(finished_run: MadeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    before = all_tables(finished_run.folder)
    counts = [write_tables(finished_run.folder, finished_run.store)]
    for size in (1, 2, 5):
        monkeypatch.setattr(tables, "_BLOCK_CHUNKS", size)
        counts.append(write_tables(finished_run.folder, finished_run.store))
        assert all_tables(finished_run.folder) == before
    assert counts[1:] == counts[:1] * 3
    assert counts[0].contigs_virus + counts[0].contigs_other + counts[0].contigs_unscored == 40
    assert counts[0].chunks == finished_run.store.num_chunks


def with_scores(run: MadeRun, root: Path, values: list[float]) -> RunFolder:
    """A copy of a run with these P(virus) for its rows, over and over."""
    folder = RunFolder(root)
    root.mkdir()
    folder.embeddings.write_bytes(run.folder.embeddings.read_bytes())
    with h5py.File(folder.embeddings, "r+") as file:
        p_virus = np.resize(np.array(values, np.float32), len(file["scores"]))
        file["scores"][...] = np.stack([np.float32(1) - p_virus, p_virus], axis=1)
    return folder


@pytest.mark.parametrize("threshold", [0.5, 0.9])
def test_everything_says_the_same_of_scores_about_the_threshold(
    finished_run: MadeRun, tmp_path: Path, threshold: float
) -> None:
    near = [threshold + step for step in (-3e-7, -1e-7, 0, 1e-7, 3e-7, -2e-2, 2e-2)]
    folder = with_scores(finished_run, tmp_path / "run", near)
    counts = write_tables(folder, finished_run.store, threshold)
    chunks = read(folder.predictions).query("status == 'scored'")
    assert {"0.499999", "0.500000"} <= set(chunks.p_virus) or threshold != 0.5
    assert ((chunks.p_virus.astype(float) >= threshold) == (chunks.call == "virus")).all()
    parquet = pd.read_parquet(folder.predictions_parquet).query("status == 'scored'")
    assert ((parquet.p_virus >= threshold) == (parquet.call == "virus")).all()
    contigs = read(folder.contigs)
    scored = contigs.query("call != 'unscored'")
    assert ((scored.mean_p.astype(float) >= threshold) == (scored.call == "virus")).all()
    single = contigs.query("chunks == 1 and call != 'unscored'")
    assert {"virus", "other"} == set(single.call)
    regions = set(read(folder.regions).contig)
    assert (single.contig.isin(regions) == (single.call == "virus")).all()
    places = range(len(contigs))
    drawn = read_tracks(folder.predictions, places, counts.chunks)
    assert drawn.histogram[round(threshold * 50) :].sum() == counts.viral_chunks


def test_the_tables_of_virnucpro_do_not_depend_on_the_threshold(
    finished_run: MadeRun, tmp_path: Path
) -> None:
    folder = with_scores(finished_run, tmp_path / "run", [0.1, 0.4, 0.5, 0.6, 0.8, 0.9])
    usual = write_tables(folder, finished_run.store), all_tables(folder)
    strict = write_tables(folder, finished_run.store, 0.75), all_tables(folder)
    assert strict[0].viral_chunks < usual[0].viral_chunks
    assert strict[0].contigs_virus < usual[0].contigs_virus
    changed = {name for name, content in strict[1].items() if content != usual[1][name]}
    kept = {"prediction_results.txt", "prediction_results_highestscore.csv", "embeddings.h5", "rejected.tsv"}
    assert not kept & changed
    assert {"predictions.tsv", "contigs.tsv", "regions.tsv", "viral_contigs.fa.gz"} <= changed


def test_no_open_frame_at_all(tmp_path: Path, made_models: MadeModels) -> None:
    fasta = tmp_path / "in.fa"
    fasta.write_text(f">a\n{NO_OPEN_FRAME}\n>empty\n\n>b\n{NO_OPEN_FRAME}\n")
    run = plan_run(tmp_path / "run", fasta, made_models.config())
    aggregate(run.folder, run.plan, run.store)
    counts = write_tables(run.folder, run.store)
    assert (counts.records, counts.rejected, counts.scored_chunks, counts.contigs_unscored) == (2, 1, 0, 2)
    assert read(run.folder.contigs).contig.tolist() == ["a", "b"]
    assert run.folder.highest_score.read_text() == "Modified_ID\tIs_Virus\n"
    assert read(run.folder.rejected).id.tolist() == ["empty"]
    assert read(run.folder.contigs).tier.tolist() == ["NA", "NA"]
    assert len(read(run.folder.regions)) == counts.regions == 0
    assert run.folder.regions_bed.read_text() == ""
    assert gzip.decompress(run.folder.viral_contigs.read_bytes()) == b""
    assert pd.read_parquet(run.folder.predictions_parquet).p_virus.isna().all()
    assert pd.read_parquet(run.folder.contigs_parquet).call.tolist() == ["unscored", "unscored"]


def test_embeddings_of_another_run_are_refused(
    tmp_path: Path, finished_run: MadeRun, made_models: MadeModels
) -> None:
    fasta = tmp_path / "in.fa"
    fasta.write_text(">a\nATGAAAGTTCTG\n")
    run = plan_run(tmp_path / "run", fasta, made_models.config())
    run.folder.embeddings.write_bytes(finished_run.folder.embeddings.read_bytes())
    with pytest.raises(MismatchError, match="different runs"):
        write_tables(run.folder, run.store)
    run.folder.embeddings.write_bytes(b"nothing")
    with pytest.raises(DamagedFileError, match="cannot be read"):
        write_tables(run.folder, run.store)
    assert not run.folder.predictions.exists()
