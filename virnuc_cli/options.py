"""The options of the command line, in groups: what commands share, and what makes one long."""

from collections.abc import Callable
from typing import Any, Final, Literal, TypeVar, get_args

import click
from pydantic.fields import FieldInfo

from virnuc_core.benchmark.settings import BenchSettings, help_text, metavar_of

_WHOLE: Final = 1000  # letters, more than any first sentence has

Command = TypeVar("Command", bound=Callable[..., Any])


def with_options(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Adds options to a command; --help lists them in the order given."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


class CommandGroup(click.Group):
    """A group that answers a call without a command with its help, and lists commands with whole sentences."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Shows the help on stderr where no command is given: nothing was done, so the exit code is that of a wrong call."""
        if not args and not ctx.resilient_parsing:
            click.echo(ctx.get_help(), err=True)
            ctx.exit(click.UsageError.exit_code)
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Lists the commands; click would cut what they do to what is left of the line."""
        names = self.list_commands(ctx)
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.commands[name].get_short_help_str(_WHOLE)) for name in names])


INPUTS: Final = click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")

# How one call answers is its own affair: these two come from no file and no variable.
DEBUG: Final = click.option(
    "--debug", is_flag=True, allow_from_autoenv=False, help="Show the traceback of an error."
)

OUTPUT_OPTIONS: Final = (
    click.option("--quiet", is_flag=True, help="Only warnings and errors."),
    click.option(
        "--json",
        "as_json",
        is_flag=True,
        allow_from_autoenv=False,
        help="One JSON object on stdout, for machines.",
    ),
    DEBUG,
)

ENGINE_OPTIONS: Final = (
    click.option(
        "--repr-layer", type=int, metavar="N", help="Layer of the representation, 0 to num_layers [last]."
    ),
    click.option(
        "--precision",
        type=click.Choice(["auto", "fp32", "fp16", "bf16", "fp8"]),
        default="auto",
        help="Arithmetic of the models [auto: fp16 on a GPU, fp32 on the CPU].",
    ),
    click.option("--devices", default="auto", metavar="auto|cpu|0,1,...", help="Where to compute [auto]."),
    click.option(
        "--token-budget", type=int, metavar="N", help="Most tokens in one packed batch [by the device]."
    ),
    click.option(
        "--engine",
        type=click.Choice(["packed", "reference"]),
        default="packed",
        help="reference: one sequence at a time, fp32, plain attention [packed].",
    ),
    click.option(
        "--attention",
        type=click.Choice(["auto", "triton", "flash-attn", "varlen", "sdpa", "reference"]),
        default="auto",
        help="Attention backend [auto].",
    ),
    click.option(
        "--compile-mode",
        type=click.Choice(["auto", "none", "default", "reduce-overhead", "max-autotune"]),
        default="auto",
        help="torch.compile of the layers [auto: in runs long enough to repay it].",
    ),
    click.option(
        "--shard-seconds",
        type=float,
        metavar="S",
        help="Work in a shard, which is what a killed run loses at most [60 on a GPU, 15 on the CPU].",
    ),
    click.option("--force", is_flag=True, help="Start over: keep nothing of an earlier run."),
)

LANE_OPTIONS: Final = (
    click.option(
        "--mode",
        type=click.Choice(["local", "pool"]),
        default="local",
        help="pool: lanes wait for the workers of a Prefect work pool, on any host [local].",
    ),
    click.option(
        "--lane-minutes",
        type=float,
        default=10.0,
        metavar="M",
        help="Estimated work of a lane in a pool, in minutes [10].",
    ),
)

DNABERT_OPTIONS: Final = (
    click.option(
        "--dnabert-precision",
        type=click.Choice(["auto", "fp32", "fp16", "bf16", "fp8"]),
        help="Arithmetic of DNABERT-S alone [as --precision].",
    ),
    click.option(
        "--dnabert-engine",
        type=click.Choice(["packed", "reference"]),
        help="Engine of DNABERT-S alone [as --engine].",
    ),
)

PREDICT_OPTIONS: Final = (
    click.option(
        "--out", required=True, metavar="DIR", help="Folder for the results; run again to continue."
    ),
    click.option("--chunk-length", type=int, metavar="K", help="Chunk length in bp [by the preset: 500]."),
    click.option(
        "--min-length", type=int, default=0, metavar="N", help="Leave out records of fewer bases [0]."
    ),
    click.option(
        "--threshold",
        type=float,
        default=0.5,
        metavar="P",
        help="Call chunks and contigs virus from this probability on [0.5].",
    ),
    click.option(
        "--preset",
        type=click.Choice(["tiny", "virnucpro-500", "virnucpro-300"]),
        default="tiny",
        help="Models and chunk length that belong together [tiny: the bundled small models].",
    ),
    click.option(
        "--esm-model",
        metavar="NAME|PATH",
        help="ESM-2: tiny, 8M, 35M, 150M, 650M, 3B, 15B, a hub name or a path.",
    ),
    click.option("--dnabert-model", metavar="NAME|PATH", help="DNABERT-S: tiny, a hub name or a path."),
    click.option("--head", metavar="PATH", help="Classifier head that was trained on these models."),
    click.option(
        "--dna-head",
        metavar="auto|PATH",
        help="Head that scores chunks without an open frame by their DNA alone; auto: the bundled one [no such scores].",
    ),
    *DNABERT_OPTIONS,
    click.option(
        "--embeddings",
        type=click.Choice(["none", "float16", "float32"]),
        default="float32",
        help="How vectors are stored in embeddings.h5 [float32].",
    ),
)

REPROCESS_OPTIONS: Final = (
    click.option("--esm-model", metavar="NAME|PATH", help="Another ESM-2 model."),
    click.option("--dnabert-model", metavar="NAME|PATH", help="Another DNABERT-S model."),
    click.option("--head", metavar="PATH", help="Classifier head; must be given with another model."),
    click.option("--dna-head", metavar="PATH", help="Another head for chunks without an open frame."),
    click.option(
        "--repr-layer", type=int, metavar="N", help="Layer of the representation [last of another model]."
    ),
    click.option(
        "--precision",
        type=click.Choice(["auto", "fp32", "fp16", "bf16", "fp8"]),
        help="Arithmetic of both models.",
    ),
    click.option(
        "--dnabert-precision",
        type=click.Choice(["auto", "fp32", "fp16", "bf16", "fp8"]),
        help="Arithmetic of DNABERT-S alone.",
    ),
    click.option("--token-budget", type=int, metavar="N", help="Most tokens in one packed batch."),
    click.option("--engine", type=click.Choice(["packed", "reference"]), help="Engine of both models."),
    click.option(
        "--dnabert-engine", type=click.Choice(["packed", "reference"]), help="Engine of DNABERT-S alone."
    ),
    click.option(
        "--attention",
        type=click.Choice(["auto", "triton", "flash-attn", "varlen", "sdpa", "reference"]),
        help="Attention backend.",
    ),
    click.option(
        "--compile-mode",
        type=click.Choice(["auto", "none", "default", "reduce-overhead", "max-autotune"]),
        help="torch.compile of the layers.",
    ),
    click.option(
        "--embeddings",
        type=click.Choice(["none", "float16", "float32"]),
        help="How vectors are stored in embeddings.h5.",
    ),
    click.option("--devices", default="auto", metavar="auto|cpu|0,1,...", help="Where to compute [auto]."),
    click.option("--force", is_flag=True, help="Throw away what was begun with other settings."),
)

EMBED_OPTIONS: Final = (
    click.option(
        "--out", required=True, metavar="FILE.h5", help="Embeddings file; its run folder is FILE.h5.run."
    ),
    click.option(
        "--model",
        required=True,
        metavar="MODEL",
        help="esm2:NAME|PATH for proteins, dnabert:NAME|PATH for DNA, or a path alone.",
    ),
    click.option(
        "--embeddings",
        type=click.Choice(["float16", "float32"]),
        default="float32",
        help="How vectors are stored [float32].",
    ),
)

REPORT_OPTIONS: Final = (
    click.argument("run", metavar="RUN"),
    click.option(
        "--labels", metavar="FILE.tsv", help="Table of contig and class: adds figures by class [none]."
    ),
)

EXPORT_OPTIONS: Final = (
    click.argument("embeddings", metavar="EMBEDDINGS"),
    click.option(
        "--to", required=True, metavar="FILE", help="The new file; .npz, .npy or .h5ad says what it is."
    ),
    click.option(
        "--vectors",
        type=click.Choice(["all", "dna", "protein"]),
        default="all",
        help="Of a predict run, the vectors of one model [all: DNA and protein side by side].",
    ),
)


def _bench_option(name: str, field: FieldInfo) -> Callable[[Command], Command]:
    """One field of the benchmark's settings for click."""
    flag, metavar = f"--{name.replace('_', '-')}", metavar_of(field)
    if field.annotation is bool:
        return click.option(flag, is_flag=True, help=help_text(field))
    kinds = [kind for kind in get_args(field.annotation) if kind is not type(None)]
    return click.option(
        flag,
        type=(kinds[0] if kinds else field.annotation) if metavar else click.Choice(kinds),
        default=None if field.default == () else field.default,
        metavar=metavar,
        multiple=field.default == (),
        help=help_text(field),
    )


BENCH_OPTIONS: Final = tuple(_bench_option(*item) for item in BenchSettings.model_fields.items())

DEPLOY_OPTIONS: Final = (
    click.option("--cron", metavar="CRON", help='When the nightly batch begins ["0 2 * * *"].'),
    click.option("--timezone", metavar="ZONE", help="Time zone of --cron, such as Europe/Berlin [UTC]."),
    click.option("--inbox", metavar="DIR|GLOB", help="Where the nightly batch finds files."),
    click.option("--out", metavar="DIR", help="Where the nightly batch puts its runs."),
    click.option(
        "--preset",
        type=click.Choice(["tiny", "virnucpro-500", "virnucpro-300"]),
        help="Models and chunk length of the nightly batch [as deployed; at first the small bundled models].",
    ),
    click.option("--chunk-length", type=int, metavar="K", help="Its chunk length in bp [by the preset]."),
    click.option("--esm-model", metavar="NAME|PATH", help="Its ESM-2 model [by the preset]."),
    click.option("--dnabert-model", metavar="NAME|PATH", help="Its DNABERT-S model [by the preset]."),
    click.option("--head", metavar="PATH", help="Its classifier head, seen by every worker."),
    click.option(
        "--dna-head", metavar="auto|PATH", help="Its head for chunks without an open frame [no such scores]."
    ),
)

_WORKER_OPTIONS: Final = (
    click.option(
        "--devices", default="auto", metavar="auto|cpu|0,1,...", help="GPUs that get a worker each [auto]."
    ),
    click.option("--workers", type=int, metavar="N", help="Workers on a host without GPUs [1]."),
)

WORKER_OPTIONS: Final = (
    *_WORKER_OPTIONS,
    click.option(
        "--runs", type=int, default=4, metavar="N", help="Whole runs to look after at once; 0 for none [4]."
    ),
)

UP_OPTIONS: Final = (
    *_WORKER_OPTIONS,
    click.option("--port", type=int, default=4200, metavar="PORT", help="Port of the Prefect server [4200]."),
    click.option(
        "--mlflow-port", type=int, default=5000, metavar="PORT", help="Port of the MLflow server [5000]."
    ),
)


def output_mode(quiet: bool, as_json: bool) -> Literal["human", "quiet", "json"]:
    """What OUTPUT_OPTIONS ask for."""
    return "json" if as_json else "quiet" if quiet else "human"
