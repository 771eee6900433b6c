"""What is logged of a finished run: values from its run.json, and files of fixed names in its folder.

A run's folder may come from somebody else. Nothing in it says which files to read, and links are not followed.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from virnuc_core.errors import DamagedFileError
from virnuc_core.files import parse_object
from virnuc_core.run_folder import EVALUATED_RUN, EVALUATION_FILES, RunFolder, run_folder_of

_PARAMS: Final = (
    *("kind", "input_digest", "plan_fingerprint", "chunk_length", "min_length", "frames"),
    *("embeddings", "virnuc_version"),
)
_MODEL_PARAMS: Final = (
    *("weights_fingerprint", "repr_layer", "precision", "engine", "attention", "compiled"),
    "token_budget",
)


Value = str | int | float | bool | None
Row = Mapping[str, Value]
Point = tuple[str, float, int]
"""A metric, its value and its step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """What MLflow gets of one run.

    Attributes:
        id: by which its MLflow run is found again.
        started: Unix time, as `finished`.
        inputs: name, size and SHA-256 of each input file.
        note: text on its page.
        files: to be copied; those that are not there, and links, are left out.
        tables: rows by name.
    """

    id: str
    name: str
    started: float
    finished: float
    params: Mapping[str, Value]
    metrics: Sequence[Point]
    tags: Mapping[str, str]
    inputs: Sequence[Mapping[str, Any]] = ()
    note: str = ""
    files: Sequence[Path] = ()
    tables: Mapping[str, Sequence[Row]] | None = None


def entries_of(out: Path) -> list[Entry]:
    """Of the finished runs in a folder, or in that beside a file.

    Raises:
        DamagedFileError: a run.json is not one.
    """
    folders = [folder for folder in (out, run_folder_of(out)) if RunFolder(folder).report.is_file()]
    evaluated = [evaluation_entry(out)] if (out / EVALUATION_FILES[0]).is_file() else []
    return [*map(run_entry, folders), *evaluated]


def run_entry(root: Path) -> Entry:
    """Of the finished run in a folder; with files if it was a flow.

    Raises:
        DamagedFileError: its run.json cannot be read, or is none.
    """
    report = RunFolder(root).report
    document = _read(report)
    with _raising_damaged(report):
        entry = _entry_of(root, document)
        return _with_training(entry, root) if document["kind"] == "train" else entry


def evaluation_entry(root: Path) -> Entry:
    """Of the run that is evaluated in a folder, with its metrics; raises as `run_entry`."""
    run, report = run_entry(root / EVALUATED_RUN), root / EVALUATION_FILES[0]
    document = _read(report)
    with _raising_damaged(report):
        metrics = _level_metrics({level: document[level] for level in ("chunks", "contigs")}, "")
        files = _own_files(root, EVALUATION_FILES) if run.files else []
        return replace(run, metrics=[*run.metrics, *metrics], files=[*run.files, *files])


@contextmanager
def _raising_damaged(report: Path) -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedFileError(
            f"{report} is not the record of a finished run ({error!r}): repeat the command."
        ) from error


def _entry_of(root: Path, document: Mapping[str, Any]) -> Entry:
    is_flow = document["run_as"] == "flow"
    run_id, lanes = document["id"], document["lanes"]
    if not re.fullmatch(r"[0-9a-f-]{8,64}", run_id):
        raise ValueError("id")
    names = [file["name"] for file in document["inputs"]]
    links = {name.replace("_", ".", 1): str(text) for name, text in document["links"].items()}
    labels = {f"virnuc.{name}": str(text) for name, text in document["labels"].items() if text}
    prefect = {name: text for name, text in links.items() if name.startswith("prefect.")}
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    tables = [f"{name}.tsv" for name in ("virus_summary", "contigs", "chunks", "rejected")]
    return Entry(
        id=run_id,
        name=prefect.get("prefect.flow_run_name") or f"{document['kind']} {names[0] if names else ''}{more}",
        started=datetime.fromisoformat(document["started"]).timestamp(),
        finished=datetime.fromisoformat(document["finished"]).timestamp(),
        params=_params(document, names),
        metrics=[(name, float(value), 0) for name, value in _metrics(document).items() if value is not None],
        tags={"virnuc.out": str(root.resolve()), **labels, **prefect},
        inputs=document["inputs"],
        note="\n".join(f"- {line}" for line in str(document["summary"]).splitlines()),
        files=_own_files(root, [*tables, "report.html", "run.json"]) if is_flow else (),
        tables={"lanes": lanes} if is_flow and lanes else None,
    )


