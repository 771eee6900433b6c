"""The report: one HTML file with style, script and data embedded, so that a browser fetches nothing.

The data come from run.json and the Parquet tables, as one JSON document of bounded size.
"""

import html
import json
import re
from base64 import b64encode
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from virnuc_core.columns import Int64
from virnuc_core.files import write_text
from virnuc_core.plain_text import visible
from virnuc_core.results.calls import CALLS
from virnuc_core.results.report.reading import (
    BINS,
    Totals,
    histogram,
    iter_batches,
    most_important,
    read_proviruses,
)
from virnuc_core.results.writers import NOT_AVAILABLE
from virnuc_core.run_folder import RunFolder
from virnuc_core.specs import FRAMES_IN_WORDS, chunk_steps

LEVELS: Final = 254  # quantisation of track scores
NO_SCORE: Final = 255
MIN_TRACK_CHUNKS: Final = 4
# The document refers to calls and confidence by index.
_CONFIDENCE: Final = ("confident", "likely", "unsure", NOT_AVAILABLE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Upper bounds on what a report contains, and the rows read at a time; the run's tables have the rest."""

    contigs: int = 100_000
    chunks: int = 4_000_000
    proviruses: int = 100_000
    rejected: int = 200
    reasons: int = 20
    name_letters: int = 200
    files: int = 100
    lanes: int = 256
    batch_rows: int = 1 << 16


DEFAULT_LIMITS: Final = Limits()


def gather(folder: RunFolder, document: Mapping[str, Any], limits: Limits = DEFAULT_LIMITS) -> dict[str, Any]:
    """The document of a report; contigs are in input order, and other parts refer to them by index.

    `document` is the content of run.json; the tables are those that the run has just written.
    """
    totals = Totals()
    contigs = most_important(folder, limits.contigs, limits.batch_rows, totals)
    place = contigs["place"].to_numpy()
    in_order = np.argsort(place)
    row_of = np.argsort(in_order)
    with_track = list(_choose_tracks(contigs, limits.chunks))
    chunk_histogram, levels = _read_scores(folder.chunks_parquet, place[with_track], limits.batch_rows)
    proviruses = read_proviruses(folder)
    contig_of = pc.index_in(proviruses["contig"], contigs["seq_name"].combine_chunks()).to_numpy(
        zero_copy_only=False
    )
    chosen = np.flatnonzero(~np.isnan(contig_of.astype(float)))[: limits.proviruses]
    rows = row_of[contig_of[chosen].astype(np.int64)]
    proviruses = proviruses.take(pa.array(chosen))
    classes = sorted({name for name, _ in totals.classes})
    return {
        "headline": _headline(document["counts"], document["sample"]),
        "run": _run_document(document, limits),
        "totals": totals.document,
        "chunk_histogram": chunk_histogram.tolist(),
        "names": {"calls": CALLS, "confidence": _CONFIDENCE, "classes": classes},
        "contigs": _contig_columns(contigs.take(pa.array(in_order)), classes, limits),
        "proviruses": {
            "row": rows.tolist(),
            **{name: proviruses[name].to_pylist() for name in ("start", "end", "fdr")},
            "score": proviruses["virus_score"].to_pylist(),
            "confidence": list(map(_CONFIDENCE.index, proviruses["confidence"].to_pylist())),
        },
        "tracks": {
            "rows": sorted(row_of[with_track].tolist()),
            "levels": b64encode(levels).decode(),
            "min_chunks": MIN_TRACK_CHUNKS,
        },
        "rejected": _read_rejected(folder.rejected, limits),
        "classes": [
            {"class": classes.index(name), "call": CALLS.index(call), **counts}
            for (name, call), counts in totals.classes.items()
        ],
    }


def _run_document(document: Mapping[str, Any], limits: Limits) -> dict[str, Any]:
    """What is shown of run.json, with long lists truncated; paths are not."""
    of_run = (
        *("out", "finished", "chunk_length", "frames", "counts", "work", "shards", "stage_seconds"),
        *("throughput", "notes", "links", "versions", "plan_fingerprint", "calls", "sample"),
    )
    of_model = ("family", "repr_layer", "precision", "engine", "attention", "weights_fingerprint", "spec")
    files, lanes = document["inputs"], document["lanes"]
    models = [
        {"name": visible(model["name"]), **{name: model[name] for name in of_model}}
        for model in document["models"]
    ]
    return {
        **{name: document.get(name) for name in of_run},
        "models": models,
        "head": {"name": visible(document["head"]["name"])},
        "chunk_steps": chunk_steps(document["chunk_length"]),
        "frames_in_words": FRAMES_IN_WORDS[document["frames"]],
        "inputs": [{**file, "name": visible(file["name"])} for file in files[: limits.files]],
        "num_inputs": len(files),
        "lanes": lanes[: limits.lanes],
        "num_lanes": len(lanes),
        "warnings": list(_warnings(document)),
    }


def _warnings(document: Mapping[str, Any]) -> Iterator[str]:
    counts = document["counts"]
    for work in document["work"]["models"]:
        model = f"{visible(work['name'])} ({work['family']})"
        if work["fp32_batches"]:
            yield (
                f"{model}: {work['fp32_batches']:,} of {work['batches']:,} batches were recomputed in fp32, because a number "
                "was not finite."
            )
        if work["out_of_memory"]:
            yield f"{model}: a batch was split {work['out_of_memory']:,} times, because the device was out of memory."
    if counts["rejected"]:
        records = "record was" if counts["rejected"] == 1 else "records were"
        yield f"{counts['rejected']:,} {records} not used; rejected.tsv says why."
    if counts["records"] and counts["contigs_unscored"] * 2 > counts["records"]:
        yield (
            "More than half of the contigs have no score: most of them are short, or their chunks have no "
            f"{FRAMES_IN_WORDS[document['frames']]}."
        )


def _headline(counts: Mapping[str, int], sample: Mapping[str, float] | None) -> str:
    viral, proviruses, all_contigs = (
        _number(counts[name], what)
        for name, what in (
            ("contigs_virus", "viral contig"),
            ("proviruses", "provirus"),
            ("records", "contig"),
        )
    )
    parts = [f"{viral} and {proviruses} among {all_contigs}"]
    if sample:
        parts.append(
            f"{sample['expected_false']:.1f} of these calls are expected to be false ({sample['expected_fdr']:.1%})"
        )
    if unscored := counts["contigs_unscored"]:
        parts.append(f"{_number(unscored, 'contig')} without a score")
    return "; ".join(parts) + "."


def _number(count: int, what: str) -> str:
    plural = f"{what}es" if what.endswith("s") else f"{what}s"
    return f"{count:,} {what if count == 1 else plural}"


def _choose_tracks(contigs: pa.Table, max_chunks: int) -> Iterator[int]:
    """The contigs with a score and enough chunks for a track, in the given order, of up to `max_chunks` in all."""
    sizes = zip(contigs["scored_chunks"].to_pylist(), contigs["chunks"].to_pylist(), strict=True)
    for number, (scored, chunks) in enumerate(sizes):
        if scored and MIN_TRACK_CHUNKS <= chunks <= max_chunks:
            yield number
            max_chunks -= chunks


def _read_scores(path: Path, wanted: Int64, batch_rows: int) -> tuple[Int64, bytes]:
    """Histogram of all chunk scores, int64 (BINS,), and the `quantise`d scores of the contigs at some places."""
    counts = np.zeros(BINS, np.int64)
    parts: list[bytes] = []
    place = -1
    for batch in iter_batches(path, ("chunk", "virus_score"), batch_rows):
        scores = batch["virus_score"].to_numpy(zero_copy_only=False)
        counts += histogram(scores)
        places = place + np.cumsum(batch["chunk"].to_numpy() == 1)
        place = int(places[-1])
        parts.append(quantise(scores)[np.isin(places, wanted)].tobytes())
    return counts, b"".join(parts)


def quantise(scores: npt.NDArray[np.float64]) -> npt.NDArray[np.uint8]:
    """Probabilities (n,) as levels 0 to `LEVELS`, `NO_SCORE` for NaN.

    A level spans 1/254 upwards from level / 254, so that 0.5 is the border of a level.
    """
    levels = np.floor(np.nan_to_num(scores) * LEVELS).astype(np.uint8)
    levels[np.isnan(scores)] = NO_SCORE
    return levels


def _contig_columns(contigs: pa.Table, classes: Sequence[str], limits: Limits) -> dict[str, Any]:
    names = {
        "place": "place",
        "length": "length",
        "chunks": "chunks",
        "scored": "scored_chunks",
        "score": "virus_score",
        "novelty": "novelty",
    }
    columns = {name: contigs[column].to_pylist() for name, column in names.items()}
    columns["name"] = [_cut(name, limits.name_letters) for name in contigs["seq_name"].to_pylist()]
    columns["call"] = list(map(CALLS.index, contigs["call"].to_pylist()))
    columns["confidence"] = [
        _CONFIDENCE.index(one or NOT_AVAILABLE) for one in contigs["confidence"].to_pylist()
    ]
    columns["class"] = pc.index_in(contigs["class"], pa.array(classes, pa.string())).to_pylist()
    return columns


def _read_rejected(path: Path, limits: Limits) -> dict[str, Any]:
    reasons: Counter[str] = Counter()
    first: list[list[str]] = []
    with path.open(encoding="utf-8", newline="\n") as lines:
        for line in islice(lines, 1, None):
            cells = line.rstrip("\n").split("\t")
            reason = cells[-1]
            reasons[reason if reason in reasons or len(reasons) < limits.reasons else "other reasons"] += 1
            if len(first) < limits.rejected:
                first.append([_cut(cell, limits.name_letters) for cell in cells])
    return {"total": sum(reasons.values()), "reasons": dict(reasons.most_common()), "first": first}


def _cut(text: str, letters: int) -> str:
    return text if len(text) <= letters else f"{text[: letters - 1]}…"


def write_report_page(folder: RunFolder, document: Mapping[str, Any]) -> None:
    """Writes report.html from run.json's content and the tables of a run, atomically.

    The content security policy lets a browser run only this script, apply only this style sheet, and fetch nothing.

    Raises:
        OSError: a file cannot be read or written.
    """
    data = gather(folder, document)
    style = _source("style.css")
    scripts = map(_source, ("data.js", "charts.js", "track.js", "table.js", "page.js"))
    script = "\n".join(['"use strict";', "(() => {", *scripts, "})();"])
    name = data["run"]["out"].rstrip("/").rpartition("/")[2] or "run"
    values = {
        "policy": f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; base-uri 'none'; "
        "form-action 'none'",
        "title": html.escape(f"{name}: virnuc report"),
        "headline": html.escape(data["headline"]),
        "style": style,
        "script": script,
        "data": script_json(data),
    }
    # In one pass, so that marks in filled-in text are not replaced.
    write_text(folder.page, re.sub(r"\{\{(\w+)\}\}", lambda mark: values[mark[1]], _source("template.html")))


def script_json(document: Mapping[str, Any]) -> str:
    """ASCII-only JSON that is safe in a script element, whatever its strings hold."""
    text = json.dumps(document, allow_nan=False, separators=(",", ":"))
    # Could end the script element or be taken for markup; in JSON these occur only in strings.
    for letter, escape in {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}.items():
        text = text.replace(letter, escape)
    return text


def _digest(text: str) -> str:
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"


def _source(name: str) -> str:
    return files("virnuc_core.results.report").joinpath(name).read_text(encoding="utf-8")
