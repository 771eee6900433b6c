"""One line of the output of `virnuc doctor`."""

from dataclasses import dataclass

from virnuc_core.plain_text import visible
from virnuc_core.versions import State


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check; `is_device` is set for GPUs and their software."""

    topic: str
    name: str
    state: State
    found: str
    advice: str = ""
    is_device: bool = False

    @property
    def summary(self) -> str:
        """For the terminal, with the advice on a line of its own."""
        line = f"{self.state:<7}  {self.topic}: {self.name}: {self.found}"
        return visible(f"{line}\n         -> {self.advice}" if self.advice else line)
