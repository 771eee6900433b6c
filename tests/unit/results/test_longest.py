"""A run over the longest stop-free stretches of chunks, with a head that was trained for them."""

import gzip
import os
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
import pytest
import torch

from tests.made_models import (
    NO_OPEN_FRAME,
    MadeModels,
    MadeRun,
    copy_of,
    make_contig_head,
    plan_run,
    write_results,
)
from tests.slow_frames import slow_strands
from virnuc_core.errors import MismatchError, UsageError
from virnuc_core.inference import CPU_LIBRARIES
from virnuc_core.inference.device import cpu_has_fast_bf16
from virnuc_core.inference.plan import read_plan
from virnuc_core.inference.planning import index_inputs
from virnuc_core.models.catalogue import frames_of, require_head
from virnuc_core.models.heads import ContigHead, load_head, save_head
from virnuc_core.results import tables
from virnuc_core.results.aggregate import aggregate
from virnuc_core.results.embeddings import Embeddings
from virnuc_core.results.fdr import call_at_fdr, estimate_mixture
from virnuc_core.results.inspect import inspect_path
from virnuc_core.results.regions import ChunkScores, find_regions
from virnuc_core.results.rescore import score_embeddings
from virnuc_core.results.tables import write_tables
from virnuc_core.sequences.frame_store import FrameStore
from virnuc_core.sequences.frames import FRAME_NAMES
from virnuc_core.specs import CHUNKS_BY_RECORD


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, contigs: Path, made_models: MadeModels) -> MadeRun:
    """The same as `finished_run`, with the other head."""
    config = made_models.config(head=str(made_models.longest_head))
    made = plan_run(tmp_path_factory.mktemp("longest"), contigs, config)
    made.compute()
    write_results(made)
    return made


def tables_of(run: MadeRun) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in run.folder.results if path.exists()}


def read(path: Path) -> pd.DataFrame:
    return pd.read_csv(path, sep="\t", keep_default_na=False)


def test_the_head_decides_what_is_embedded(run: MadeRun, finished_run: MadeRun) -> None:
    rules = [(one.store.meta.frames, read_plan(one.folder.plan).frames) for one in (run, finished_run)]
    assert rules == [("longest", "longest"), ("open", "open")]


def test_automatic_precision_is_recorded(run: MadeRun, finished_run: MadeRun) -> None:
    found = [{model.precision for model in read_plan(one.folder.plan).models} for one in (run, finished_run)]
    assert found == [{"bf16" if cpu_has_fast_bf16() else "fp32"}, {"fp32"}]


def test_every_chunk_with_a_stretch_has_a_score(run: MadeRun, finished_run: MadeRun) -> None:
    chunks, open_chunks = read(run.folder.predictions), read(finished_run.folder.predictions)
    is_scored = np.isin(np.arange(run.store.num_chunks), run.store.frame_chunk)
    assert (chunks.status == np.where(is_scored, "scored", "no_stretch")).all()
    assert set(chunks.status) == {"scored", "no_stretch"}
    assert is_scored.sum() > (open_chunks.status == "scored").sum()
    assert len(read(run.folder.prediction_results)) == run.store.num_frames
    assert len(read(run.folder.highest_score)) == is_scored.sum()


