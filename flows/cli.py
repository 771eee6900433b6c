"""The command line `virnuc`.

Exit codes: 0 done, 1 unexpected, 2 usage or configuration, 3 input, 4 a run folder or a checkpoint does not
match or is damaged, 5 device, memory or lane, 130 interrupted. An error is one message on stderr; `--debug`
adds the traceback. Results go to stdout, progress and warnings to stderr. With `--json`, stdout holds exactly one JSON
object, for errors too.

Nothing heavy is imported before a command needs it, so that `virnuc --help` answers at once.
"""

import json
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, TypeVar

import click

from flows.bench import BENCH_OPTIONS, run_bench
from flows.one_folder import require_one_folder
from virnuc_core import __version__
from virnuc_core.errors import VirnucError

UNEXPECTED: Final = 1
INTERRUPTED: Final = 130

Command = TypeVar("Command", bound=Callable[..., Any])

INPUTS: Final = click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")

OUTPUT_OPTIONS: Final = (
    click.option("--quiet", is_flag=True, help="Only warnings and errors."),
    click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, for machines."),
    click.option("--debug", is_flag=True, help="Show the traceback of an error."),
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


def _with_options(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Adds options to a command; --help lists them in the order given."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="virnuc")
def cli() -> None:
    """Finds viral sequences among assembled contigs or long reads with ESM-2 and DNABERT-S."""


@cli.command()
@_with_options(
    INPUTS,
    click.option(
        "--out", required=True, metavar="DIR", help="Folder for the results; run again to continue."
    ),
    click.option("--chunk-length", type=int, metavar="K", help="Chunk length in bp [by the preset: 500]."),
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
        "--dnabert-precision",
        type=click.Choice(["auto", "fp32", "fp16", "bf16", "fp8"]),
        help="Arithmetic of DNABERT-S alone [as --precision].",
    ),
    click.option(
        "--dnabert-engine",
        type=click.Choice(["packed", "reference"]),
        help="Engine of DNABERT-S alone [as --engine].",
    ),
    click.option(
        "--embeddings",
        type=click.Choice(["none", "float16", "float32"]),
        default="float32",
        help="How vectors are stored in embeddings.h5 [float32].",
    ),
    *ENGINE_OPTIONS,
    *OUTPUT_OPTIONS,
)
def predict(
    inputs: tuple[str, ...], out: str, force: bool, quiet: bool, as_json: bool, debug: bool, **settings: Any
) -> None:
    """Calls the contigs in INPUT (FASTA or FASTQ, plain or compressed; - is stdin) viral or not."""
    from flows.commands import run_predict

    run_predict(inputs, out=out, force=force, settings=settings, output=_output_mode(quiet, as_json))


@cli.command()
@_with_options(
    INPUTS,
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
    *ENGINE_OPTIONS,
    *OUTPUT_OPTIONS,
)
def embed(
    inputs: tuple[str, ...],
    out: str,
    model: str,
    force: bool,
    quiet: bool,
    as_json: bool,
    debug: bool,
    **settings: Any,
) -> None:
    """Writes one mean vector for each sequence in INPUT."""
    from flows.commands import run_embed

    output = _output_mode(quiet, as_json)
    run_embed(inputs, out=out, model=model, force=force, settings=settings, output=output)


@cli.command()
@_with_options(
    INPUTS,
    click.option("--chunk-length", type=int, required=True, metavar="K", help="Chunk length in bp."),
    click.option(
        "--out", required=True, metavar="FILE.tsv[.gz]", help="Table of frame_id, nucleotide, protein."
    ),
    *OUTPUT_OPTIONS,
)
def frames(
    inputs: tuple[str, ...], chunk_length: int, out: str, quiet: bool, as_json: bool, debug: bool
) -> None:
    """Writes the open reading frames of INPUT as a table."""
    from flows.commands import run_frames

    run_frames(inputs, chunk_length=chunk_length, out=out, output=_output_mode(quiet, as_json))


@cli.command()
@_with_options(
    click.argument("embeddings", metavar="EMBEDDINGS.h5"),
    click.option("--head", required=True, metavar="PATH", help="Classifier head for these embeddings."),
    click.option("--out", required=True, metavar="FILE.tsv", help="Table of one score pair a frame."),
    *OUTPUT_OPTIONS,
)
def score(embeddings: str, head: str, out: str, quiet: bool, as_json: bool, debug: bool) -> None:
    """Scores stored EMBEDDINGS with another classifier head."""
    from flows.commands import run_score

    run_score(embeddings, head=head, out=out, output=_output_mode(quiet, as_json))


@cli.command()
@_with_options(click.argument("path"), *OUTPUT_OPTIONS)
def inspect(path: str, quiet: bool, as_json: bool, debug: bool) -> int:
    """Says what PATH is (run folder, shard, embeddings, checkpoint) and whether it is whole."""
    from flows.commands import run_inspect

    return run_inspect(path, output=_output_mode(quiet, as_json))


@cli.command()
@_with_options(*BENCH_OPTIONS, *OUTPUT_OPTIONS)
def bench(quiet: bool, as_json: bool, debug: bool, **settings: Any) -> None:
    """Measures models on random sequences: forward passes, their limit, and the whole way to shards."""
    run_bench(settings, output=_output_mode(quiet, as_json))


def _output_mode(quiet: bool, as_json: bool) -> Literal["human", "quiet", "json"]:
    return "json" if as_json else "quiet" if quiet else "human"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code; `argv` is without the program's name."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        require_one_folder()
        result = cli.main(args=arguments, prog_name="virnuc", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.ClickException as error:
        return _report(error.format_message(), error.exit_code, arguments)
    except VirnucError as error:
        return _report(str(error), error.exit_code, arguments)
    except (KeyboardInterrupt, click.Abort):
        return _report(
            "interrupted; finished shards are kept, and the same command continues", INTERRUPTED, arguments
        )
    except Exception as error:  # noqa: BLE001 - the outermost border: a person gets one line and a code
        message = (
            f"unexpected {type(error).__name__}: {error}. Run it with --debug and report what that shows."
        )
        return _report(message, UNEXPECTED, arguments)


def _report(message: str, exit_code: int, arguments: list[str]) -> int:
    """Says what went wrong, in the form that was asked for."""
    if "--debug" in arguments:
        traceback.print_exc()
    print(f"virnuc: error: {message}", file=sys.stderr)
    if "--json" in arguments:
        print(json.dumps({"error": message, "exit_code": exit_code}))
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
