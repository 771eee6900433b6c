"""The flow for small files: one after another, with models that stay loaded."""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run

from flows.lanes import hold_while_unfit
from tasks.artifacts import begin_flow, is_deployed
from tasks.publishing import flow_links
from virnuc_core import errors, pipeline
from virnuc_core.device_record import recording_device
from virnuc_core.env_config import env
from virnuc_core.inference.device import resolve_devices
from virnuc_core.inference.events import LaneFailed
from virnuc_core.inference.lane_journal import LaneJournal
from virnuc_core.inference.lanes import LocalLanes
from virnuc_core.settings import RunConfig

_log = logging.getLogger(__name__)


def title_of(files: Sequence[str]) -> str:
    """Such as "a.fa and 99 more"."""
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    return f"{Path(files[0]).name}{more}"


def batch_name(files: Mapping[str, str]) -> str:
    return f"predict {title_of(list(files))}"


@flow(
    name="predict-files",
    flow_run_name=lambda: batch_name(flow_run.parameters["files"]),
    persist_result=False,
)
def predict_files(files: dict[str, str], config: RunConfig, journal: str) -> State[Any] | None:
    """Classifies small files as `predict` does, each into its own folder; an error ends only its file.

    Args:
        files: the results folder of each file.
        config: models and how to run them.
        journal: file for the errors, in a folder made by the nightly run, which this host must see, too.

    Raises:
        DeviceLostError: the device failed.
        StorageLostError: the file system failed.
    """
    begin_flow()
    device = "cpu" if config.devices == ("cpu",) else "cuda"
    if is_deployed() and (held := hold_while_unfit(partial(_require_folder, Path(journal).parent), device)):
        return held
    devices = resolve_devices(config.devices)
    with (
        recording_device(env().device_record),
        LocalLanes(devices, keep=True, in_processes=True) as lanes,
        LaneJournal(Path(journal)) as written,
    ):
        for number, (name, results) in enumerate(files.items()):
            state: State[Any] = predict_file(name, results, config, lanes, return_state=True)
            if state.is_completed():
                continue
            error = state.result(raise_on_failure=False)
            kind, retryable = type(error).__name__, errors.is_retryable(error)
            written.write(LaneFailed(lane=number, error=kind, message=str(error), retryable=retryable))
            if isinstance(error, errors.DeviceLostError | errors.StorageLostError):
                raise error
    return None


def _require_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise errors.HostError(
            f"{folder} does not exist: mount the shared folder at the same path, unless the nightly run has ended."
        )


@task(name="predict-file", task_run_name="predict {name}", cache_policy=NO_CACHE, persist_result=False)
def predict_file(name: str, results: str, config: RunConfig, lanes: LocalLanes) -> None:
    """Computes one file; an unfinished run of it that cannot be continued is started over."""
    steps = pipeline.Steps(on_step=_log.debug, links=flow_links())
    try:
        pipeline.predict([name], results, config, lanes, steps=steps)
    except (errors.MismatchError, errors.DamagedFileError) as error:
        _log.warning("%s is computed again: %s", name, error)
        pipeline.predict([name], results, config, lanes, force=True, steps=steps)
