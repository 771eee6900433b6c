"""Names of runs over labelled files; apart from the others, which need none of what reads such files."""

from pathlib import Path

from prefect.runtime import flow_run

from tasks.markdown import size
from virnuc_core.training.labels import LabelledFiles


def labelled_name() -> str:
    """What is done with which files, and how large they are: "train viruses.fa and 2 more 12.3 MB"."""
    files = flow_run.parameters["files"]
    if isinstance(files, dict):  # as a deployment is given them
        files = LabelledFiles(**files)
    paths = [Path(name) for name in files.paths]
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    num_bytes = sum(path.stat().st_size for path in paths if path.is_file())
    return f"{flow_run.flow_name} {paths[0].name if paths else ''}{more} {size(num_bytes)}"
