"""What lanes tell in their journals, heard by the run that they work for, wherever they are."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

from virnuc_core.inference.events import LaneFailed, LaneFinished, LaneReport, LaneStarted
from virnuc_core.inference.lane_journal import JournalEntry, JournalTail, lane_report
from virnuc_core.run_folder import RunFolder

_JOURNALS: Final = "lane-*.jsonl"


class LaneObserver(Protocol):
    """Something that shows or records what lanes do."""

    def on_entry(self, name: str, entry: JournalEntry) -> None:
        """Hears the next entry of the journal with this name."""

    def end_poll(self) -> None:
        """Has heard everything that is new for now."""


class LaneWatch:
    """Hears the lanes of one run; what earlier runs left in its folder is passed over.

    Args:
        folder: the run's folder.
        observers: who is told, in this order.
    """

    def __init__(self, folder: RunFolder, observers: Sequence[LaneObserver] = ()) -> None:
        self._folder = folder
        self._observers = observers
        self._tails: dict[str, JournalTail] = {}
        self._heard: dict[str, list[JournalEntry]] = {}
        for path in folder.lanes.glob(_JOURNALS):
            self._tail(path).skip()

    def adopt(self, name: str) -> None:
        """Hears a lane of an earlier run from its beginning, because it works for this one now."""
        self._tails[name] = JournalTail(self._folder.lane_journal(name))

    def poll(self) -> None:
        """Tells the observers what is new."""
        for path in sorted(self._folder.lanes.glob(_JOURNALS)):
            entries = self._heard.setdefault(path.stem, [])
            if entries and isinstance(entries[-1].event, LaneFinished):
                continue
            for entry in self._tail(path).read_new():
                if not entries and not isinstance(entry.event, LaneStarted | LaneFailed):
                    continue  # a lane of an earlier run, on its way out
                entries.append(entry)
                for observer in self._observers:
                    observer.on_entry(path.stem, entry)
        for observer in self._observers:
            observer.end_poll()

    def failure(self, name: str) -> LaneFailed | None:
        """What stopped a lane for good, if its journal tells."""
        entries = self._heard.get(name)
        event = entries[-1].event if entries else None
        return event if isinstance(event, LaneFailed) else None

    @property
    def reports(self) -> list[LaneReport]:
        """The work of every lane that was heard, by its number."""
        begun = [heard for heard in self._heard.values() if heard and isinstance(heard[0].event, LaneStarted)]
        return sorted(map(lane_report, begun), key=lambda report: (report.lane, report.started))

    def _tail(self, path: Path) -> JournalTail:
        return self._tails.setdefault(path.stem, JournalTail(path))
