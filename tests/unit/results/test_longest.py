"""A run over the longest ORFs of chunks, with a head that was trained for them."""

from pathlib import Path

import h5py
import numpy as np
import pandas as pd
import pytest
import torch

from tests.made_models import (
    MadeModels,
    MadeRun,
    make_contig_head,
    plan_run,
    write_results,
)
from tests.slow_frames import slow_strands
from virnuc_core.errors import MismatchError, UsageError
from virnuc_core.inference.plan import read_plan
from virnuc_core.inference.planning import index_inputs
from virnuc_core.models.catalogue import chunks_of
from virnuc_core.models.heads import ContigHead, load_head, save_head
from virnuc_core.results.embeddings import Embeddings
from virnuc_core.results.inspect import inspect_path
from virnuc_core.results.rescore import score_embeddings
from virnuc_core.sequences.frame_store import FrameStore, StoreMeta
from virnuc_core.sequences.frames import FRAME_NAMES
from virnuc_core.specs import CHUNKS_BY_RECORD


def read(path: Path) -> pd.DataFrame:
    return pd.read_csv(path, sep="\t", keep_default_na=False)


def test_codes_are_those_of_the_stored_vectors_and_sizes(
    longest_run: MadeRun, made_models: MadeModels
) -> None:
    head, store = load_head(made_models.longest_head), longest_run.store
    assert store.dna is not None
    with Embeddings(longest_run.folder.embeddings, own=True) as file:
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
    margin = head.virus_margin(head.chunk(torch.from_numpy(codes).float())) / head.chunk_temperature
    np.testing.assert_allclose(scores[:, 1], margin.sigmoid(), atol=1e-5)


def test_a_head_for_open_frames_keeps_no_promise(made_models: MadeModels) -> None:
    for changes in ({"fdr": 0.05}, {"prior": 0.05}):
        with pytest.raises(UsageError, match=r"need a calibrated head.* head\.safetensors is not one"):
            chunks_of(made_models.config(**changes))
        chunks_of(made_models.config(**changes, head=str(made_models.longest_head)))


def test_stored_starts_are_where_the_dna_begins(
    longest_run: MadeRun, finished_run: MadeRun, made_models: MadeModels, tmp_path: Path
) -> None:
    store = FrameStore.open(longest_run.folder.frames)
    assert store.dna is not None
    assert store.protein is not None
    rows = zip(store.frame_chunk, store.frame_number, store.frame_start, store.dna.to_strings(), strict=True)
    for chunk, frame, start, dna in rows:
        bases = store.sequence(store.chunk_record[chunk]).decode()
        strands = dict(slow_strands(bases[store.chunk_start[chunk] : store.chunk_end[chunk]]))
        assert strands[FRAME_NAMES[frame][0]][start : start + len(dna)] == dna
    assert store.dna.lengths.tolist() == (3 * store.protein.lengths).tolist()

    with Embeddings(longest_run.folder.embeddings, own=True) as file:
        assert (file.frames, file.attrs["frames"]) == ("longest", "longest")
        assert file.starts is not None
        assert file.starts.tolist() == store.frame_start.tolist() == file.as_dataframe().start.tolist()
    with h5py.File(tmp_path / "y.h5", "w") as other:
        other["ids"], other["dna"], other["protein"] = ["a"], np.zeros((1, 96)), np.zeros((1, 96))
        other.attrs["frames"] = "longest"
    with pytest.raises(UsageError, match="scores the longest ORFs and needs their 'sizes'"):
        score_embeddings(tmp_path / "y.h5", str(made_models.longest_head), tmp_path / "y.tsv")
    save_head(make_contig_head(100, 92), tmp_path / "of_other_models.safetensors", {})
    with pytest.raises(MismatchError, match="of width 100 and 92, but the embeddings are 96 and 96 wide"):
        score_embeddings(tmp_path / "y.h5", str(tmp_path / "of_other_models.safetensors"), tmp_path / "y.tsv")
    with Embeddings(finished_run.folder.embeddings, own=True) as file:
        assert (file.frames, file.starts) == ("open", None)


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
    index_inputs(parts.folder, [str(fasta)], CHUNKS_BY_RECORD, "dna", "longest")
    assert StoreMeta.read(parts.folder.frames) == parts.store.meta
    parts.compute(range(1, len(parts.plan.shards)))
    for made in (whole, parts):
        write_results(made)
    first, second = (read(made.folder.chunks) for made in (whole, parts))
    sizes = (first.end - first.start + 1).groupby(first.seq_name, sort=False).max()
    assert sizes.tolist() == [150, 500, 500, 1000, 1000, 1000, 1000, 1000]
    np.testing.assert_allclose(first.virus_score, second.virus_score, atol=0.02)
    fresh = plan_run(tmp_path / "fresh", fasta, config, shard_seconds=0.02)
    fresh.compute()
    write_results(fresh)
    for path in (*parts.folder.shards.iterdir(), *parts.folder.results):
        if path.exists():
            assert path.read_bytes() == (fresh.folder.root / path.relative_to(parts.folder.root)).read_bytes()


def test_a_run_is_not_resumed_with_a_head_for_other_frames(
    longest_run: MadeRun, contigs: Path, made_models: MadeModels
) -> None:
    config = made_models.config()
    with pytest.raises(MismatchError, match=r"frames: was longest, now open\n.* another --out"):
        index_inputs(longest_run.folder, [str(contigs)], config.chunk_length, "dna", chunks_of(config)[1])


def test_a_head_for_vectors_of_other_widths_is_refused_when_planning(
    contigs: Path, made_models: MadeModels, tmp_path: Path
) -> None:
    # As wide together, but not each.
    save_head(make_contig_head(100, 92), tmp_path / "head.safetensors", {})
    config = made_models.config(head=str(tmp_path / "head.safetensors"))
    message = "takes DNA and protein embeddings of width 100 and 92, but dnabert gives 96 and .* gives 96"
    with pytest.raises(MismatchError, match=message):
        plan_run(tmp_path / "run", contigs, config)
    facts = inspect_path(tmp_path / "head.safetensors").facts
    assert facts["classes"] == "phage, other virus, bacterium, plasmid"
    assert facts["frames"] == "longest ORFs"
