"""Collects everything that a report shows, from run.json and the Parquet tables, as one JSON document of bounded size."""

import json
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from virnuc_core.errors import DamagedFileError, InputError
from virnuc_core.plain_text import cell_text, plain_name, visible
from virnuc_core.results.calls import OTHER, UNSCORED, VIRUS
from virnuc_core.results.fdr import SampleCalls
from virnuc_core.results.report.evidence import EVIDENCE_COLUMNS, read_evidence
from virnuc_core.results.report.reading import damaged, iter_batches, iter_contigs, most_important
from virnuc_core.results.report.totals import BINS, ISLAND_SHARE, UNSURE, Row, Totals, histogram
from virnuc_core.results.tables import CALL_COLUMN, PREDICTION_SCHEMAS
from virnuc_core.results.writers import NOT_AVAILABLE
from virnuc_core.run_folder import RunFolder
from virnuc_core.specs import FRAMES_IN_WORDS, ChunkRule, FrameRule, chunk_steps

LEVELS: Final = 254  # quantisation of track scores
NO_SCORE: Final = 255
MIN_TRACK_CHUNKS: Final = 4
# The document refers to calls and tiers by index.
_CALLS: Final = (VIRUS, OTHER, UNSCORED)
_TIERS: Final = ("confident", "likely", UNSURE, NOT_AVAILABLE)
UNLABELLED: Final = "(no label)"
MAX_CLASSES: Final = 200
_LABEL_HEADERS: Final = frozenset({"contig", "contig_id", "id", "name", "sequence", "record"})

