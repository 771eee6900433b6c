"""Names of runs, by which a person finds one again in a list, and of the journals that they keep."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect.runtime import flow_run

from tasks.pages.markdown import size


def run_name() -> str:
    """Sample, what is done with it, and how large it is: "predict contigs.fa tiny 12.3 MB"."""
    parameters: dict[str, Any] = flow_run.parameters
    settings = parameters["settings"]
    models = parameters.get("model") or getattr(settings, "preset", "")
    inputs = parameters["inputs"]
    return f"{flow_run.flow_name} {_sample(inputs)} {models} {_size(inputs)}"


def labelled_name() -> str:
    """What is done with which files, and how large they are: "train viruses.fa and 2 more 12.3 MB"."""
    from virnuc_core.training.labels import LabelledFiles  # imports what only labelled files need

    files = flow_run.parameters["files"]
    if isinstance(files, dict):  # as a deployment is given them
        files = LabelledFiles(**files)
    return f"{flow_run.flow_name} {_sample(files.paths)} {_size(files.paths)}"


def reprocess_name() -> str:
    """What is moved to other settings: "reprocess my-results"."""
    return f"reprocess {Path(flow_run.parameters['run']).name}"


def lane_name() -> str:
    """Number and device of a lane: "lane-0-cuda:1"; in a pool, which decides where, its size: "lane-12 9 shards"."""
    parameters: dict[str, Any] = flow_run.parameters
    if parameters["device"] in ("auto", "cuda"):
        return f"lane-{parameters['lane']} {len(parameters['shards'])} shards"
    return f"lane-{parameters['lane']}-{parameters['device']}"


def plan_name() -> str:
    """What is planned: "plan my-results"."""
    return f"plan {Path(flow_run.parameters['folder']).name}"


def lane_journal_name(lane: int, run_id: str | UUID) -> str:
    """Name of the journal that a lane's run keeps."""
    return f"lane-{lane:04d}-{str(run_id)[:8]}"


def plan_journal_name(run_id: str | UUID) -> str:
    """Name of the journal that a run of the planning keeps."""
    return f"plan-{str(run_id)[:8]}"


def _sample(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return f"{Path(paths[0]).name if paths else ''}{more}"


def _size(paths: Sequence[str]) -> str:
    return size(sum(os.path.getsize(path) for path in paths if os.path.isfile(path)))
