"""Everything that a report shows, as one JSON document of bounded size."""

from base64 import b64encode
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, Final

from virnuc_core.errors import DamagedFileError
from virnuc_core.plain_text import visible
from virnuc_core.results.calls import OTHER, UNSCORED, VIRUS
from virnuc_core.results.report.labels import UNLABELLED
from virnuc_core.results.report.rows import Contig, Region, damaged, iter_contigs, iter_rows
from virnuc_core.results.report.run_facts import RunFacts
from virnuc_core.results.report.summary import WHOLE_SHARE, ContigSummary, Totals, summarise
from virnuc_core.results.report.tracks import MIN_CHUNKS, Tracks, choose_tracks, read_tracks
from virnuc_core.results.writers import NOT_AVAILABLE
from virnuc_core.run_folder import RunFolder

# By these a document names calls and tiers with a number.
CALLS: Final = (VIRUS, OTHER, UNSCORED)
TIERS: Final = ("confident", "likely", "unsure", NOT_AVAILABLE)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportLimits:
    """How much of a run a report holds at most; tables of the run have the rest.

    Attributes:
        contigs: rows of the table of contigs.
        chunks: chunks of all tracks together.
        regions: viral regions.
        rejected: rejected records that are named.
        reasons: reasons of rejection that are counted one by one.
        name_letters: letters of a name.
        files: input files that are named.
        lanes: lanes that are named.
    """

    contigs: int = 100_000
    chunks: int = 4_000_000
    regions: int = 100_000
    rejected: int = 200
    reasons: int = 20
    name_letters: int = 200
    files: int = 100
    lanes: int = 256


DEFAULT_LIMITS: Final = ReportLimits()


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejections:
    """The records that were not used: how many by reason, and the first of them."""

    total: int
    reasons: Mapping[str, int]
    first: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportData:
    """What a report shows.

    Attributes:
        facts: the run.
        contigs: all contigs added up, and those that are shown.
        tracks: scores of all chunks added up, and of those that are drawn.
        rejections: records that were not used.
        labels: class of contigs by name; None without labels.
        limits: how much of it is shown.
    """

    facts: RunFacts
    contigs: ContigSummary
    tracks: Tracks
    rejections: Rejections
    labels: Mapping[str, str] | None
    limits: ReportLimits

    @property
    def verdict(self) -> str:
        """The run in one sentence."""
        counts, hosts = self.facts.counts, self.contigs.totals.hosts
        contigs = "contig" if counts.records == 1 else "contigs"
        parts = [
            f"{counts.contigs_virus:,} of {counts.records:,} {contigs} {_is(counts.contigs_virus)} called viral"
        ]
        if hosts:
            parts.append(f"{hosts:,} {'other holds' if hosts == 1 else 'others hold'} a viral region")
        if counts.contigs_unscored:
            has = "has" if counts.contigs_unscored == 1 else "have"
            parts.append(f"{counts.contigs_unscored:,} {has} no score")
        return "; ".join(parts) + "."

    @property
    def document(self) -> dict[str, Any]:
        """The same as plain JSON values; contigs are in the order of the input, and named by their rows in it."""
        shown = sorted(self.contigs.shown, key=lambda contig: contig.place)
        rows = {contig.place: row for row, contig in enumerate(shown)}
        classes = sorted(self.contigs.classes)
        # Regions of the contigs that matter most come first where there is no room for all.
        regions = ((rows[contig.place], region) for contig in self.contigs.shown for region in contig.regions)
        kept = sorted(islice(regions, self.limits.regions), key=lambda pair: (pair[0], pair[1].start))
        return {
            "run": _run_values(self.facts, self.limits),
            "totals": _total_values(self.contigs.totals),
            "chunk_histogram": self.tracks.histogram.tolist(),
            "names": {"calls": CALLS, "tiers": TIERS, "classes": classes},
            "contigs": self._contig_columns(shown, classes),
            "regions": _region_columns(kept),
            "tracks": {
                "rows": [rows[place] for place in self.tracks.places],
                "levels": b64encode(self.tracks.levels).decode(),
                "min_chunks": MIN_CHUNKS,
            },
            "classes": [
                {"class": label, **_total_values(totals)} for label, totals in self.contigs.classes.items()
            ],
            "unknown_labels": self.contigs.unknown_labels,
            "island_share": WHOLE_SHARE,
            "rejected": asdict(self.rejections),
        }

    def _contig_columns(self, shown: Sequence[Contig], classes: Sequence[str]) -> dict[str, list[Any]]:
        numbers = {label: number for number, label in enumerate(classes)}
        columns: dict[str, list[Any]] = {
            "place": [contig.place for contig in shown],
            "name": [_cut(contig.name, self.limits.name_letters) for contig in shown],
            "length": [contig.length for contig in shown],
            "chunks": [contig.chunks for contig in shown],
            "scored": [contig.scored_chunks for contig in shown],
            "dna_alone": [contig.dna_alone_chunks for contig in shown],
            "viral": [contig.viral_chunks for contig in shown],
            "mean_p": [contig.mean_p for contig in shown],
            "call": [_number_of(CALLS, contig.call) for contig in shown],
            "tier": [_number_of(TIERS, contig.tier) for contig in shown],
        }
        if self.labels is not None:
            columns["class"] = [numbers[self.labels.get(contig.name, UNLABELLED)] for contig in shown]
        return columns


