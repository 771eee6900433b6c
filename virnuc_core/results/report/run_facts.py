"""What a report says of the run itself, taken from the content of run.json."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import isfinite
from typing import Any, TypeVar

from virnuc_core.inference.shard import ModelCounters, ShardCounters
from virnuc_core.json_records import record_of
from virnuc_core.results.calls import DEFAULT_THRESHOLD
from virnuc_core.run_plan import PlannedHead, PlannedModel
from virnuc_core.specs import InputFile

Part = TypeVar("Part", "CountFacts", "LaneFacts")


@dataclass(frozen=True, kw_only=True, slots=True)
class CountFacts:
    """What a report needs of the counts of a run; run.json may have more of them."""

    records: int
    rejected: int
    chunks: int
    scored_chunks: int
    viral_chunks: int
    contigs_virus: int
    contigs_other: int
    contigs_unscored: int
    dna_alone_chunks: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneFacts:
    """One lane: where it worked, what it did, and how long; speeds without the loading of models."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """What was run, with what, and how fast.

    Attributes:
        out: the run's folder as it was given.
        finished: when, in ISO 8601; "" when it is not known.
        inputs: the files.
        chunk_length: bp.
        models: the transformers.
        head: the classifier.
        dna_head: the one for chunks without an open frame, if there is one.
        counts: what was found.
        work: over all shards.
        shards: how many there are, and how many were computed in the last attempt.
        stage_seconds: wall seconds by stage of the last attempt.
        lanes: of the last attempt.
        throughput: amounts a second of the last attempt.
        notes: what a reader must know.
        links: other places that have the run, by name.
        versions: of virnuc, Python and packages.
        fingerprint: of the plan.
        threshold: p_virus from which chunks and contigs are called virus.
    """

    out: str
    finished: str
    inputs: tuple[InputFile, ...]
    chunk_length: int
    models: tuple[PlannedModel, ...]
    head: PlannedHead
    dna_head: PlannedHead | None
    counts: CountFacts
    work: ShardCounters
    shards: Mapping[str, float]
    stage_seconds: Mapping[str, float]
    lanes: tuple[LaneFacts, ...]
    throughput: Mapping[str, float]
    notes: tuple[str, ...]
    links: Mapping[str, str]
    versions: Mapping[str, str]
    fingerprint: str
    threshold: float

    @classmethod
    def of_document(cls, document: Mapping[str, Any]) -> "RunFacts":
        """Takes them from the content of a run.json.

        Raises:
            ValueError: something is missing or of another type; it is named.
        """
        # A document that was not yet written has tuples where a file has lists.
        plain = json.loads(json.dumps(document))
        kept = {
            name: plain.get(name) for name in ("out", "inputs", "chunk_length", "models", "head", "dna_head")
        }
        kept |= {name: plain.get(name) for name in ("work", "notes")}
        kept["threshold"] = plain.get("threshold", DEFAULT_THRESHOLD)  # not every version has recorded it
        facts = record_of(_Typed, {**kept, "plan_fingerprint": plain.get("plan_fingerprint")})
        return cls(
            out=facts.out,
            finished=str(plain.get("finished", "")),
            inputs=facts.inputs,
            chunk_length=facts.chunk_length,
            models=facts.models,
            head=facts.head,
            dna_head=facts.dna_head,
            counts=_part_of(CountFacts, plain.get("counts"), "counts."),
            work=facts.work,
            shards=_numbers(plain, "shards"),
            stage_seconds=_numbers(plain, "stage_seconds"),
            lanes=tuple(_part_of(LaneFacts, row, "lanes.") for row in _of_type(plain, "lanes", list)),
            throughput=_numbers(plain, "throughput"),
            notes=facts.notes,
            links=_texts(plain, "links"),
            versions=_texts(plain, "versions"),
            fingerprint=facts.plan_fingerprint,
            threshold=facts.threshold,
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """What did not go as usual."""
        found = [text for model in self.work.models for text in _troubles(model)]
        if self.counts.rejected:
            records = "record was" if self.counts.rejected == 1 else "records were"
            found.append(f"{self.counts.rejected:,} {records} not used; rejected.tsv says why.")
        if self.counts.records and self.counts.contigs_unscored * 2 > self.counts.records:
            found.append(
                "More than half of the contigs have no score: most of them are short, or hold no open frame."
            )
        return tuple(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Typed:
    """The part of run.json that dataclasses describe."""

    out: str
    inputs: tuple[InputFile, ...]
    chunk_length: int
    models: tuple[PlannedModel, ...]
    head: PlannedHead
    dna_head: PlannedHead | None
    work: ShardCounters
    notes: tuple[str, ...]
    plan_fingerprint: str
    threshold: float


def _troubles(model: ModelCounters) -> list[str]:
    found = []
    if model.fp32_batches:
        found.append(
            f"{model.name} ({model.family}): {model.fp32_batches:,} of {model.batches:,} batches were computed again in "
            "fp32, because a number was not finite."
        )
    if model.out_of_memory:
        found.append(
            f"{model.name} ({model.family}): a batch was parted {model.out_of_memory:,} times, because the device was "
            "out of memory."
        )
    return found


def _part_of(kind: type[Part], values: Any, where: str) -> Part:
    """A dataclass from an object that may have further fields."""
    if not isinstance(values, dict):
        raise ValueError(f"{where.rstrip('.')} is {values!r:.40}")
    names = {field.name for field in fields(kind)}
    return record_of(kind, {name: value for name, value in values.items() if name in names}, where)


def _numbers(document: Mapping[str, Any], name: str) -> dict[str, float]:
    values: dict[str, Any] = _of_type(document, name, dict)
    for key, value in values.items():
        if type(value) not in (int, float) or not isfinite(value):
            raise ValueError(f"{name}.{key} is {value!r:.40}")
    return values


def _texts(document: Mapping[str, Any], name: str) -> dict[str, str]:
    values: dict[str, Any] = _of_type(document, name, dict)
    for key, value in values.items():
        if not isinstance(value, str):
            raise ValueError(f"{name}.{key} is {value!r:.40}")
    return values


def _of_type(document: Mapping[str, Any], name: str, kind: type) -> Any:
    value = document.get(name)
    if not isinstance(value, kind):
        raise ValueError(f"{name} is {value!r:.40}")
    return value
