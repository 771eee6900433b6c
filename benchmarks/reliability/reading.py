"""Functions that read a hostile file, and invariants of what they accept."""

import json
from pathlib import Path
from typing import Final

from benchmarks.reliability import material
from virnuc_core.batching.tokenizers import DnabertTokenizer
from virnuc_core.columns import ByteColumn
from virnuc_core.errors import VirnucError
from virnuc_core.inference.events import LaneFailed, LaneStarted
from virnuc_core.inference.lane_journal import JournalTail, lane_report, raise_failure
from virnuc_core.inference.plan import read_plan, require_same_plan
from virnuc_core.inference.shard import pending_shards, read_identity
from virnuc_core.models.classifier import load_classifier
from virnuc_core.models.hub import open_checkpoint
from virnuc_core.results.aggregate import aggregate
from virnuc_core.results.integrity import inspect_path
from virnuc_core.results.rescore import score_embeddings
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.frame_store import FrameStore, write_frames_tsv
from virnuc_core.sequences.frame_store_build import build_frame_store
from virnuc_core.specs import Alphabet

_DNA: Final = ("ACGT" * 40, "ACGTNNNNACGT", "", "acgtRYKM", "A" * 300)
_ROWS: Final = 4096


def _read_sequences(path: Path, alphabet: Alphabet) -> None:
    """Builds a store, and checks the rows and cells of its tables."""
    is_dna = alphabet == "dna"
    rejected = path.with_name("rejected.tsv")
    store = build_frame_store(
        [path],
        path.with_name("store"),
        material.CHUNK_LENGTH if is_dna else None,
        alphabet,
        rejected_copy=rejected,
    )
    lines = rejected.read_text(encoding="utf-8").splitlines()
    _require(len(lines) == store.meta.num_rejected + 1, "rejected.tsv has other rows than records rejected")
    _require(all(line.count("\t") == 4 for line in lines), "rejected.tsv has torn rows")
    for name in store.record_names(0, store.num_records):
        _require(name.isprintable() and name[0] not in "=+-@\"'", f"the name {name!r} can do harm")
        _require(len(name.encode()) <= 1100, f"the name {name[:20]!r}... is too long")
    if is_dna:
        table = path.with_name("frames.tsv")
        write_frames_tsv(store, table)
        rows = table.read_text(encoding="utf-8").splitlines()
        _require(len(rows) == store.num_frames + 1, "the table of frames has other rows than frames")


def _require(condition: bool, otherwise: str) -> None:
    """Raises if virnuc accepted an input wrongly."""
    if not condition:
        raise AssertionError(otherwise)


def read_dna(path: Path) -> None:
    """DNA records, to frames and tables."""
    _read_sequences(path, "dna")


def read_protein(path: Path) -> None:
    """Protein records."""
    _read_sequences(path, "protein")


def read_tokenizer(path: Path) -> None:
    """A tokenizer, applied to some DNA."""
    tokenizer = DnabertTokenizer(path)
    ids = tokenizer.encode(ByteColumn.from_strings(_DNA)).input_ids
    _require(bool((ids >= 0).all() and (ids < tokenizer.vocab_size).all()), "ids outside of the vocabulary")


def read_model(path: Path) -> None:
    """A checkpoint by its file, or by its folder if it has configuration files."""
    location = path.parent if (path.parent / "config.json").exists() else path
    _require(inspect_path(location).summary.replace("\n", "").isprintable(), "the summary can do harm")
    checkpoint = open_checkpoint(str(location), None)
    state = checkpoint.state_dict()
    _require(all(tensor.is_floating_point() for tensor in state.values()), "weights that are no real numbers")


def read_head(path: Path) -> None:
    """A classifier head."""
    _require(inspect_path(path).summary.replace("\n", "").isprintable(), "the summary can do harm")
    load_classifier(path)


def read_shard(path: Path) -> None:
    """A shard, as `virnuc inspect`, a resumed run and the aggregation read it."""
    folder = RunFolder(path.parents[1])
    inspect_path(path)
    plan = read_plan(folder.plan)
    if not pending_shards(folder, plan):
        aggregate(folder, plan, FrameStore.open(folder.frames), folder.root / "again.h5")
    for aside in folder.shards.glob("*.damaged-*"):
        aside.unlink()
    if path.exists():
        read_identity(path)


def read_embeddings(path: Path) -> None:
    """An embeddings file, as `virnuc inspect` and `virnuc score` read it."""
    _require(inspect_path(path).summary.replace("\n", "").isprintable(), "the summary can do harm")
    scores = path.with_name("scores.tsv")
    rows = score_embeddings(path, str(path.parents[1] / "head.safetensors"), scores)
    lines = scores.read_text(encoding="utf-8").splitlines()
    _require(len(lines) == rows + 1, "the table has other rows than the file")


def read_run(path: Path) -> None:
    """A run's folder, as `virnuc inspect` and a resumed run read it."""
    folder = RunFolder(path.parent)
    _require(inspect_path(folder.root).summary.replace("\n", "").isprintable(), "the summary can do harm")
    plan = read_plan(folder.plan)
    require_same_plan(plan, plan, folder)
    pending_shards(folder, plan)


def read_store(path: Path) -> None:
    """A frame store, with its ids if its checksum is valid."""
    inspected = inspect_path(path.parent)
    store = FrameStore.open(path.parent)
    if inspected.is_complete:
        for begin in range(0, store.num_frames, _ROWS):
            store.frame_ids(begin, min(begin + _ROWS, store.num_frames))


def read_journal(path: Path) -> None:
    """A lane's journal, as the lane's run reads it."""
    entries = JournalTail(path).read_new()
    if any(isinstance(entry.event, LaneStarted) for entry in entries):
        json.dumps(lane_report(entries).seconds)
    for entry in entries:
        if isinstance(entry.event, LaneFailed):
            try:
                raise_failure(entry.event)
            except VirnucError:
                continue
