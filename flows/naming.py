"""Names of runs, by which a person finds one again in a list."""

from pathlib import Path
from typing import Any

from prefect.runtime import flow_run


def run_name() -> str:
    """Sample, what is done with it, and how large it is: "predict contigs.fa tiny 12.3 MB"."""
    parameters: dict[str, Any] = flow_run.parameters
    inputs = [Path(name) for name in parameters["inputs"]]
    sample = inputs[0].name + (f" and {len(inputs) - 1} more" if len(inputs) > 1 else "")
    size = sum(path.stat().st_size for path in inputs if path.is_file()) / 1e6
    settings = parameters["settings"]
    models = parameters.get("model") or getattr(settings, "preset", "")
    return f"{flow_run.flow_name} {sample} {models} {size:.1f} MB"