def test_codes_are_those_of_the_stored_vectors_and_sizes(run: MadeRun, made_models: MadeModels) -> None:
    head, store = load_head(made_models.longest_head), run.store
    assert store.dna is not None
    with Embeddings(run.folder.embeddings, own=True) as file:
        dna, protein, sizes, codes, scores = (
            file.rows(name, 0, len(file)) for name in ("dna", "protein", "sizes", "codes", "scores")
        )
    bases = (store.chunk_end - store.chunk_start)[store.frame_chunk]
    assert sizes.tolist() == np.stack((store.dna.lengths // 3, bases), axis=1).tolist()
    assert len(set(bases.tolist())) > 1
    assert (codes.dtype, codes.shape) == (np.float16, (store.num_frames, 64))
    assert isinstance(head, ContigHead)
    expected = head.row_codes(*map(torch.from_numpy, (dna, protein, sizes))).numpy()
    np.testing.assert_allclose(codes, expected, atol=4e-3)
    margin = head.chunk_margin(head.chunk(torch.from_numpy(codes).float()))
    np.testing.assert_allclose(scores[:, 1], margin.sigmoid(), atol=1e-5)


def test_calls_are_those_of_each_contig_alone(run: MadeRun, made_models: MadeModels) -> None:
    head, store = load_head(made_models.longest_head), run.store
    assert isinstance(head, ContigHead)
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
        assert contig.mean_p == pytest.approx(p_chunk.mean(), abs=1e-5)
        assert (contig.scored_chunks, contig.viral_chunks) == (len(own), (p_chunk >= 0.5).sum())
        [other, viral] = found.logits[0].tensor_split([virus])[::-1]
        is_viral = contig.p_virus >= 0.5
        assert contigs["class"][record] == names[viral.argmax() if is_viral else other.argmax() + virus]
        p_context[own] = head.chunk_margin(found.context).sigmoid().numpy()
    assert set(contigs.call) == {"virus", "other", "unscored"}
    assert (contigs.call != np.where(contigs.mean_p >= 0.5, "virus", "other"))[
        contigs.call != "unscored"
    ].any()
    scores = ChunkScores(
        contig=store.chunk_record, start=store.chunk_start, end=store.chunk_end, p_virus=p_context
    )
    expected = [(contigs.contig[r.contig], r.start + 1, r.end) for r in find_regions(scores)]
    regions = pd.read_parquet(run.folder.regions_parquet)[["contig", "start", "end"]]
    assert list(regions.itertuples(index=False, name=None)) == expected
    assert len(expected) > 3
    with gzip.open(run.folder.viral_contigs, "rt") as file:
        names = [line[1:].rstrip("\n") for line in file if line.startswith(">")]
    assert names == contigs.contig[contigs.call == "virus"].tolist()


def test_novel_contigs_are_unsure(run: MadeRun, made_models: MadeModels, tmp_path: Path) -> None:
    made, usual = copy_of(run, tmp_path / "run"), copy_of(run, tmp_path / "usual")
    head = contig_head(made_models, 0.3)
    write_tables(usual.folder, usual.store, head)
    with (
        Embeddings(run.folder.embeddings, own=True) as file,
        tables.scoring_contigs(head, run.store, file) as blocks,
    ):
        embeddings = np.concatenate([block.embedding for block in blocks])
    is_scored = ~np.isnan(embeddings[:, 0])
    centroids = embeddings[is_scored][:4]
    expected = 1 - (embeddings @ centroids.T).max(1)
    limit = float(np.nanmedian(expected))
    head.centroids = torch.from_numpy(centroids)
    head.novelty_limit.fill_(limit)
    write_tables(made.folder, made.store, head)
    found, without = (pd.read_parquet(one.folder.contigs_parquet) for one in (made, usual))
    assert without.novelty.isna().all()
    np.testing.assert_allclose(found.novelty, expected, atol=1e-6)
    is_novel = found.novelty.to_numpy() > limit
    assert 0 < is_novel.sum() < is_scored.sum()
    assert set(found.tier[is_novel]) == {"unsure"}
    assert "likely" in set(without.tier[is_novel])
    assert found.tier[~is_novel].equals(without.tier[~is_novel])
    same = ["contig", "call", "p_virus", "class", "mean_p"]
    pd.testing.assert_frame_equal(found[same], without[same])


def test_a_chunk_of_one_row_has_the_score_of_its_row(run: MadeRun) -> None:
    frames = read(run.folder.prediction_results)
    chunk, counts = np.unique(run.store.frame_chunk, return_counts=True)
    single = chunk[counts == 1]
    assert len(single) > 5
    rows = np.searchsorted(run.store.frame_chunk, single)
    p_virus = pd.read_parquet(run.folder.predictions_parquet).p_virus[single]
    np.testing.assert_allclose(p_virus, frames.score2[rows].astype(float), atol=1e-5)


def test_the_tables_do_not_depend_on_threads_or_much_on_blocks(
    run: MadeRun, made_models: MadeModels, tmp_path: Path
) -> None:
    made = copy_of(run, tmp_path / "run")
    head = load_head(made_models.longest_head)
    assert isinstance(head, ContigHead)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        write_tables(made.folder, made.store, head)
    finally:
        torch.set_num_threads(before)
    assert tables_of(made) == tables_of(run)
    for size in (1, 7):
        write_tables(made.folder, made.store, head, block_chunks=size)
        for name in ("contigs_parquet", "predictions_parquet", "regions_parquet"):
            found, expected = (pd.read_parquet(getattr(one.folder, name)) for one in (made, run))
            pd.testing.assert_frame_equal(found, expected, atol=1e-3)


def contig_head(made_models: MadeModels, temperature: float | None = None) -> ContigHead:
    """A low temperature makes probabilities of contigs extreme."""
    head = load_head(made_models.longest_head)
    assert isinstance(head, ContigHead)
    if temperature is not None:
        head.contig_temperature.copy_(torch.tensor([temperature, 0.0]))
    return head


@pytest.mark.parametrize("block", [1 << 16, 7])
@pytest.mark.parametrize(("fdr", "is_strict"), [(0.0001, True), (0.05, True), (0.6, False), (0.999, False)])
def test_contigs_are_called_at_a_promised_rate(
    run: MadeRun,
    made_models: MadeModels,
    tmp_path: Path,
    fdr: float,
    is_strict: bool,
    block: int,
) -> None:
    made, head = copy_of(run, tmp_path / "run"), contig_head(made_models, 0.3)
    usual_calls = write_tables(made.folder, made.store, head).contigs_virus
    usual = {path: path.read_bytes() for path in made.folder.results if path.exists()}
    counts = write_tables(made.folder, made.store, head, fdr=fdr, block_chunks=block)
    contigs = pd.read_parquet(made.folder.contigs_parquet)
    p_virus = contigs.p_virus.to_numpy(np.float64)
    mixture = estimate_mixture(p_virus)
    expected = call_at_fdr(p_virus, mixture, fdr)
    assert (contigs.call == "virus").tolist() == expected.is_virus.tolist()
    assert counts.contigs_virus == expected.is_virus.sum()
    assert (counts.contigs_virus < usual_calls) == is_strict
    assert (counts.contigs_virus > 0) == (fdr > 0.001)
    sample = counts.sample
    assert sample is not None
    assert (sample.prior, sample.share, sample.share_low) == (0.5, mixture.share, mixture.share_low)
    assert (sample.fdr, sample.threshold) == (fdr, expected.threshold)
    assert (sample.expected_fdr, sample.expected_false) == (expected.expected_fdr, expected.expected_false)
    table = read(made.folder.contigs)
    for row in table[table.call != "unscored"].itertuples():
        limit = np.inf if sample.threshold is None else sample.threshold
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
    run: MadeRun, made_models: MadeModels, tmp_path: Path, threshold: float
) -> None:
    made = copy_of(run, tmp_path / "run")
    counts = write_tables(made.folder, made.store, contig_head(made_models), threshold)
    p_virus = pd.read_parquet(made.folder.contigs_parquet).p_virus.to_numpy(np.float64)
    at_share = estimate_mixture(p_virus).p_virus[p_virus >= threshold]
    assert counts.contigs_virus == len(at_share)
    sample = counts.sample
    assert sample is not None
    assert (sample.fdr, sample.threshold) == (None, threshold)
    assert sample.expected_false == pytest.approx((1 - at_share).sum())
    assert sample.expected_fdr == pytest.approx((1 - at_share).mean())


@pytest.mark.parametrize("fdr", [None, 0.1])
@pytest.mark.parametrize(("sequences", "scored"), [([NO_OPEN_FRAME] * 2, 0), (["ACGGCA" * 40], 1)])
def test_a_sample_of_one_contig_and_of_none_with_a_score(
    made_models: MadeModels, tmp_path: Path, sequences: list[str], scored: int, fdr: float | None
) -> None:
    fasta = tmp_path / "in.fa"
    fasta.write_text("".join(f">c{i}\n{sequence}\n" for i, sequence in enumerate(sequences)))
    config = made_models.config(head=str(made_models.longest_head), fdr=fdr)
    made = plan_run(tmp_path / "run", fasta, config)
    made.compute()
    aggregate(made.folder, made.plan, made.store)
    counts = write_tables(made.folder, made.store, contig_head(made_models), fdr=made.plan.fdr)
    assert counts.contigs_unscored == len(sequences) - scored
    assert (counts.sample is None) == (scored == 0)
    if counts.sample:
        assert counts.sample.fdr == fdr
        assert 0 < counts.sample.share_low <= counts.sample.share < 1
    else:
        assert set(read(made.folder.contigs).call) == {"unscored"}


def test_a_head_for_open_frames_keeps_no_promise(
    contigs: Path, made_models: MadeModels, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=r"--fdr 0\.05 needs .* head\.safetensors gives none"):
        plan_run(tmp_path / "run", contigs, made_models.config(fdr=0.05))
    with pytest.raises(UsageError, match="needs calibrated probabilities"):
        require_head(made_models.config(fdr=0.05))
    require_head(made_models.config(fdr=0.05, head=str(made_models.longest_head)))


def test_a_new_process_gives_the_same_tables(run: MadeRun, tmp_path: Path) -> None:
    made = copy_of(run, tmp_path / "run")
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
    assert tables_of(made) == tables_of(run)


def test_stored_starts_are_where_the_dna_begins(
    run: MadeRun, finished_run: MadeRun, made_models: MadeModels, tmp_path: Path
) -> None:
    store = FrameStore.open(run.folder.frames)
    assert store.dna is not None
    assert store.protein is not None
    rows = zip(store.frame_chunk, store.frame_number, store.frame_start, store.dna.to_strings(), strict=True)
    for chunk, frame, start, dna in rows:
        bases = store.sequence(store.chunk_record[chunk]).decode()
        strands = dict(slow_strands(bases[store.chunk_start[chunk] : store.chunk_end[chunk]]))
        assert strands[FRAME_NAMES[frame][0]][start : start + len(dna)] == dna
    assert store.dna.lengths.tolist() == (3 * store.protein.lengths).tolist()

    with Embeddings(run.folder.embeddings, own=True) as file:
        assert (file.frames, file.attrs["frames"]) == ("longest", "longest")
        assert file.starts is not None
        assert file.starts.tolist() == store.frame_start.tolist() == file.as_dataframe().start.tolist()
    with h5py.File(tmp_path / "y.h5", "w") as other:
        other["ids"], other["dna"], other["protein"] = ["a"], np.zeros((1, 96)), np.zeros((1, 96))
        other.attrs["frames"] = "longest"
    with pytest.raises(UsageError, match="is for the longest stop-free stretches and needs their 'sizes'"):
        score_embeddings(tmp_path / "y.h5", str(made_models.longest_head), tmp_path / "y.tsv")
    with Embeddings(finished_run.folder.embeddings, own=True) as file:
        assert (file.frames, file.starts) == ("open", None)


def test_vectors_are_scored_by_a_head_for_them_only(
    run: MadeRun, finished_run: MadeRun, made_models: MadeModels, tmp_path: Path
) -> None:
    out = tmp_path / "scores.tsv"
    assert score_embeddings(run.folder.embeddings, str(made_models.longest_head), out) == run.store.num_frames
    assert out.read_bytes() == run.folder.prediction_results.read_bytes()
    for made, head, message in (
        (
            run,
            made_models.head,
            "for the open reading frames of chunks, and these .* longest stop-free stretches",
        ),
        (
            finished_run,
            made_models.longest_head,
            "longest stop-free stretches of chunks, .* open reading frames",
        ),
    ):
        with pytest.raises(MismatchError, match=message):
            score_embeddings(made.folder.embeddings, str(head), out)


def test_records_of_every_length_are_cut_by_their_own(made_models: MadeModels, tmp_path: Path) -> None:
    """Records of 150 bp to 30 kb: calls do not depend on the shards, on an interruption or on the other records."""
    lengths = [150, 700, 1999, 2000, 4999, 5000, 9001, 30_000]
    letters = np.random.default_rng(0)
    dna = ["".join(letters.choice(list("ACGT"), length)) for length in lengths]
    fasta = tmp_path / "contigs.fa"
    fasta.write_text("".join(f">r{length}\n{record}\n" for length, record in zip(lengths, dna, strict=True)))
    config = made_models.config(head=str(made_models.longest_head), chunk_length="auto")
    whole = plan_run(tmp_path / "whole", fasta, config, shard_seconds=60)
    parts = plan_run(tmp_path / "parts", fasta, config, shard_seconds=0.02)
    for made in (whole, parts):
        assert made.plan.chunk_length == made.plan.fingerprint_fields["chunk_length"] == CHUNKS_BY_RECORD
        assert read_plan(made.folder.plan) == made.plan
    assert len(whole.plan.shards) < len(parts.plan.shards)
    whole.compute()
    parts.compute([0])
    with pytest.raises(MismatchError, match=r"chunk_length: was auto:500<2000.*, now 500\n"):
        index_inputs(parts.folder, [str(fasta)], 500, "dna", "longest")
    assert index_inputs(parts.folder, [str(fasta)], CHUNKS_BY_RECORD, "dna", "longest") == parts.store.meta
    parts.compute(range(1, len(parts.plan.shards)))
    for made in (whole, parts):
        write_results(made)
    first, second = (read(made.folder.predictions) for made in (whole, parts))
    sizes = (first.end - first.start + 1).groupby(first.contig, sort=False).max()
    assert sizes.tolist() == [150, 500, 500, 1000, 1000, 1000, 1000, 1000]
    np.testing.assert_allclose(first.p_virus, second.p_virus, atol=0.02)
    fresh = plan_run(tmp_path / "fresh", fasta, config, shard_seconds=0.02)
    fresh.compute()
    write_results(fresh)
    for path in (*parts.folder.shards.iterdir(), *parts.folder.results):
        if path.exists():
            assert path.read_bytes() == (fresh.folder.root / path.relative_to(parts.folder.root)).read_bytes()
    starts = set(zip(first.contig, first.start, strict=True))
    regions = read(parts.folder.regions)
    assert set(zip(regions.contig, regions.start, strict=True)) <= starts


def test_a_run_is_not_resumed_with_a_head_for_other_frames(
    run: MadeRun, contigs: Path, made_models: MadeModels
) -> None:
    config = made_models.config()
    with pytest.raises(MismatchError, match=r"frames: was longest, now open\n.* another --out"):
        index_inputs(run.folder, [str(contigs)], config.chunk_length, "dna", frames_of(config))


def test_a_head_for_vectors_of_other_widths_is_refused_when_planning(
    contigs: Path, made_models: MadeModels, tmp_path: Path
) -> None:
    # As wide together, but not each.
    save_head(make_contig_head(100, 92), tmp_path / "head.safetensors", {})
    config = made_models.config(head=str(tmp_path / "head.safetensors"))
    message = "takes DNA and protein vectors of 100 and 92 numbers, but dnabert gives 96 and .* gives 96"
    with pytest.raises(MismatchError, match=message):
        plan_run(tmp_path / "run", contigs, config)
    facts = inspect_path(tmp_path / "head.safetensors").facts
    assert facts["classes"] == "phage, other virus, bacterium, plasmid"
    assert facts["frames"] == "longest stop-free stretches"
