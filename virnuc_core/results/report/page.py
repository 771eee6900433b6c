"""The report: one HTML file with style, script and data embedded, so that a browser fetches nothing.

Headline, warnings and run details are HTML; the script draws the table, the plots and the scores along contigs from a JSON document
of bounded size, taken from the Parquet tables of the run.
"""

import json
import re
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from virnuc_core.columns import Int64
from virnuc_core.files import write_text
from virnuc_core.plain_text import visible
from virnuc_core.results.calls import CALLS, NONVIRAL, PROVIRUS, UNSCORED, VIRUS
from virnuc_core.results.writers import count_values
from virnuc_core.run_folder import RunFolder
from virnuc_core.specs import FAMILY_NAMES, chunks_in_words

CONFIDENCE: Final = ("confident", "likely", "unsure")


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Upper bounds on what a report contains; the tables of the run have the rest.

    Attributes:
        contigs: in the table, proviruses and viruses first, then those with the highest scores.
        name_bytes: of their names together.
        cards: contigs with a provirus whose scores can be shown.
        chunks: of these contigs together.
    """

    contigs: int = 100_000
    name_bytes: int = 10_000_000
    cards: int = 200
    chunks: int = 300_000


DEFAULT_LIMITS: Final = Limits()


def write_report_page(
    folder: RunFolder, document: Mapping[str, Any], sequence_of: Callable[[int], bytes]
) -> None:
    """Writes report.html from run.json's content and the tables of a run, atomically.

    The content security policy lets a browser run only this script, apply only this style sheet, and fetch nothing.

    Args:
        folder: of the run, with its tables.
        document: content of run.json.
        sequence_of: gives the upper-case bases of a contig by its row in contigs.tsv, from 0.

    Raises:
        OSError: a file cannot be read or written.
    """
    style = _source("style.css")
    scripts = map(_source, ("data.js", "table.js", "plot.js", "track.js", "page.js"))
    script = "\n".join(['"use strict";', "(() => {", *scripts, "})();"])
    name = document["out"].rstrip("/").rpartition("/")[2] or "run"
    finished = datetime.fromisoformat(document["finished"])
    confidence = count_values(_read(folder.summary_parquet, "confidence")["confidence"])
    tables = (folder.summary, folder.virus_fasta, folder.virus_bed, folder.virus_gff3, folder.contigs)
    values = {
        "policy": f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; base-uri 'none'; "
        "form-action 'none'",
        "title": escape(f"{name}: virnuc report"),
        "run": f"{_isolated(name)} · {finished:%-d %B %Y, %H:%M} {finished.tzname()}",
        "headline": escape(_headline(document["counts"])),
        "trust": escape("; ".join(_trust(document["sample"], confidence))),
        "files": " · ".join(_link(path.name, path.name) for path in tables),
        "warnings": "".join(f'<p class="warning">{escape(words)}</p>' for words in _warnings(document)),
        "details": "".join(
            f"<div><dt>{escape(term)}</dt><dd>{words}</dd></div>"
            for term, words in _details(folder, document)
        ),
        "style": style,
        "script": script,
        "data": script_json(gather(folder, document, sequence_of)),
    }
    # In one pass, so that marks in filled-in text are not replaced.
    write_text(folder.page, re.sub(r"\{\{(\w+)\}\}", lambda mark: values[mark[1]], _source("template.html")))


def _headline(counts: Mapping[str, int]) -> str:
    viral = _number(counts["contigs_virus"], "viral contig")
    return (
        f"{viral} and {_number(counts['proviruses'], 'provirus')} in {_number(counts['records'], 'contig')}"
    )


def _number(count: int, what: str) -> str:
    plural = f"{what}es" if what.endswith("s") else f"{what}s"
    return f"{count:,} {what if count == 1 else plural}"


def _trust(sample: Mapping[str, float] | None, confidence: Mapping[str, int]) -> Iterator[str]:
    """How sure the viral contigs and proviruses are."""
    if confidence:
        yield ", ".join(f"{confidence[name]:,} {name}" for name in CONFIDENCE if name in confidence)
    if sample:
        yield f"expected false positives: {sample['expected_false']:.1f} ({sample['expected_fdr']:.1%})"
    else:
        yield "false positives cannot be estimated with this classifier"


def _warnings(document: Mapping[str, Any]) -> Iterator[str]:
    counts = document["counts"]
    if 2 * counts["contigs_unscored"] > counts["records"]:
        yield f"{counts['contigs_unscored']:,} of {_number(counts['records'], 'contig')} could not be scored."
    if rejected := counts["rejected"]:
        yield f"{_number(rejected, 'sequence')} skipped: see rejected.tsv."
    yield from (words[:1].upper() + words[1:] for words in document["notes"])


def _details(folder: RunFolder, document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Terms and what is to be known of them, in HTML."""
    counts, work, sample = document["counts"], document["work"], document["sample"]
    names = [_isolated(visible(file["name"])) for file in document["inputs"][:5]]
    left = len(document["inputs"]) - len(names)
    yield "Input", ", ".join(names) + (f" and {left:,} more" if left else "")
    if counts["rejected"]:
        with folder.rejected.open(encoding="utf-8", newline="\n") as lines:
            next(lines)
            reasons = Counter(line.rstrip("\n").rpartition("\t")[2] for line in lines).most_common(5)
        yield "Skipped", ", ".join(f"{count:,} {_isolated(reason)}" for reason, count in reasons)
    if sample:
        yield "Viral fraction", f"{sample['share']:.1%}"
        if sample["threshold"] is not None:
            yield "Score threshold", f"{sample['threshold']:.3f}"
    yield "Chunk length", chunks_in_words(document["chunk_length"])
    yield "Chunks with a score", f"{counts['scored_chunks']:,} of {counts['chunks']:,}"
    yield "ORFs embedded", f"{work['frames']:,}"
    for model in document["models"]:
        parts = (visible(model["name"]), f"layer {model['repr_layer']}", model["precision"], model["engine"])
        yield FAMILY_NAMES[model["family"]], escape(", ".join(parts))
    yield "Classifier", _isolated(visible(document["head"]["name"]))
    for model in work["models"]:
        if model["fp32_batches"] or model["out_of_memory"]:
            words = f"{model['fp32_batches']:,} of {model['batches']:,} batches of {visible(model['name'])} were recomputed in fp32"
            yield "Repeated", escape(f"{words}, {model['out_of_memory']:,} split to fit in memory")
    devices = Counter(lane["device_name"] or lane["device"] for lane in document["lanes"])
    if devices:
        speed = document["throughput"]["sequences_per_second"]
        hardware = ", ".join(f"{count} × {_isolated(name)}" for name, count in devices.most_common(5))
        yield "Hardware", f"{hardware}; {speed:,.0f} sequences/s"
    seconds = document["stage_seconds"]
    if seconds:
        yield "Time", escape(", ".join(f"{stage} {spent:,.1f} s" for stage, spent in seconds.items()))
    pages = {
        name: url for name, url in document["links"].items() if urlsplit(url).scheme in ("http", "https")
    }
    if pages:
        yield "Also in", ", ".join(_link(url, name) for name, url in pages.items())
    yield "Versions", escape(", ".join(f"{name} {found}" for name, found in document["versions"].items()))
    yield "Folder", _isolated(visible(document["out"]))


