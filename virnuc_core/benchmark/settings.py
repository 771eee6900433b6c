"""Settings of a benchmark, from which `virnuc bench` and `python -m virnuc_core.benchmark` make their options."""

from dataclasses import dataclass
from typing import Annotated, Final, Self, get_args

from pydantic import Field, model_validator

from virnuc_core.errors import UsageError
from virnuc_core.settings import Metavar, Settings
from virnuc_core.specs import AttentionChoice, CompileMode, Family, Precision

_DEFAULT_LENGTHS: Final[dict[Family, str]] = {"esm2": "fixed:166", "dnabert_s": "fixed:500"}


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths: "fixed" or "lognormal" residues or bases, or "tokens", special tokens included."""

    kind: str
    value: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads `fixed:N`, `tokens:N` or `lognormal`.

        Raises:
            UsageError: it is none of them.
        """
        kind, _, number = text.partition(":")
        if text == "lognormal":
            return cls(kind)
        if kind in ("fixed", "tokens") and number.isascii() and number.isdigit() and int(number) > 2:
            return cls(kind, int(number))
        raise UsageError(
            f"--lengths {text} is not understood: give fixed:N, tokens:N (N above 2) or lognormal."
        )

    def __str__(self) -> str:
        return self.kind if self.kind == "lognormal" else f"{self.kind}:{self.value}"


class BenchSettings(Settings):
    """Each model in each precision at each distribution of lengths.

    Raises:
        UsageError: settings that exclude each other, or a value that is not understood.
    """

    model: Annotated[tuple[str, ...], Metavar("NAME|PATH")] = Field(
        default=(),
        description="Model, as in `embed`; random:NAME draws the weights. Several are measured in turn",
    )
    precision: Annotated[str, Metavar("P,P,...")] = Field(
        default="auto", description="Arithmetic, one or several"
    )
    lengths: Annotated[str | None, Metavar("L,L,...")] = Field(
        default=None,
        description="Letters as fixed:N or lognormal, or tokens:N; one or several [fixed:166 residues, 500 bases]",
    )
    devices: Annotated[str, Metavar("auto|cpu|0,1,...")] = Field(
        default="auto", description="Where to compute"
    )
    token_budget: Annotated[int | None, Metavar("N")] = Field(
        default=None, description="Most tokens in one batch [by the device]"
    )
    attention: AttentionChoice = Field(default="auto", description="Attention backend")
    compile_mode: CompileMode = Field(
        default="auto", description="torch.compile of the layers [auto: as for a long run]"
    )
    seconds: Annotated[float, Metavar("S")] = Field(
        default=5.0, description="Least length of one measurement"
    )
    repeats: Annotated[int, Metavar("N")] = Field(default=3, description="Measurements of each figure")
    end_to_end: Annotated[float | None, Metavar("S")] = Field(
        default=None,
        description="Also from stored sequences to shards on the disk, S seconds of work on each device",
    )
    scaling: bool = Field(
        default=False,
        description="End to end on 1, 2, 4, ... of the devices too, each with its share of work",
    )
    out: Annotated[str | None, Metavar("FILE.json")] = Field(
        default=None, description="Where everything measured is written"
    )

    @property
    def precisions(self) -> tuple[str, ...]:
        """Each precision to measure."""
        return tuple(self.precision.split(","))

    def lengths_for(self, family: Family) -> tuple[Lengths, ...]:
        """The distributions to measure; by default the usual one of the family."""
        return tuple(map(Lengths.parse, (self.lengths or _DEFAULT_LENGTHS[family]).split(",")))

    def arguments(self) -> list[str]:
        """The command line that repeats the measurement, without the program and without --out."""
        arguments: list[str] = []
        for name, value in self.model_dump(exclude_defaults=True, exclude={"out"}).items():
            for one in value if isinstance(value, tuple) else [value]:
                arguments += [f"--{name.replace('_', '-')}", *([] if one is True else [str(one)])]
        return arguments

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.model:
            raise UsageError("no model is given: name one with --model, such as --model random:650M.")
        if unknown := [name for name in self.precisions if name not in get_args(Precision)]:
            raise UsageError(
                f"--precision {','.join(unknown)} is unknown: choose from {', '.join(get_args(Precision))}."
            )
        if self.seconds <= 0 or self.repeats < 1 or (self.end_to_end is not None and self.end_to_end <= 0):
            raise UsageError("--seconds, --repeats and --end-to-end must be above 0.")
        if self.end_to_end is None and self.scaling:
            raise UsageError("--scaling compares end-to-end speeds: give --end-to-end S as well.")
        if self.end_to_end is not None and any(each.kind == "tokens" for each in self.lengths_for("esm2")):
            raise UsageError(
                "--end-to-end begins with letters, so --lengths tokens:N cannot be used: give fixed:N."
            )
        return self