def gather(
    folder: RunFolder,
    document: Mapping[str, Any],
    labels: Mapping[str, str] | None = None,
    limits: ReportLimits = DEFAULT_LIMITS,
) -> ReportData:
    """Reads the tables of a run.

    Args:
        folder: the run's folder.
        document: the content of its run.json.
        labels: class of contigs by name.
        limits: how much of it is shown.

    Raises:
        DamagedFileError: a table is missing, not as virnuc writes it, or not of this run.
        OSError: one cannot be read.
    """
    try:
        facts = RunFacts.of_document(document)
    except ValueError as error:
        raise DamagedFileError(
            f"{folder.report} cannot be read ({error}): run the same command again."
        ) from error
    summary = summarise(iter_contigs(folder.contigs, folder.regions), labels, limits.contigs)
    if summary.totals.contigs != facts.counts.records:
        raise damaged(
            folder.contigs,
            f"{summary.totals.contigs:,} contigs, and {folder.report.name} has {facts.counts.records:,}",
        )
    places = choose_tracks(summary.shown, limits.chunks)
    chunks = {contig.place: contig.chunks for contig in summary.shown}
    tracks = read_tracks(folder.predictions, places, sum(chunks[place] for place in places))
    if (scored := int(tracks.histogram.sum())) != facts.counts.scored_chunks:
        raise damaged(
            folder.predictions,
            f"{scored:,} chunks with a score, and {folder.report.name} has {facts.counts.scored_chunks:,}",
        )
    return ReportData(
        facts=facts,
        contigs=summary,
        tracks=tracks,
        rejections=_read_rejections(folder, limits),
        labels=labels,
        limits=limits,
    )


def _read_rejections(folder: RunFolder, limits: ReportLimits) -> Rejections:
    reasons: Counter[str] = Counter()
    first: list[tuple[str, ...]] = []
    total = 0
    for cells in iter_rows(folder.rejected, ("record", "id", "file", "length", "reason")):
        total += 1
        reason = cells[-1]
        reasons[reason if reason in reasons or len(reasons) < limits.reasons else "other reasons"] += 1
        if len(first) < limits.rejected:
            first.append(tuple(_cut(cell, limits.name_letters) for cell in cells))
    return Rejections(total=total, reasons=dict(reasons.most_common()), first=tuple(first))


def _run_values(facts: RunFacts, limits: ReportLimits) -> dict[str, Any]:
    """The run without the paths of its models, which are of one machine."""
    values = asdict(facts)
    for part in (*values["models"], values["head"], values["dna_head"]):
        if part is not None:
            del part["location"]
    for model in values["models"]:
        model["name"] = visible(model["name"])
    values["inputs"] = [{**file, "name": visible(file["name"])} for file in values["inputs"][: limits.files]]
    values["num_inputs"] = len(facts.inputs)
    values["lanes"] = values["lanes"][: limits.lanes]
    values["num_lanes"] = len(facts.lanes)
    values["warnings"] = facts.warnings
    return values


def _is(number: int) -> str:
    return "is" if number == 1 else "are"


def _cut(text: str, letters: int) -> str:
    return text if len(text) <= letters else f"{text[: letters - 1]}…"


def _number_of(names: Sequence[str], name: str) -> int:
    """Its place among them; that of the last one when it is none of them."""
    return names.index(name) if name in names else len(names) - 1


def _total_values(totals: Totals) -> dict[str, Any]:
    return {**asdict(totals), "histogram": totals.histogram.tolist()}


def _region_columns(regions: Sequence[tuple[int, Region]]) -> dict[str, list[Any]]:
    return {
        "row": [row for row, _ in regions],
        "start": [region.start for _, region in regions],
        "end": [region.end for _, region in regions],
        "score": [region.score for _, region in regions],
        "mean_p": [region.mean_p for _, region in regions],
        "tier": [_number_of(TIERS, region.tier) for _, region in regions],
    }
