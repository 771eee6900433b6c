"""Which slots and hosts take jobs: their checks, the outcomes of their jobs, and quarantine."""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.workers.process import ProcessJobConfiguration, ProcessWorker, ProcessWorkerResult

from deployments import fitness
from deployments.device_worker import SlotWorker
from deployments.fitness import Fitness, Host, Slot, fault_of_program, is_locked
from deployments.processes import only_one
from deployments.server import QUARANTINED, RELEASED
from virnuc_core import __version__
from virnuc_core.errors import HostError
from virnuc_core.run_folder import RunFolder

Events = list[tuple[str, str]]


@pytest.fixture(autouse=True)
def events(monkeypatch: pytest.MonkeyPatch) -> Events:
    """Events instead of sending them; no server is asked, and checks are due at once."""
    sent: Events = []
    monkeypatch.setattr(Fitness, "_emit", lambda self, event, reason: sent.append((event, reason)))
    monkeypatch.setattr(fitness, "CHECK_SECONDS", 0.0)
    monkeypatch.setattr(fitness, "deployed_versions", lambda: [__version__])
    monkeypatch.setattr(fitness, "is_run_over", lambda job: False)
    monkeypatch.setattr(fitness, "_IMPORTS", (sys.executable, "-c", ""))
    return sent


async def settled(tested: Fitness) -> bool:
    """Whether it takes jobs, once a check that is due has ended."""
    tested.poll()
    if tested._check is not None:
        await tested._check
    return tested._is_checked and tested.reason is None


def finding(faults: list[str | None]) -> Callable[[], Awaitable[str | None]]:
    """A check that finds these, one after the other, and then nothing."""

    async def find() -> str | None:
        return faults.pop(0) if faults else None

    return find


def test_no_job_before_the_first_check_and_none_in_quarantine(
    events: Events, caplog: pytest.LogCaptureFixture
) -> None:
    async def live() -> None:
        tested = Fitness("host-gpu", "gpu0", finding(["ECC error", "ECC error", None]))
        assert not tested.poll()
        assert [await settled(tested) for _ in range(3)] == [False, False, True]
        assert tested.poll()

    asyncio.run(live())
    assert [event for event, _ in events] == [QUARANTINED, RELEASED]
    assert "host-gpu gpu0 is in quarantine: ECC error" in caplog.text
    assert "released" in caplog.text


def test_a_slot_is_checked_after_a_failure_and_given_up_after_three_in_a_row(events: Events) -> None:
    async def live() -> None:
        tested = Fitness("host-gpu", "gpu0", finding([]))
        assert await settled(tested)
        for _ in range(2):
            tested.fail("DeviceLostError: gone.")
            assert not tested.poll()
            assert await settled(tested)
        tested.succeed()
        for is_fit in (True, True, False):
            tested.fail("DeviceLostError: gone.")
            assert await settled(tested) is is_fit

    asyncio.run(live())
    assert [event for event, _ in events] == [RELEASED, QUARANTINED]
    assert "3 jobs in a row failed here" in events[-1][1]
    assert "DeviceLostError: gone." in events[-1][1]


def test_a_check_that_fails_itself_is_repeated(events: Events) -> None:
    faults = [OSError("no process can be started")]

    async def find() -> str | None:
        if faults:
            raise faults.pop()
        return None

    async def live() -> None:
        tested = Fitness("host", "host", find)
        assert [await settled(tested) for _ in range(2)] == [False, True]

    asyncio.run(live())
    assert "no process can be started" in events[0][1]


def test_what_happens_during_a_check_is_checked_again() -> None:
    async def live() -> None:
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def find() -> str | None:
            begun.set()
            await go_on.wait()
            return None

        tested = Fitness("host", "host", find)
        tested.poll()
        await begun.wait()
        tested.check_again()
        go_on.set()
        assert tested._check is not None
        await tested._check
        assert not tested._is_checked
        assert await settled(tested)

    asyncio.run(live())


