"""Names of runs, by which a person finds one again in a list, and of the journals that they keep."""

from pathlib import Path
from typing import Any
from uuid import UUID

from prefect.runtime import flow_run

from tasks.markdown import size


def run_name() -> str:
    """Sample, what is done with it, and how large it is: "predict contigs.fa tiny 12.3 MB"."""
    parameters: dict[str, Any] = flow_run.parameters
    inputs = [Path(name) for name in parameters["inputs"]]
    sample = inputs[0].name + (f" and {len(inputs) - 1} more" if len(inputs) > 1 else "")
    num_bytes = sum(path.stat().st_size for path in inputs if path.is_file())
    settings = parameters["settings"]
    models = parameters.get("model") or getattr(settings, "preset", "")
    return f"{flow_run.flow_name} {sample} {models} {size(num_bytes)}"


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
