"""Names of flow runs and of their journals."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect.runtime import flow_run

from tasks.pages.markdown import size


def run_name() -> str:
    """Command, sample and size: "predict contigs.fa tiny 12.3 MB"."""
    parameters: dict[str, Any] = flow_run.parameters
    settings = parameters["settings"]
    models = parameters.get("model") or getattr(settings, "preset", "")
    inputs = parameters["inputs"]
    return f"{flow_run.flow_name} {_sample(inputs)} {models} {_size(inputs)}"


def labelled_name() -> str:
    """Command, files and their size: "train viruses.fa and 2 more 12.3 MB"."""
    from virnuc_core.training.labels import LabelledFiles  # slow imports

    files = flow_run.parameters["files"]
    if isinstance(files, dict):  # parameters of a deployment
        files = LabelledFiles(**files)
    return f"{flow_run.flow_name} {_sample(files.paths)} {_size(files.paths)}"


def reprocess_name() -> str:
    """Such as "reprocess my-results"."""
    return f"reprocess {Path(flow_run.parameters['run']).name}"


def lane_name() -> str:
    """Number and device of a lane, "lane-0-cuda:1", or in a pool its size, "lane-12 9 shards"."""
    parameters: dict[str, Any] = flow_run.parameters
    if parameters["device"] in ("auto", "cuda"):
        return f"lane-{parameters['lane']} {len(parameters['shards'])} shards"
    return f"lane-{parameters['lane']}-{parameters['device']}"


def plan_name() -> str:
    """Such as "plan my-results"."""
    return f"plan {Path(flow_run.parameters['folder']).name}"


def lane_journal_name(lane: int, run_id: str | UUID) -> str:
    """Journal of a lane's run."""
    return f"lane-{lane:04d}-{str(run_id)[:8]}"


def plan_journal_name(run_id: str | UUID) -> str:
    """Journal of a planning run."""
    return f"plan-{str(run_id)[:8]}"


def _sample(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return f"{Path(paths[0]).name if paths else ''}{more}"


def _size(paths: Sequence[str]) -> str:
    return size(sum(os.path.getsize(path) for path in paths if os.path.isfile(path)))
