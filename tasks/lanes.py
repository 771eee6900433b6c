"""The lanes of a pool from the run's side: their journals in the run's folder."""

from collections.abc import Iterator

from virnuc_core.errors import LaneError, VirnucError
from virnuc_core.inference.events import LaneEvent, LaneFailed, LaneReport, LaneStarted, lane_report
from virnuc_core.inference.lane_journal import JournalTail, error_of
from virnuc_core.inference.lane_process import Observer
from virnuc_core.run_folder import RunFolder


class LaneWatch:
    """Tails the journals of a run's lanes, on whatever host they run, and passes their events on to an observer."""

    def __init__(self, folder: RunFolder, observe: Observer) -> None:
        self._folder = folder
        self._observe = observe
        self._tails: dict[str, JournalTail] = {}
        self._events: dict[str, list[LaneEvent]] = {}

    def follow(self, name: str) -> None:
        """Reads a journal from its start; it need not exist yet."""
        self._tails[name], self._events[name] = JournalTail(self._folder.lane_journal(name)), []

    def leave(self, name: str) -> None:
        """Reads what is left of a journal, and then no more: its lane has ended."""
        self._read(name)
        del self._tails[name]

    def poll(self) -> None:
        """Reads all journals on, in the order of their names."""
        for name in sorted(self._tails):
            self._read(name)

    def _read(self, name: str) -> None:
        for event in self._tails[name].read_new():
            self._events[name].append(event)
            self._observe(event)

    def num_events(self, name: str) -> int:
        """How much a lane has told, for whoever wants to see that it gets on."""
        return len(self._events[name])

    def error(self, name: str, otherwise: str) -> VirnucError:
        """What stopped a lane for good: from its journal, or else `otherwise`."""
        events = self._events[name]
        if not events or not isinstance(failure := events[-1], LaneFailed):
            return LaneError(otherwise)
        kind, text = error_of(failure)
        return kind(text)

    def reports(self) -> Iterator[LaneReport]:
        """The work of every lane that has started."""
        for name, events in self._events.items():
            begun = [place for place, event in enumerate(events) if isinstance(event, LaneStarted)]
            if begun:
                yield lane_report(events[begun[0] :], name)