def test_a_program_says_what_is_wrong_and_one_that_hangs_keeps_the_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / "lock"
    # Its child is left when it is killed.
    hangs = "import os, time; os.fork() and time.sleep(60); os.close(2); time.sleep(9)"

    def fault(code: str) -> str | None:
        return asyncio.run(fault_of_program((sys.executable, "-c", code), {"A": "b"}, lock))

    assert fault("import os; assert os.environ['A'] == 'b'") is None
    assert fault("raise SystemExit('first\\nno GPU')") == "no GPU"
    assert not is_locked(lock)
    with only_one(lock, ""):
        assert fault("") == "a job of an earlier worker has it"
    monkeypatch.setattr(fitness, "_PROGRAM_SECONDS", 1.0)
    assert fault(hangs) == "no answer from its check within 1 s"
    assert is_locked(lock)


@pytest.mark.parametrize("visible", ["", "0"])
def test_a_slot_has_one_job_at_a_time(visible: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "import os, sys; sys.exit('no GPU' if os.environ['CUDA_VISIBLE_DEVICES'] else 0)"
    monkeypatch.setattr(fitness, "_GPU_CHECK", (sys.executable, "-c", said))

    async def live() -> None:
        slot = Slot("host", "slot", {"CUDA_VISIBLE_DEVICES": visible}, tmp_path / "lock")
        with only_one(slot.lock, ""):  # a job of an earlier worker
            assert not slot.is_free()
            assert slot.fitness._check is None
        assert await settled(slot.fitness) is not bool(visible)
        assert slot.is_free() is not bool(visible)
        slot.is_busy = True
        assert not slot.is_free()

    asyncio.run(live())


def job(folder: Path | str = "/data/run", token: str = "", version: str | None = __version__) -> FlowRun:
    parameters = {"folder": str(folder), "token": token} if token else {}
    return FlowRun(id=uuid4(), flow_id=uuid4(), parameters=parameters, deployment_version=version)


def test_a_host_of_another_version_takes_no_jobs(events: Events, monkeypatch: pytest.MonkeyPatch) -> None:
    async def live() -> None:
        monkeypatch.setattr(fitness, "deployed_versions", lambda: ["99.1.0"])
        host = Host("host")
        assert not await settled(host.fitness)
        assert host.fitness.reason is not None
        assert "99.1.0" in host.fitness.reason
        monkeypatch.setattr(fitness, "deployed_versions", lambda: [__version__, None])
        assert await settled(host.fitness)
        # Deployed again, after that check.
        with pytest.raises(HostError, match=r"99\.2\.0"):
            await host.require_fit_for(job(version="99.2.0"))
        assert not host.fitness.poll()
        await host.require_fit_for(job())

    asyncio.run(live())
    assert [event for event, _ in events] == [QUARANTINED, RELEASED, QUARANTINED]


def test_a_host_without_the_shared_folder_takes_no_jobs_until_it_sees_it(
    tmp_path: Path, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(tmp_path / "shared" / "run")
    other = job(tmp_path / "gone", "2")

    async def live() -> None:
        host = Host("host")
        assert await settled(host.fitness)
        with pytest.raises(HostError, match="mount the shared folder"):
            await host.require_fit_for(job(run.root, "1"))
        assert not await settled(host.fitness)
        run.lanes.mkdir(parents=True)
        run.token.write_text("0")  # a run of the same name on the host's own disk
        assert not await settled(host.fitness)
        run.token.write_text("1")
        assert await settled(host.fitness)
        await host.require_fit_for(job(run.root, "1"))
        host.avoid(other)
        assert not await settled(host.fitness)
        monkeypatch.setattr(fitness, "is_run_over", lambda job: job is other)
        assert await settled(host.fitness)

    asyncio.run(live())
    assert [event for event, _ in events] == [
        *(RELEASED, QUARANTINED, QUARANTINED, RELEASED),
        *(QUARANTINED, RELEASED),
    ]


def test_a_broken_installation_takes_no_jobs(events: Events, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitness, "_IMPORTS", (sys.executable, "-c", "import no_such_module"))
    host = Host("host")
    assert not asyncio.run(settled(host.fitness))
    assert events == [(QUARANTINED, "ModuleNotFoundError: No module named 'no_such_module'")]


def outcome(error: str | None) -> str:
    return json.dumps({"error": error, "message": "the reason", "shards": 0})


@pytest.mark.parametrize(
    ("written", "code", "slot_failures", "is_checked_again", "is_folder_checked"),
    [
        (outcome(None), 0, 0, False, False),
        (None, 0, 0, False, False),  # a run that was cancelled before it began, or a whole run
        (outcome("DeviceLostError"), 0, 1, True, False),
        (outcome("DeviceMemoryError"), 0, 1, True, False),
        (outcome("LaneError"), 0, 1, True, False),
        (None, -9, 1, True, False),
        (None, 137, 1, True, False),
        (outcome("HostError"), 0, 0, True, True),
        (None, 1, 0, True, True),  # the process could not start
        (outcome("DeviceError"), 0, 0, True, False),  # what was asked for is not supported
        (outcome("InputError"), 0, 0, True, False),
        (outcome("TerminationSignal"), 0, 0, True, False),  # cancelled
    ],
)
def test_outcomes_decide_what_is_checked_and_counted(
    written: str | None,
    code: int,
    slot_failures: int,
    is_checked_again: bool,
    is_folder_checked: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """tests/production covers Prefect's part, which starts the process and polls the server."""
    started: list[ProcessJobConfiguration] = []

    async def run(self: object, run: FlowRun, configuration: ProcessJobConfiguration, _: object) -> Any:
        started.append(configuration)
        assert (tmp_path / f"{run.id}.lock").exists()
        if written is not None:
            Path(str(configuration.env["VIRNUC_OUTCOME"])).write_text(written)
        return ProcessWorkerResult(identifier="1", status_code=code)

    monkeypatch.setattr(ProcessWorker, "run", run)

    async def live() -> None:
        host = Host("host")
        slot = Slot("host-cpu", "cpu0", {"VIRNUC_THREADS": "3"}, tmp_path / "a slot")
        worker = SlotWorker("pool", "host-cpu", [slot], host, tmp_path)
        assert await settled(host.fitness)
        assert await settled(slot.fitness)
        configuration = ProcessJobConfiguration(command="python -m deployments.engine", env={"A": "b"})
        flow_run = job()
        await worker.run(flow_run, configuration)
        assert configuration.command == (
            f"{sys.executable} -m deployments.engine {tmp_path}/{flow_run.id}.lock '{tmp_path}/a slot'"
        )
        assert configuration.env["A"] == "b"
        assert configuration.env["VIRNUC_THREADS"] == "3"
        assert not slot.is_busy
        assert len(slot.fitness._failures) == slot_failures
        assert {slot.fitness._is_checked, host.fitness._is_checked} == {not is_checked_again}
        assert bool(host._unseen) is is_folder_checked

    asyncio.run(live())
    assert [path.name for path in tmp_path.iterdir()] == ["a slot"]


def test_polls_for_as_many_jobs_as_there_are_usable_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []

    async def ask(self: SlotWorker) -> list[FlowRun]:
        limits.append(self.limiter.total_tokens)
        return []

    monkeypatch.setattr(ProcessWorker, "get_and_submit_flow_runs", ask)

    async def live() -> None:
        host = Host("host")
        slots = [Slot("host-cpu", f"cpu{number}", {}, tmp_path / f"{number}") for number in range(4)]
        worker = SlotWorker("pool", "host-cpu", slots, host, tmp_path)
        monkeypatch.setattr(SlotWorker, "limiter", asyncio.Semaphore())  # an object with attributes
        await worker.get_and_submit_flow_runs()
        assert limits == []  # nothing is checked yet
        for each in (host.fitness, *(slot.fitness for slot in slots)):
            assert await settled(each)
        slots[0].is_busy = True
        slots[1].fitness.quarantine("sick")
        with only_one(slots[2].lock, ""):  # an earlier worker's
            await worker.get_and_submit_flow_runs()
            assert limits == [2]
            slots[3].is_busy = True
            await worker.get_and_submit_flow_runs()
        await worker.get_and_submit_flow_runs()
        assert limits == [2, 3]
        host.fitness.quarantine("full")
        await worker.get_and_submit_flow_runs()
        assert limits == [2, 3]

    asyncio.run(live())
