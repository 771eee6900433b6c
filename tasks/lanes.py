"""The lanes of a pool from the run's side: their journals."""

from typing import Final

from virnuc_core.inference.events import (
    LaneEvent,
    LaneFailed,
    LaneFinished,
    LaneReport,
    LaneStarted,
    lane_report,
)
from virnuc_core.inference.lane_journal import JournalTail
from virnuc_core.inference.lane_process import Observer
from virnuc_core.run_folder import RunFolder


class LaneWatch:
    """Tails the journals of a run's lanes, on whatever host they run."""

    def __init__(self, folder: RunFolder, observe: Observer) -> None:
        self._folder: Final = folder
        self._observe = observe
        self._tails: dict[str, JournalTail] = {}
        self._events: dict[str, list[LaneEvent]] = {}

    def follow(self, name: str) -> None:
        """Reads a journal from its start; it need not exist yet."""
        if name not in self._events:
            self._tails[name], self._events[name] = JournalTail(self._folder.lane_journal(name)), []

    def leave(self, name: str) -> None:
        """Reads a journal no more: its lane has ended."""
        self._tails.pop(name, None)

    def poll(self) -> dict[str, list[LaneEvent]]:
        """Passes new events to the observer, in the order of the journals' names, and returns them."""
        new: dict[str, list[LaneEvent]] = {}
        for name in sorted(self._tails):
            events = self._events[name]
            for event in self._tails[name].read_new():
                if not events and not isinstance(event, LaneStarted | LaneFailed):
                    continue  # a lane of an earlier run that is being stopped
                events.append(event)
                new.setdefault(name, []).append(event)
                self._observe(event)
            if events and isinstance(events[-1], LaneFinished):
                self.leave(name)
        return new

    def start(self, name: str) -> LaneStarted | None:
        """The last start of a lane's process, if any."""
        starts = [event for event in self._events[name] if isinstance(event, LaneStarted)]
        return starts[-1] if starts else None

    def failure(self, name: str) -> LaneFailed | None:
        """The journal's record of what stopped a lane for good, if any."""
        events = self._events[name]
        event = events[-1] if events else None
        return event if isinstance(event, LaneFailed) else None

    @property
    def reports(self) -> list[LaneReport]:
        """The work of every started lane, by number."""
        reports = [
            lane_report(events, name)
            for name, events in self._events.items()
            if events and isinstance(events[0], LaneStarted)
        ]
        return sorted(reports, key=lambda report: (report.lane, report.started))
