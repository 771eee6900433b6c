"""What a benchmark is asked to measure; one table of options serves `virnuc bench` and `python -m`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self, get_args

from virnuc_core.errors import UsageError
from virnuc_core.specs import AttentionChoice, CompileMode, Family, Precision

_DEFAULT_LENGTHS: Final[dict[Family, str]] = {"esm2": "fixed:166", "dnabert_s": "fixed:500"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One option of the command line.

    Attributes:
        flag: with its dashes.
        help: one sentence, the default in brackets.
        kind: what its text becomes; `bool` is a switch.
        default: without the option.
        metavar: what the help calls its value.
        choices: all allowed values; empty for any.
        multiple: may be given several times.
    """

    flag: str
    help: str
    kind: type = str
    default: Any = None
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    multiple: bool = False

    @property
    def name(self) -> str:
        """The flag as a Python name."""
        return self.flag.removeprefix("--").replace("-", "_")


OPTIONS: Final = (
    Option(
        flag="--model",
        metavar="NAME|PATH",
        multiple=True,
        help="Model, as in `embed`; random:NAME draws the weights. Several are measured in turn.",
    ),
    Option(flag="--precision", default="auto", metavar="P,P,...", help="Arithmetic, one or several [auto]."),
    Option(
        flag="--lengths",
        metavar="L,L,...",
        help="Letters as fixed:N or lognormal, or tokens:N; one or several [fixed:166 residues, 500 bases].",
    ),
    Option(flag="--devices", default="auto", metavar="auto|cpu|0,1,...", help="Where to compute [auto]."),
    Option(flag="--token-budget", kind=int, metavar="N", help="Most tokens in one batch [by the device]."),
    Option(
        flag="--attention",
        default="auto",
        choices=get_args(AttentionChoice),
        help="Attention backend [auto].",
    ),
    Option(
        flag="--compile-mode",
        default="auto",
        choices=get_args(CompileMode),
        help="torch.compile of the layers [auto: as for a long run].",
    ),
    Option(
        flag="--seconds", kind=float, default=5.0, metavar="S", help="Least length of one measurement [5]."
    ),
    Option(flag="--repeats", kind=int, default=3, metavar="N", help="Measurements of each figure [3]."),
    Option(
        flag="--end-to-end",
        kind=float,
        metavar="S",
        help="Also from stored sequences to shards on the disk, S seconds of work on each device.",
    ),
    Option(
        flag="--scaling",
        kind=bool,
        default=False,
        help="End to end on 1, 2, 4, ... of the devices too, each with its share of work.",
    ),
    Option(flag="--out", metavar="FILE.json", help="Where everything measured is written."),
)


def arguments_of(values: Mapping[str, Any]) -> list[str]:
    """The command line that measures the same again, without the program and without --out."""
    arguments: list[str] = []
    for option in OPTIONS:
        value = values[option.name]
        if option.name == "out" or value == option.default or value == ():
            continue
        if option.kind is bool:
            arguments.append(option.flag)
            continue
        for one in value if option.multiple else [value]:
            arguments += [option.flag, str(one)]
    return arguments


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of sequence lengths.

    Attributes:
        kind: "fixed" and "lognormal" count letters, "tokens" counts tokens with the special ones.
        value: the length; 0 for "lognormal".
    """

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


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchSettings:
    """What to measure: each model in each precision at each distribution of lengths.

    Attributes:
        models: names or paths, `esm2:` or `dnabert:` before those that two families have.
        precisions: arithmetic to compare.
        lengths: distributions of lengths; empty is the usual one of each family.
        devices: "auto", "cpu" or GPU indices; one device alone is measured on the first of them.
        token_budget: most tokens in one batch; None is by model and device.
        attention: attention backend.
        compile_mode: how the layers are compiled.
        seconds: least length of one measurement.
        repeats: measurements of each figure.
        end_to_end: seconds of work on each device from stored sequences to shards; None for none.
        scaling: whether fewer of the devices are measured as well.
        out: file for the result; None for none.
    """

    models: tuple[str, ...]
    precisions: tuple[Precision, ...]
    lengths: tuple[Lengths, ...]
    devices: tuple[str, ...]
    token_budget: int | None
    attention: AttentionChoice
    compile_mode: CompileMode
    seconds: float
    repeats: int
    end_to_end: float | None
    scaling: bool
    out: str | None

    @classmethod
    def from_options(cls, values: Mapping[str, Any]) -> Self:
        """Reads the values of `OPTIONS`, by their flags' names with underscores.

        Raises:
            UsageError: one of them cannot be used.
        """
        settings = cls(
            models=tuple(values["model"] or ()),
            precisions=tuple(values["precision"].split(",")),
            lengths=tuple(map(Lengths.parse, values["lengths"].split(","))) if values["lengths"] else (),
            devices=tuple(values["devices"].split(",")),
            **{
                name: values[name]
                for name in (
                    *("token_budget", "attention", "compile_mode", "seconds", "repeats"),
                    *("end_to_end", "scaling", "out"),
                )
            },
        )
        settings._check()
        return settings

    def lengths_for(self, family: Family) -> tuple[Lengths, ...]:
        """The distributions asked for, or the usual one of a family."""
        return self.lengths or (Lengths.parse(_DEFAULT_LENGTHS[family]),)

    def _check(self) -> None:
        if not self.models:
            raise UsageError("no model is given: name one with --model, such as --model random:650M.")
        if unknown := [name for name in self.precisions if name not in get_args(Precision)]:
            raise UsageError(
                f"--precision {','.join(unknown)} is unknown: choose from {', '.join(get_args(Precision))}."
            )
        if self.seconds <= 0 or self.repeats < 1 or (self.end_to_end is not None and self.end_to_end <= 0):
            raise UsageError("--seconds, --repeats and --end-to-end must be above 0.")
        if self.end_to_end is None and self.scaling:
            raise UsageError("--scaling compares end-to-end speeds: give --end-to-end S as well.")
        if self.end_to_end is not None and any(lengths.kind == "tokens" for lengths in self.lengths):
            raise UsageError(
                "--end-to-end begins with letters, so --lengths tokens:N cannot be used: give fixed:N."
            )
