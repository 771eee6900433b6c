"""The record of a run, `run.json`: its plan, results, speed, software versions and result files."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import h5py

from virnuc_core.checked_hdf5 import attributes_sha256
from virnuc_core.errors import DamagedFileError
from virnuc_core.files import file_digest, parse_object, write_text
from virnuc_core.inference.events import LaneReport, StageSeconds
from virnuc_core.inference.plan import RunPlan
from virnuc_core.inference.shard import ShardCounters, sum_counters
from virnuc_core.models.catalogue import CATALOGUE, NOT_CALIBRATED
from virnuc_core.results.multiqc import write_multiqc
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.frame_store import FrameStore
from virnuc_core.specs import FRAME_KINDS, chunk_steps
from virnuc_core.versions import FLASH_ATTN, QUACK, installed_version

if TYPE_CHECKING:  # slow imports
    from virnuc_core.results.tables import TableCounts

RunAs = Literal["process", "flow"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReport:
    """A finished run.

    Attributes:
        out: the run's folder, or the embeddings file of an embed run.
        counts: None for an embed run.
        work: summed over all shards, including those reused from earlier attempts.
        lanes: those of this attempt; empty if no shard had to be computed.
        seconds: wall time of each stage of this attempt.
        links: other places that show this run, by name.
        run_as: "flow" within Prefect, else "process".
        id: of this attempt; a record of it elsewhere is found by it.
        started: start of this attempt, in Unix seconds.
        labels: what else to record of it, by name.
        warnings: of a training, about the head.
    """

    plan: RunPlan
    out: str
    counts: "TableCounts | None"
    work: ShardCounters
    lanes: Sequence[LaneReport]
    seconds: Mapping[str, float]
    links: Mapping[str, str]
    run_as: RunAs = "process"
    id: str = ""
    started: float = 0.0
    labels: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def num_computed(self) -> int:
        """Shards computed in this attempt."""
        return sum(len(lane.shards) for lane in self.lanes)

    @property
    def notes(self) -> tuple[str, ...]:
        """Caveats for readers of the results."""
        bundled = {str(entry.bundled.resolve()) for entry in CATALOGUE if entry.bundled}
        is_bundled = any(model.location in bundled for model in self.plan.models)
        note = "predictions use the small bundled models; for real analyses choose larger ones (--preset, --head)."
        notes = [note] if is_bundled and self.counts else []
        if self.plan.head and not self.plan.head.calibrated:
            notes.append(f"{self.plan.head.name} {NOT_CALIBRATED}")
        return (*notes, *self._caveats, *self.plan.warnings, *self.warnings)

    @property
    def _caveats(self) -> Iterator[str]:
        """Reasons to doubt the calls."""
        bounds = FRAME_KINDS[self.plan.frames].chunk_bases
        if not self.counts or not bounds:
            return
        low, high = bounds
        calls, sample = self.counts.contigs_virus + self.counts.proviruses, self.counts.sample
        if calls and sample and sample.expected_fdr > 0.5:
            yield (
                f"most of the {calls:,} viral calls are expected to be false positives ({sample.expected_fdr:.1%}): omit "
                "--relaxed, --threshold and --prior, or set --fdr."
            )
        if 2 * self.counts.short_contigs > self.counts.records:
            yield (
                f"{self.counts.short_contigs:,} of {self.counts.records:,} sequences are shorter than {low} bp: the models "
                "were trained on longer ones; expect more errors."
            )
        sizes = [size for size, _ in chunk_steps(self.plan.chunk_length or low)]
        if min(sizes) < low or max(sizes) > high:
            yield f"the models were trained on chunks of {low} to {high:,} bp: expect more errors with --chunk-length {sizes[0]}."

    @property
    def throughput(self) -> dict[str, float]:
        """Work of this attempt over the time with loaded models; zeros if nothing was computed."""
        # Lanes run concurrently or, where there are more lanes than devices, one after another.
        begin = min((lane.started + lane.load_seconds for lane in self.lanes), default=0.0)
        end = max((lane.started + lane.seconds for lane in self.lanes), default=0.0)
        work = sum_counters(shard.counters for lane in self.lanes for shard in lane.shards)
        return speeds(work, end - begin)

    @property
    def packing_efficiency(self) -> dict[str, float]:
        """Real tokens over batch capacity, by model family, over all shards."""
        return {model.family: float(f"{model.packing_efficiency:.4g}") for model in self.work.models}

    @property
    def lane_rows(self) -> list[dict[str, str | float]]:
        """Device, work, speed and time breakdown of each lane."""
        return [lane_row(lane) for lane in self.lanes]

    @property
    def document(self) -> dict[str, Any]:
        """The content of run.json; `plan.json` lists the shards."""
        plan = asdict(self.plan)
        del plan["shards"], plan["schema_version"]
        counts = asdict(self.counts) if self.counts else {"sample": None}
        sample = counts.pop("sample")
        # Those that are installed: the core runs without Prefect and MLflow.
        packages = ("python", "torch", "numpy", "h5py", "tokenizers", "dnaio", "prefect", "mlflow", "triton")
        found = {package: installed_version(package) for package in (*packages, FLASH_ATTN, QUACK)}
        versions = {"virnuc": self.plan.virnuc_version} | {name: text for name, text in found.items() if text}
        return {
            "schema_version": 3,
            "id": self.id,
            "started": _iso(self.started),
            "plan_fingerprint": self.plan.fingerprint,
            "out": self.out,
            **plan,
            "counts": counts or None,
            "sample": sample,
            "work": asdict(self.work),
            "shards": {"total": len(self.plan.shards), "computed": self.num_computed},
            "stage_seconds": dict(self.seconds),
            "lanes": self.lane_rows,
            "throughput": self.throughput,
            "packing_efficiency": self.packing_efficiency,
            "notes": list(self.notes),
            "run_as": self.run_as,
            "links": dict(self.links),
            "labels": dict(self.labels),
            "summary": self.summary,
            "versions": versions,
        }

    @property
    def summary(self) -> str:
        """A few lines of text."""
        lines = []
        if c := self.counts:
            lines += [
                f"{c.records:,} contigs: {c.contigs_virus:,} virus, {c.contigs_provirus:,} provirus, {c.contigs_nonviral:,} nonviral, "
                f"{c.contigs_unscored:,} unscored; {c.rejected:,} records skipped",
                *([c.sample.in_words] if c.sample else []),
            ]
        num_shards, speed = len(self.plan.shards), self.throughput
        lines += [
            f"{self.work.frames} sequences embedded ({num_shards - self.num_computed} of {num_shards} shards reused), "
            f"{speed['sequences_per_second']:.0f} sequences/s, {speed['residues_per_second']:.0f} residues/s",
            f"results: {self.links.get('results', self.out)}",
            *(f"note: {note}" for note in self.notes),
        ]
        return "\n".join(lines)


def speeds(work: ShardCounters, seconds: float) -> dict[str, float]:
    """Sequences, residues, bases and tokens of each model per second; zeros for no work."""
    amounts = {"sequences": work.frames, "residues": work.residues, "bases": work.bases}
    amounts |= {f"{model.family}_tokens": model.tokens for model in work.models}
    return {
        f"{what}_per_second": round(n / seconds, 1) if n and seconds > 0 else 0.0
        for what, n in amounts.items()
    }


def lane_row(lane: LaneReport) -> dict[str, str | float]:
    """Device, work, speed and time breakdown of a lane."""
    work = sum_counters(shard.counters for shard in lane.shards)
    parts = asdict(sum((shard.seconds for shard in lane.shards), StageSeconds()))
    return {
        "lane": lane.lane,
        "host": lane.host,
        "device": lane.device,
        "device_name": lane.device_name,
        "shards": len(lane.shards),
        "sequences": work.frames,
        **speeds(work, lane.seconds - lane.load_seconds),
        "seconds": round(lane.seconds, 3),
        "load_seconds": round(lane.load_seconds, 3),
        **{f"{part}_seconds": round(spent, 3) for part, spent in parts.items()},
        **lane.gpu_use,
    }


def write_report(path: Path, report: RunReport) -> None:
    """Writes run.json atomically, with size and SHA-256 of the result files; for a predict run, virnuc_mqc.json and report.html first."""
    document = {**report.document, "finished": _iso(time.time())}
    folder = RunFolder(path.parent)
    if report.counts:
        from virnuc_core.results.report.page import write_report_page

        write_multiqc(folder, document)
        write_report_page(folder, document, FrameStore.open(folder.frames).sequence)
    results = folder.results if report.counts else (Path(report.out),)
    written = [result for result in results if result != path and result.exists()]
    document["files"] = [file_record(result) for result in written]
    write_text(path, json.dumps(document, indent=1) + "\n")


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def file_record(path: Path) -> dict[str, str | int]:
    """A result file as recorded in run.json; the size is in bytes. An HDF5 file has checksums, under one of all of them."""
    if h5py.is_hdf5(path):
        digest = {"attributes_sha256": attributes_sha256(path)}
    else:
        digest = {"sha256": file_digest(path)}
    return {"name": path.name, "size": path.stat().st_size, **digest}


def read_records(report: Path) -> dict[str, object]:
    """Records of the result files in a run.json, by file name.

    Raises:
        DamagedFileError: it cannot be read, or has no such records.
    """
    try:
        return {str(record["name"]): record for record in parse_object(report.read_bytes())["files"]}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DamagedFileError(
            f"{report} does not list the result files of the run ({error!r}): run the same command again."
        ) from error