def _link(target: str, words: str) -> str:
    return f'<a href="{escape(target)}" rel="noreferrer noopener">{escape(words)}</a>'


def _isolated(text: str) -> str:
    """Text of the user, isolated from the direction of the text around it."""
    return f"<bdi>{escape(text)}</bdi>"


def gather(
    folder: RunFolder,
    document: Mapping[str, Any],
    sequence_of: Callable[[int], bytes],
    limits: Limits = DEFAULT_LIMITS,
) -> dict[str, Any]:
    """The JSON document of a report: contigs are in input order, and refer to calls, confidence and classes by number.

    `tracks` refer to contigs by number: their proviruses, and start and score of their chunks, none where there are too many.
    """
    rows, contigs = _listed_contigs(folder.contigs_parquet, limits)
    sample = document["sample"]
    classes = sorted(set(contigs["class"].drop_null().to_pylist()))
    columns = {name: contigs[name].to_pylist() for name in contigs.schema.names}
    for name, values in (("call", CALLS), ("confidence", CONFIDENCE), ("class", classes)):
        columns[name] = pc.index_in(contigs[name], pa.array(values, pa.string())).to_pylist()
    columns["gc"] = [_gc_content(sequence_of(row)) for row in rows.tolist()]
    return {
        "total": document["counts"]["records"],
        "threshold": (sample or {}).get("threshold"),
        "names": {"call": CALLS, "confidence": CONFIDENCE, "class": classes},
        "contigs": columns,
        "tracks": _tracks(folder, rows, columns["seq_name"], limits),
    }