def _params(document: Mapping[str, Any], names: Sequence[str]) -> dict[str, Value]:
    """Every resolved setting, flat for comparison by column."""
    devices = [lane["device_name"] or lane["device"] for lane in document["lanes"]]
    params: dict[str, Value] = {name: document[name] for name in _PARAMS}
    params |= {"inputs": ",".join(names), "shards": document["shards"]["total"]}
    params |= {"devices": ",".join(dict.fromkeys(devices)), "switches": ",".join(document["switches"])}
    params |= {name: value for name, value in document["calls"].items() if value is not None}
    if head := document["head"]:
        params |= {"head": head["name"], "head_fingerprint": head["fingerprint"]}
    for model in document["models"]:
        own = {"model": model["name"], **{name: model[name] for name in _MODEL_PARAMS}}
        own |= {name: model["spec"][name] for name in ("embedding_dim", "num_layers")}
        params |= {f"{model['family']}_{name}": value for name, value in own.items()}
    return params


def _metrics(document: Mapping[str, Any]) -> dict[str, Any]:
    """All figures, flat for comparison between runs."""
    work, lanes, sample = document["work"], document["lanes"], document["sample"] or {}
    wall = sum(document["stage_seconds"].values())
    computed = sum(lane["sequences"] for lane in lanes)
    return {
        **(document["counts"] or {}),
        "share_viral_estimated": sample.get("share"),
        "expected_false_calls": sample.get("expected_false"),
        "expected_fdr": sample.get("expected_fdr"),
        **document["throughput"],
        **{f"{family}_packing_efficiency": share for family, share in document["packing_efficiency"].items()},
        **{
            f"{model['family']}_{name}": model[name]
            for model in work["models"]
            for name in ("fp32_batches", "out_of_memory")
        },
        **{f"{stage}_seconds": seconds for stage, seconds in document["stage_seconds"].items()},
        "wall_seconds": wall,
        "wall_sequences_per_second": computed / wall if wall else None,
        "sequences": work["frames"],
        **{name: work[name] for name in ("residues", "bases")},
        "tokens": sum(model["tokens"] for model in work["models"]),
        "shards": document["shards"]["total"],
        "computed_shards": document["shards"]["computed"],
        "lanes": len(lanes),
        "gpu_hours": sum(lane["seconds"] for lane in lanes if lane["device"] != "cpu") / 3600,
    }


def _with_training(entry: Entry, root: Path) -> Entry:
    """Adds what figures.json has, and in a flow the head and its card, which lie beside the folder."""
    figures = _read(root / "training" / "figures.json")
    curves = [
        (name, float(one[name]), int(one["epoch"]))
        for one in figures["history"]
        for name in ("train_loss", "validation_loss")
        if one[name] is not None
    ]
    fitted = [("temperature", float(found), 0)] if (found := figures["temperature"]) else []
    metrics = [*entry.metrics, *_level_metrics(figures["test"], "test_"), *fitted, *curves]
    if not entry.files:
        return replace(entry, metrics=metrics)
    head = RunFolder(root.resolve()).embedded
    beside = _own_files(head.parent, [head.name, f"{head.stem}.md"])
    names = [f"training/{name}" for name in ("records.tsv", "figures.json", "roc.png", "reliability.png")]
    return replace(entry, metrics=metrics, files=[*entry.files, *_own_files(root, names), *beside])


def _level_metrics(levels: Mapping[str, Mapping[str, Any]], prefix: str) -> list[Point]:
    return [
        (f"{prefix}{level}_{name}", float(value), 0)
        for level, figures in levels.items()
        for name, value in figures.items()
        if isinstance(value, int | float)
    ]


def _read(path: Path) -> dict[str, Any]:
    if path.resolve() != path.parent.resolve() / path.name:
        raise DamagedFileError(f"{path} is a symbolic link, which virnuc never writes: repeat the command.")
    try:
        return parse_object(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DamagedFileError(f"{path} cannot be read ({error}): repeat the command.") from error


def _own_files(root: Path, names: Sequence[str]) -> list[Path]:
    """Those of the files that are there, in the folder itself and no links."""
    paths = [(root / name, root.resolve() / name) for name in names]
    return [place for path, place in paths if path.is_file() and path.resolve() == place]
