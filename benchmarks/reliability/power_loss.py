"""Disk contents after a power failure: the minimum that unsynced data may leave."""

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from benchmarks.reliability.faults import TracedCall


@dataclass(kw_only=True)
class Disk:
    """What is not yet guaranteed to be on disk.

    Attributes:
        unsynced_content: files written since they were last synced.
        pending: name changes, in order, in folders not synced since.
    """

    unsynced_content: set[Path] = field(default_factory=set)
    pending: list[TracedCall] = field(default_factory=list)

    @classmethod
    def after(cls, calls: Iterable[TracedCall]) -> Self:
        """The state after these calls."""
        disk = cls()
        for call in calls:
            disk._add(call)
        return disk

    @property
    def unsynced_names(self) -> list[Path]:
        """Names that may be missing or outdated."""
        return [call.new_path or call.path for call in self.pending]

    def lose_content(self) -> None:
        """Empties every file with unsynced content."""
        for path in self.unsynced_content:
            if path.is_file():
                os.truncate(path, 0)

    def lose_names(self) -> None:
        """Undoes unsynced name changes, last first."""
        for call in reversed(self.pending):
            if call.kind == "rename" and call.new_path is not None and call.new_path.exists():
                call.path.parent.mkdir(parents=True, exist_ok=True)
                os.replace(call.new_path, call.path)
            elif call.kind == "mkdir":
                shutil.rmtree(call.path, ignore_errors=True)
            elif call.kind == "open":
                call.path.unlink(missing_ok=True)

    def _add(self, call: TracedCall) -> None:
        match call.kind:
            case "open":
                self.unsynced_content.add(call.path)
                self.pending.append(call)
            case "mkdir":
                self.pending.append(call)
            case "write":
                self.unsynced_content.add(call.path)
            case "fsync":
                self.unsynced_content.discard(call.path)
                self.pending = [p for p in self.pending if (p.new_path or p.path).parent != call.path]
            case "unlink":
                self.unsynced_content.discard(call.path)
                self.pending = [p for p in self.pending if (p.new_path or p.path) != call.path]
            case "rename" if call.new_path is not None:
                self._rename(call.path, call.new_path)
                self.pending.append(call)

    def _rename(self, old: Path, new: Path) -> None:
        """Also renames everything below a folder; a temporary name is not tracked."""

        def moved(path: Path) -> Path:
            return new / path.relative_to(old) if path == old or old in path.parents else path

        self.unsynced_content = {moved(path) for path in self.unsynced_content}
        self.pending = [
            replace(call, path=moved(call.path), new_path=call.new_path and moved(call.new_path))
            for call in self.pending
            if (call.new_path or call.path) != old
        ]