def _listed_contigs(path: Path, limits: Limits) -> tuple[Int64, pa.Table]:
    """Rows of contigs.parquet that are listed, ascending, and their content."""
    keys = _read(path, "call", "virus_score", "length")
    calls = pa.array([PROVIRUS, VIRUS, NONVIRAL, UNSCORED])
    order = pc.index_in(keys["call"], calls).to_numpy()
    score = np.nan_to_num(keys["virus_score"].to_numpy())
    rows = np.lexsort((-keys["length"].to_numpy(), -score, order))[: limits.contigs]
    contigs = _take(path, rows)
    has_room = np.cumsum(pc.binary_length(contigs["seq_name"]).to_numpy()) <= limits.name_bytes
    in_order = np.argsort(rows[has_room])
    return rows[in_order], contigs.take(pa.array(in_order))


def _read(path: Path, *columns: str) -> pa.Table:
    """Some columns of a Parquet file, or all; `pq.read_table` would take a second to import what it needs."""
    with pq.ParquetFile(path) as file:
        return file.read(columns or None)


def _take(path: Path, rows: Int64, *columns: str) -> pa.Table:
    """As `_read`, of some rows in any order, read in blocks."""
    ascending = np.sort(rows)
    parts: list[pa.RecordBatch] = []
    first = 0
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(columns=columns or None):
            begin, end = np.searchsorted(ascending, (first, first + len(batch)))
            parts.append(batch.take(pa.array(ascending[begin:end] - first)))
            first += len(batch)
    return pa.Table.from_batches(parts).take(pa.array(np.searchsorted(ascending, rows)))


def _gc_content(bases: bytes) -> float | None:
    """Share of G and C in percent; None without one of the four bases."""
    letters = np.frombuffer(bases, np.uint8)
    gc, at = (sum(np.count_nonzero(letters == base) for base in pair) for pair in (b"GC", b"AT"))
    return round(100 * gc / (gc + at), 1) if gc + at else None


def _proviruses(path: Path, names: list[str], most_contigs: int) -> dict[int, list[dict[str, Any]]]:
    """The proviruses of each listed contig, the best ones first."""
    number_of = {name: number for number, name in enumerate(names)}
    summary = _read(path)
    proviruses: dict[int, list[dict[str, Any]]] = {}
    by_score = summary.filter(pc.equal(summary["topology"], PROVIRUS)).sort_by("virus_score")
    for found in reversed(by_score.to_pylist()):
        number = number_of.get(found["seq_name"].rpartition("|provirus_")[0])
        if number is None or (number not in proviruses and len(proviruses) == most_contigs):
            continue
        start, end = map(int, found["coordinates"].split("-"))
        shown = {name: found[name] for name in ("virus_score", "fdr", "confidence")}
        proviruses.setdefault(number, []).append({"start": start, "end": end, **shown})
    return proviruses


def _tracks(folder: RunFolder, rows: Int64, names: list[str], limits: Limits) -> list[dict[str, Any]]:
    proviruses = _proviruses(folder.summary_parquet, names, limits.cards)
    counts = _read(folder.contigs_parquet, "chunks")["chunks"].to_numpy()
    hosts = rows[list(proviruses)]
    sizes = np.where(np.cumsum(counts[hosts]) <= limits.chunks, counts[hosts], 0)
    ends = np.cumsum(counts)[hosts]
    chosen = [np.arange(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    chunks = _take(
        folder.chunks_parquet, np.concatenate([*chosen, np.empty(0, np.int64)]), "start", "virus_score"
    )
    starts, scores = chunks["start"].to_pylist(), chunks["virus_score"].to_pylist()
    rounded = [None if score is None else round(score, 3) for score in scores]
    parts = [slice(last - size, last) for size, last in zip(sizes, np.cumsum(sizes), strict=True)]
    return [
        {"contig": number, "proviruses": of_contig, "start": starts[part], "score": rounded[part]}
        for (number, of_contig), part in zip(proviruses.items(), parts, strict=True)
    ]


def script_json(document: Mapping[str, Any]) -> str:
    """ASCII-only JSON that is safe in a script element, whatever its strings hold."""
    text = json.dumps(document, allow_nan=False, separators=(",", ":"))
    # Could end the script element or be taken for markup; in JSON these occur only in strings.
    for letter, code in {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}.items():
        text = text.replace(letter, code)
    return text


def _digest(text: str) -> str:
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"


def _source(name: str) -> str:
    return files("virnuc_core.results.report").joinpath(name).read_text(encoding="utf-8")