VisibleText = Annotated[str, AfterValidator(visible)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Upper bounds on what a report contains; the run's tables have the rest."""

    contigs: int = 100_000
    chunks: int = 4_000_000
    evidence: int = 100_000
    regions: int = 100_000
    rejected: int = 200
    reasons: int = 20
    name_letters: int = 200
    files: int = 100
    lanes: int = 256


class _Part(BaseModel):
    """A part of run.json; fields that are not declared, such as paths of models, are not shown."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, frozen=True)


class _Counts(_Part):
    records: int
    rejected: int
    chunks: int
    scored_chunks: int
    viral_chunks: int
    contigs_virus: int
    contigs_other: int
    contigs_unscored: int


class _Spec(_Part):
    num_layers: int
    embedding_dim: int


class _Model(_Part):
    family: str
    name: VisibleText
    repr_layer: int
    precision: str
    engine: str
    attention: str
    weights_fingerprint: str
    spec: _Spec


class _Head(_Part):
    name: VisibleText


class _ModelWork(_Part):
    name: VisibleText
    family: str
    sequences: int
    tokens: int
    capacity: int
    batches: int
    fp32_batches: int
    out_of_memory: int

    @property
    def warnings(self) -> Iterator[str]:
        if self.fp32_batches:
            yield (
                f"{self.name} ({self.family}): {self.fp32_batches:,} of {self.batches:,} batches were recomputed in fp32, "
                "because a number was not finite."
            )
        if self.out_of_memory:
            yield (
                f"{self.name} ({self.family}): a batch was split {self.out_of_memory:,} times, because the device was out of "
                "memory."
            )


class _Work(_Part):
    frames: int
    residues: int
    models: list[_ModelWork]


class _Shards(_Part):
    total: int
    computed: int


class _Lane(_Part):
    lane: int
    host: str
    device: str
    device_name: str
    shards: int
    sequences: int
    sequences_per_second: float
    residues_per_second: float
    seconds: float
    load_seconds: float


class _Input(_Part):
    name: VisibleText
    size: int
    sha256: str


class RunFacts(_Part):
    """The part of run.json that a report shows."""

    out: str
    finished: str = ""
    inputs: list[_Input]
    chunk_length: ChunkRule
    frames: FrameRule
    models: list[_Model]
    head: _Head
    counts: _Counts
    work: _Work
    shards: _Shards
    stage_seconds: dict[str, float]
    lanes: list[_Lane]
    throughput: dict[str, float]
    notes: list[str]
    links: dict[str, str]
    versions: dict[str, str]
    plan_fingerprint: str
    threshold: float
    sample: SampleCalls | None = None

    @property
    def warnings(self) -> list[str]:
        """Anything unusual."""
        found = [text for model in self.work.models for text in model.warnings]
        if self.counts.rejected:
            records = "record was" if self.counts.rejected == 1 else "records were"
            found.append(f"{self.counts.rejected:,} {records} not used; rejected.tsv says why.")
        if self.counts.records and self.counts.contigs_unscored * 2 > self.counts.records:
            found.append(
                "More than half of the contigs have no score: most of them are short, or their chunks have no "
                f"{FRAMES_IN_WORDS[self.frames]}."
            )
        return found

    def document(self, limits: Limits) -> Row:
        """As JSON values, with long lists truncated."""
        values = self.model_dump()
        return {
            **values,
            "chunk_steps": chunk_steps(self.chunk_length),
            "frames_in_words": FRAMES_IN_WORDS[self.frames],
            "inputs": values["inputs"][: limits.files],
            "num_inputs": len(self.inputs),
            "lanes": values["lanes"][: limits.lanes],
            "num_lanes": len(self.lanes),
            "warnings": self.warnings,
        }


def gather(
    folder: RunFolder,
    document: Mapping[str, Any],
    labels: Mapping[str, str] | None = None,
    limits: Limits | None = None,
) -> Row:
    """The document of a report; contigs are in input order, and other parts refer to them by index.

    `document` is the content of run.json; `labels` maps contig names to classes.

    Raises:
        DamagedFileError: a table is missing, corrupt, or not of this run; or the document is not a run.json.
        OSError: rejected.tsv cannot be read.
    """
    limits = limits or Limits()
    facts = _read_facts(folder, document)
    totals, classes = Totals(), dict[str, Totals]()
    shown = most_important(
        _count(iter_contigs(folder, facts.frames), labels, totals, classes), limits.contigs
    )
    _require_count(folder, folder.contigs_parquet, "contigs", totals.values["contigs"], facts.counts.records)
    drawn = _choose_tracks(shown, facts.frames, limits.chunks)
    tracks = sorted(drawn, key=itemgetter("place"))
    histogram, levels = _read_scores(folder, facts, tracks)
    rows = {place: row for row, place in enumerate(sorted(contig["place"] for contig in shown))}
    regions = ((rows[contig["place"]], region) for contig in shown for region in contig["regions"])
    class_names = sorted(classes)
    predicted, explanation = _explain(folder, facts, drawn, rows, totals, limits.evidence)
    unknown = len(labels) - sum(totals.labelled for totals in classes.values()) if labels else 0
    return {
        "headline": _headline(facts.counts, totals.values["hosts"]),
        "sample": f"{facts.sample.in_words(facts.counts.contigs_virus)}." if facts.sample else "",
        "run": facts.document(limits),
        "call_column": CALL_COLUMN[facts.frames],
        "totals": totals.document,
        "chunk_histogram": histogram.tolist(),
        "names": {"calls": _CALLS, "tiers": _TIERS, "classes": class_names, "predicted": predicted},
        "contigs": _contig_columns(
            sorted(shown, key=itemgetter("place")),
            facts.frames,
            labels,
            class_names,
            predicted,
            limits.name_letters,
        ),
        "regions": _region_columns(sorted(islice(regions, limits.regions), key=itemgetter(0))),
        "tracks": {
            "rows": [rows[contig["place"]] for contig in tracks],
            "levels": b64encode(levels).decode(),
            "min_chunks": MIN_TRACK_CHUNKS,
        },
        "classes": [{"class": label, **classes[label].document} for label in class_names],
        "unknown_labels": unknown,
        "island_share": ISLAND_SHARE,
        "rejected": _read_rejected(folder.rejected, limits),
        **explanation,
    }


def _read_facts(folder: RunFolder, document: Mapping[str, Any]) -> RunFacts:
    try:
        return RunFacts.model_validate_json(json.dumps(document))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise DamagedFileError(
            f"{folder.report} cannot be read ({where}: {first['msg']}): run the same command again."
        ) from error


def _require_count(folder: RunFolder, path: Path, what: str, found: int, expected: int) -> None:
    if found != expected:
        raise damaged(path, f"{found:,} {what}, and {folder.report.name} has {expected:,}")


def _headline(counts: _Counts, hosts: int) -> str:
    contigs = "contig" if counts.records == 1 else "contigs"
    verb = "is" if counts.contigs_virus == 1 else "are"
    parts = [f"{counts.contigs_virus:,} of {counts.records:,} {contigs} {verb} called viral"]
    if hosts:
        parts.append(f"{hosts:,} {'other has' if hosts == 1 else 'others have'} a viral region")
    if counts.contigs_unscored:
        parts.append(
            f"{counts.contigs_unscored:,} {'has' if counts.contigs_unscored == 1 else 'have'} no score"
        )
    return "; ".join(parts) + "."


def _count(
    blocks: Iterable[tuple[pa.Table, pa.Table]],
    labels: Mapping[str, str] | None,
    totals: Totals,
    classes: dict[str, Totals],
) -> Iterator[tuple[pa.Table, pa.Table]]:
    for contigs, regions in blocks:
        totals.add(contigs)
        if labels is not None:
            found = [labels.get(name) for name in contigs["contig"].to_pylist()]
            is_labelled = np.array([label is not None for label in found])
            names = np.array([label or UNLABELLED for label in found], np.object_)
            for name in dict.fromkeys(names.tolist()):
                own = classes.setdefault(name, Totals())
                own.add(contigs.filter(pa.array(names == name)))
                own.labelled += int(is_labelled[names == name].sum())
        yield contigs, regions


def _choose(contigs: Iterable[Row], max_chunks: int, is_wanted: Callable[[Row], bool]) -> list[Row]:
    """The wanted contigs that have a score, in the given order, of up to `max_chunks` in all."""
    chosen: list[Row] = []
    for contig in contigs:
        if contig["scored_chunks"] and contig["chunks"] <= max_chunks and is_wanted(contig):
            chosen.append(contig)
            max_chunks -= contig["chunks"]
    return chosen


def _choose_tracks(contigs: Iterable[Row], frames: FrameRule, max_chunks: int) -> list[Row]:
    """Contigs with a track, in the given order: those with enough chunks or with evidence."""
    return _choose(
        contigs,
        max_chunks,
        lambda contig: (
            contig["chunks"] >= MIN_TRACK_CHUNKS or (frames == "longest" and contig["call"] == VIRUS)
        ),
    )


def _explain(
    folder: RunFolder,
    facts: RunFacts,
    contigs: Iterable[Row],
    rows: Mapping[int, int],
    totals: Totals,
    max_chunks: int,
) -> tuple[list[str], Row]:
    """Names of the predicted classes, and what only the report of a run over the longest stretches has.

    `contigs` are those with a track in order of importance; `rows` are the rows of all by their place.
    """
    if facts.frames == "open":
        return [], {}
    called = _choose(contigs, max_chunks, lambda contig: contig["call"] == VIRUS)
    batches = iter_batches(folder.predictions_parquet, PREDICTION_SCHEMAS["longest"], EVIDENCE_COLUMNS)
    evidence = read_evidence(batches, [contig["place"] for contig in called])
    names = sorted({*(name for name, _ in totals.predicted), *filter(None, evidence.classes)})
    viral = {name for name, is_virus in totals.predicted if is_virus} | evidence.viral_classes
    sums = [{"class": names.index(name), **counts} for (name, _), counts in totals.predicted.items()]
    return names, {
        "evidence": {
            "rows": sorted(rows[contig["place"]] for contig in called),
            **evidence.document(names, folder.embeddings),
        },
        "predicted": {"viral": [names.index(name) for name in sorted(viral)], "totals": sums},
    }


def _read_scores(
    folder: RunFolder, facts: RunFacts, tracks: Sequence[Row]
) -> tuple[npt.NDArray[np.int64], bytes]:
    """Histogram of all chunk scores, int64 (BINS,), and the `quantise`d scores of the contigs with a track."""
    path = folder.predictions_parquet
    counts = np.zeros(BINS, np.int64)
    wanted = np.array([contig["place"] for contig in tracks], np.int64)
    parts: list[bytes] = []
    place = -1
    for batch in iter_batches(path, PREDICTION_SCHEMAS[facts.frames], ("chunk", "p_virus")):
        p_virus = batch["p_virus"].to_numpy(zero_copy_only=False)
        counts += histogram(p_virus)
        places = place + np.cumsum(batch["chunk"].to_numpy() == 1)
        place = int(places[-1])
        parts.append(quantise(p_virus)[np.isin(places, wanted)].tobytes())
    levels = b"".join(parts)
    if len(levels) != (expected := sum(contig["chunks"] for contig in tracks)):
        raise damaged(path, f"{len(levels):,} chunks of contigs that have {expected:,}")
    _require_count(folder, path, "chunks with a score", int(counts.sum()), facts.counts.scored_chunks)
    return counts, levels


def quantise(p_virus: npt.NDArray[np.float64]) -> npt.NDArray[np.uint8]:
    """Probabilities (n,) as levels 0 to `LEVELS`, `NO_SCORE` for NaN.

    A level spans 1/254 upwards from level / 254, so that 0.5 is the border of a level.
    """
    levels = np.floor(np.nan_to_num(p_virus) * LEVELS).astype(np.uint8)
    levels[np.isnan(p_virus)] = NO_SCORE
    return levels


def _contig_columns(
    contigs: Sequence[Row],
    frames: FrameRule,
    labels: Mapping[str, str] | None,
    classes: Sequence[str],
    predicted: Sequence[str],
    name_letters: int,
) -> Row:
    names = {
        "place": "place",
        "length": "length",
        "chunks": "chunks",
        "scored": "scored_chunks",
        "viral": "viral_chunks",
        CALL_COLUMN[frames]: "p_call",
    }
    columns: Row = {name: [contig[column] for contig in contigs] for name, column in names.items()}
    columns["name"] = [_cut(contig["contig"], name_letters) for contig in contigs]
    columns["call"] = [_CALLS.index(contig["call"]) for contig in contigs]
    columns["tier"] = [_TIERS.index(contig["tier"] or NOT_AVAILABLE) for contig in contigs]
    if predicted:
        numbers = {name: number for number, name in enumerate(predicted)}
        columns["predicted"] = [numbers.get(contig["class"]) for contig in contigs]
    if any(contig.get("nearest") is not None for contig in contigs):
        columns |= _nearest_columns(contigs, name_letters)
    if labels is not None:
        columns["class"] = [classes.index(labels.get(contig["contig"], UNLABELLED)) for contig in contigs]
    return columns


def _nearest_columns(contigs: Sequence[Row], name_letters: int) -> Row:
    """Nearest genomes as index into their names `genomes`, None without a score."""
    names = sorted({contig["nearest"] for contig in contigs if contig["nearest"] is not None})
    numbers = {name: number for number, name in enumerate(names)}
    return {
        "genomes": [_cut(name, name_letters) for name in names],
        "nearest": [numbers.get(contig["nearest"]) for contig in contigs],
        "novelty": [contig["novelty"] for contig in contigs],
        "lineage": [_cut(contig["lineage"] or "", name_letters) for contig in contigs],
    }


def _region_columns(regions: Sequence[tuple[int, Row]]) -> Row:
    columns: Row = {"row": [row for row, _ in regions]}
    columns |= {name: [region[name] for _, region in regions] for name in ("start", "end", "score", "mean_p")}
    return {**columns, "tier": [_TIERS.index(region["tier"]) for _, region in regions]}


def _read_rejected(path: Path, limits: Limits) -> Row:
    reasons: Counter[str] = Counter()
    first: list[list[str]] = []
    try:
        with path.open(encoding="utf-8", newline="\n") as lines:
            next(lines, None)
            for line in lines:
                cells = line.rstrip("\n").split("\t")
                if len(cells) != 5:
                    raise ValueError(f"{line!r:.60} is no row of it")
                reason = cells[-1]
                reasons[
                    reason if reason in reasons or len(reasons) < limits.reasons else "other reasons"
                ] += 1
                if len(first) < limits.rejected:
                    first.append([_cut(cell, limits.name_letters) for cell in cells])
    except (FileNotFoundError, ValueError) as error:
        raise damaged(path, error) from error
    return {"total": sum(reasons.values()), "reasons": dict(reasons.most_common()), "first": first}


def _cut(text: str, letters: int) -> str:
    return text if len(text) <= letters else f"{text[: letters - 1]}…"


def read_labels(path: Path) -> Mapping[str, str]:
    """The class of each contig by name, from a tab-separated file of contig and class.

    Further columns, empty lines, comments after # and a header are ignored. Names may be those of the FASTA or those that virnuc
    writes.

    Raises:
        InputError: a line has no class, a contig has two, there are more than `MAX_CLASSES` classes, or the file is not text.
        OSError: it cannot be read.
    """
    labels: dict[str, str] = {}
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip() or line.startswith("#"):
                    continue
                cells = [cell.strip() for cell in line.rstrip("\r\n").split("\t")]
                if len(cells) < 2 or not cells[0] or not cells[1]:
                    raise InputError(
                        f"{path}, line {number}: {line.strip()!r:.60} is not a contig, a tab and its class."
                    )
                if not labels and cells[0].lower() in _LABEL_HEADERS:
                    continue
                name, label = plain_name(cells[0].split()[0]), cell_text(cells[1])
                if labels.setdefault(name, label) != label:
                    raise InputError(
                        f"{path}, line {number}: {name} is {label!r:.40} here and {labels[name]!r:.40} before. "
                        "Give each contig one class."
                    )
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text: give a tab-separated table.") from error
    if not labels:
        raise InputError(f"{path} has no labels: give lines of a contig, a tab and its class.")
    if len(classes := set(labels.values())) > MAX_CLASSES:
        raise InputError(
            f"{path} has {len(classes):,} classes, the report shows at most {MAX_CLASSES}: is the second column the class?"
        )
    return labels
