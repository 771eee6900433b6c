"""Models that stay loaded in this process between runs."""

import os
import secrets
import threading
import traceback
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Final

from virnuc_core.errors import DeviceLostError, UsageError
from virnuc_core.inference.events import LaneReport
from virnuc_core.inference.lane_journal import LaneJournal
from virnuc_core.inference.launcher import assign_shards, has_lost_device, prepare_for_gpus, run_lane_here
from virnuc_core.inference.plan import Kind, RunPlan, read_plan
from virnuc_core.inference.planning import open_plan
from virnuc_core.inference.runner import LoadedModels
from virnuc_core.inference.shard import pending_shards, remove_shard_temporaries
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.frame_store import FrameStore
from virnuc_core.settings import RunConfig

# Devices that compute, for whichever `ResidentModels` of this process: threads of different ones would share settings of
# torch, memory of the device and tables of the kernels. Guarded by `_changed`.
_busy: Final[set[str]] = set()
_changed: Final = threading.Condition()


class ResidentModels:
    """Lanes in this process, whose models are loaded by the first run and kept for the next ones.

    May be used by several threads: a run takes the devices that no other run uses, and waits while there are none. Results
    are the same whatever was computed before. `devices` are resolved: "cpu", or "cuda:0", "cuda:1", ...
    """

    def __init__(self, devices: tuple[str, ...]) -> None:
        self._devices = devices
        self._on_gpus = devices[0].startswith("cuda")
        self._models: Final[Mapping[str, LoadedModels]] = {name: LoadedModels(name) for name in devices}
        self._before: dict[RunConfig, RunPlan] = {}
        self._planning = threading.Lock()
        self._in_use: set[str] = set()
        self._is_closed = False
        self._process = os.getpid()
        if self._on_gpus:
            prepare_for_gpus()

    def plan(self, folder: RunFolder, config: RunConfig, kind: Kind) -> RunPlan:
        """Plans in this process.

        From an earlier run with this configuration are kept the token budgets, since the models have taken memory
        meanwhile, and where the models are, of which the hub may have newer ones.
        """
        self._require_usable()
        store, is_new = FrameStore.open(folder.frames), not folder.plan.exists()
        with self._planning:
            before = self._before.get(config)
            asked = _with_locations(config, before)
            plan = open_plan(asked, store, kind, self._devices, folder, before=before)
            if is_new:
                self._before[config] = plan
        return plan

    def compute(self, folder: RunFolder) -> list[LaneReport]:
        """Computes the missing shards, when devices are free; no other process may work in the folder.

        If this thread is interrupted, so are the lanes; the models stay. After any other failure the next run loads them
        anew.

        Raises:
            UsageError: the models are closed, or of another process.
            DeviceLostError: a GPU failed in this process, now or before.
            VirnucError: a lane failed; finished shards are kept.
        """
        plan = read_plan(folder.plan)
        pending = pending_shards(folder, plan)
        remove_shard_temporaries(folder, pending)
        if not pending:
            return []
        stopping = threading.Event()
        lanes: list[Future[LaneReport]] = []
        devices = self._take(len(pending))
        try:
            with ThreadPoolExecutor(len(devices), thread_name_prefix="lane") as threads:
                try:
                    for lane, shards in enumerate(assign_shards(plan, pending, len(devices))):
                        models = self._models[devices[lane]]
                        models.stopping = stopping
                        lanes.append(threads.submit(self._compute_lane, folder, shards, models, lane))
                    wait(lanes)
                except BaseException:
                    stopping.set()
                    raise
        finally:
            self._give_back(devices[len(lanes) :])
        return [lane.result() for lane in lanes]

    def close(self) -> None:
        """Waits for runs under way, and frees the memory of the devices; may be called again."""
        if self._process != os.getpid():
            return
        with _changed:
            self._is_closed = True
            _changed.notify_all()
            _changed.wait_for(lambda: not self._in_use)
            for models in self._models.values():
                if not has_lost_device():
                    models.close()

    def _compute_lane(
        self, folder: RunFolder, shards: Sequence[int], models: LoadedModels, lane: int
    ) -> LaneReport:
        try:
            path = folder.lane_journal(f"lane-{lane:04d}-{secrets.token_hex(4)}")
            with LaneJournal(path) as journal, journal.recording_failure(lane):
                return run_lane_here(folder, shards, models, journal.write, lane)
        except Exception as error:
            if not has_lost_device():
                _clear_frames(error)
                models.close()
            raise
        finally:
            self._give_back([models.device])

    def _take(self, most: int) -> list[str]:
        """Waits until devices are free, and takes these."""
        with _changed:
            _changed.wait_for(lambda: self._is_closed or not _busy.issuperset(self._devices))
            self._require_usable()
            taken = [name for name in self._devices if name not in _busy][:most]
            _busy.update(taken)
            self._in_use.update(taken)
        return taken

    def _give_back(self, devices: Iterable[str]) -> None:
        with _changed:
            _busy.difference_update(devices)
            self._in_use.difference_update(devices)
            _changed.notify_all()

    def _require_usable(self) -> None:
        if self._process != os.getpid():
            raise UsageError(
                f"these models were loaded by process {self._process}, and this is its child {os.getpid()}: make them where "
                "they are used."
            )
        if self._is_closed:
            raise UsageError("these models are closed: make new ones, or close them later.")
        if self._on_gpus and has_lost_device():
            raise DeviceLostError(
                "a GPU failed in this process, which can compute on none any more: start it (in a notebook, the kernel) again."
            )


def _with_locations(config: RunConfig, before: RunPlan | None) -> RunConfig:
    """A configuration with the locations of its models for their names, unless a bundled head goes by these."""
    if before is None or (before.kind == "predict" and config.head is None):
        return config
    models = {"esm_model": before.model("esm2"), "dnabert_model": before.model("dnabert_s")}
    return config.model_copy(update={name: model.location for name, model in models.items() if model})


def _clear_frames(error: BaseException | None) -> None:
    """Drops what the functions that an error went through refer to: notebooks keep the last error, and with it models."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
