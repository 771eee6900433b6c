"""The command line `virnuc`.

Exit codes: 0 done, 1 unexpected, 2 usage or configuration, 3 input, 4 a run folder or a checkpoint does not
match or is damaged, 5 device, memory or lane, 6 a disk or a folder, 130 interrupted. An error is one message on stderr; `--debug`
adds the traceback. Results go to stdout, progress and warnings to stderr. With `--json`, stdout holds exactly one JSON
object, for errors too.

Nothing heavy is imported before a command needs it, so that `virnuc --help` answers at once.
"""

import json
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any, Final

import click

from virnuc_cli.config import config_group, given_origins, in_words
from virnuc_cli.config_file import use_settings_files
from virnuc_cli.doctor import doctor
from virnuc_cli.models import models_group
from virnuc_cli.one_folder import require_one_folder
from virnuc_cli.options import (
    BENCH_OPTIONS,
    DEBUG,
    DEPLOY_OPTIONS,
    EMBED_OPTIONS,
    ENGINE_OPTIONS,
    EXPORT_OPTIONS,
    INPUTS,
    LANE_OPTIONS,
    OUTPUT_OPTIONS,
    PREDICT_OPTIONS,
    REPORT_OPTIONS,
    REPROCESS_OPTIONS,
    UP_OPTIONS,
    WORKER_OPTIONS,
    CommandGroup,
    output_mode,
    with_options,
)
from virnuc_cli.training import evaluate, train
from virnuc_core import __version__
from virnuc_core.errors import UsageError, VirnucError, storage_error
from virnuc_core.results.asked_with import asked_with

UNEXPECTED: Final = 1
INTERRUPTED: Final = 130


HELP_FLAGS: Final = ("-h", "--help")


class CommandLine(CommandGroup):
    """All commands; the settings files are read once it is known which of them it is to be."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Finds the command, and takes its defaults from the settings files; help needs none of them."""
        name, command, rest = super().resolve_command(ctx, args)
        if not ctx.resilient_parsing and not {*HELP_FLAGS} & {*rest}:
            try:
                use_settings_files(ctx, ctx.params["config"])
            except UsageError:
                if name != "doctor":  # which says it among the rest
                    raise
        return name, command, rest


@click.group(
    cls=CommandLine,
    context_settings={
        "help_option_names": [*HELP_FLAGS],
        "max_content_width": 110,
        "auto_envvar_prefix": "VIRNUC",
    },
)
@click.option(
    "--config",
    metavar="FILE",
    help="Settings file [virnuc.toml here, and config.toml in ~/.config/virnuc].",
)
@click.version_option(__version__, prog_name="virnuc")
def cli(config: str | None) -> None:
    """Finds viral sequences among assembled contigs or long reads with ESM-2 and DNABERT-S."""


@cli.command()
@with_options(INPUTS, *PREDICT_OPTIONS, *ENGINE_OPTIONS, *LANE_OPTIONS, *OUTPUT_OPTIONS)
def predict(
    inputs: tuple[str, ...], out: str, force: bool, quiet: bool, as_json: bool, debug: bool, **settings: Any
) -> None:
    """Calls the contigs in INPUT (FASTA or FASTQ, plain or compressed; - is stdin) viral or not."""
    from virnuc_cli.commands import run_predict

    with asked_with(given_origins(click.get_current_context())):
        run_predict(
            inputs,
            out=out,
            force=force,
            mode=settings.pop("mode"),
            lane_minutes=settings.pop("lane_minutes"),
            settings=settings,
            output=output_mode(quiet, as_json),
        )


@cli.command()
@with_options(INPUTS, *EMBED_OPTIONS, *ENGINE_OPTIONS, *LANE_OPTIONS, *OUTPUT_OPTIONS)
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
    from virnuc_cli.commands import run_embed

    with asked_with(given_origins(click.get_current_context())):
        run_embed(
            inputs,
            out=out,
            model=model,
            force=force,
            mode=settings.pop("mode"),
            lane_minutes=settings.pop("lane_minutes"),
            settings=settings,
            output=output_mode(quiet, as_json),
        )


@cli.command()
@with_options(click.argument("run", metavar="RUN"), *REPROCESS_OPTIONS, *LANE_OPTIONS, *OUTPUT_OPTIONS)
def reprocess(run: str, force: bool, quiet: bool, as_json: bool, debug: bool, **settings: Any) -> None:
    """Moves the predict run in folder RUN to other models, another head or other settings.

    What is not given stays as it was, and what both have in common is kept: with another head alone, only scores are
    computed. The old results stay until the new ones are whole.
    """
    from virnuc_cli.commands import run_reprocess

    with asked_with(given_origins(click.get_current_context())):
        run_reprocess(
            run,
            force=force,
            mode=settings.pop("mode"),
            lane_minutes=settings.pop("lane_minutes"),
            settings=settings,
            output=output_mode(quiet, as_json),
        )


@cli.command()
@with_options(*REPORT_OPTIONS, *OUTPUT_OPTIONS)
def report(run: str, labels: str | None, quiet: bool, as_json: bool, debug: bool) -> None:
    """Writes the report of the finished run in folder RUN anew, report.html, with figures by class if there are labels."""
    from virnuc_cli.commands import run_report

    run_report(run, labels=labels, output=output_mode(quiet, as_json))


@cli.command()
@with_options(
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
    from virnuc_cli.commands import run_frames

    run_frames(inputs, chunk_length=chunk_length, out=out, output=output_mode(quiet, as_json))


@cli.command()
@with_options(
    click.argument("embeddings", metavar="EMBEDDINGS"),
    click.option("--head", required=True, metavar="PATH", help="Classifier head for these embeddings."),
    click.option(
        "--dna-head", metavar="PATH", help="Head for chunks without an open frame [they are left out]."
    ),
    click.option("--out", required=True, metavar="FILE.tsv", help="Table of one score pair a frame."),
    *OUTPUT_OPTIONS,
)
def score(
    embeddings: str, head: str, dna_head: str | None, out: str, quiet: bool, as_json: bool, debug: bool
) -> None:
    """Scores stored EMBEDDINGS with another classifier head."""
    from virnuc_cli.commands import run_score

    run_score(embeddings, head=head, dna_head=dna_head, out=out, output=output_mode(quiet, as_json))


@cli.command()
@with_options(*EXPORT_OPTIONS, *OUTPUT_OPTIONS)
def export(embeddings: str, to: str, vectors: str, quiet: bool, as_json: bool, debug: bool) -> None:
    """Writes EMBEDDINGS for NumPy (.npz, .npy) or AnnData (.h5ad)."""
    from virnuc_cli.commands import run_export

    run_export(embeddings, to=to, vectors=vectors, output=output_mode(quiet, as_json))


@cli.command()
@with_options(click.argument("path"), *OUTPUT_OPTIONS)
def inspect(path: str, quiet: bool, as_json: bool, debug: bool) -> int:
    """Says what PATH is (run folder, shard, embeddings, checkpoint) and whether it is whole."""
    from virnuc_cli.commands import run_inspect

    return run_inspect(path, output=output_mode(quiet, as_json))


@cli.command()
@with_options(click.argument("path"), *OUTPUT_OPTIONS)
def fsck(path: str, quiet: bool, as_json: bool, debug: bool) -> int:
    """Checks a run's folder, or one file, byte by byte, and says what is not whole and what to do.

    inspect compares each file with its own checksums; fsck also compares every row of the vectors with the shards, and
    the tables with what follows from these.
    """
    from virnuc_cli.commands import run_fsck

    return run_fsck(path, output=output_mode(quiet, as_json))


@cli.command()
@with_options(*BENCH_OPTIONS, *OUTPUT_OPTIONS)
def bench(quiet: bool, as_json: bool, debug: bool, **settings: Any) -> None:
    """Measures models on random sequences: forward passes, their limit, and the whole way to shards."""
    from virnuc_cli.commands import run_bench

    run_bench(settings, output=output_mode(quiet, as_json))


@cli.command()
@with_options(*DEPLOY_OPTIONS, *OUTPUT_OPTIONS)
def deploy(quiet: bool, as_json: bool, debug: bool, **settings: Any) -> None:
    """Makes work pools, deployments and the nightly schedule on the Prefect server; may be run again."""
    from virnuc_cli.services import run_deploy

    run_deploy(**settings, output=output_mode(quiet, as_json))


@cli.command()
@with_options(*WORKER_OPTIONS, DEBUG)
def worker(debug: bool, **settings: Any) -> None:
    """Works for the Prefect server until it is stopped: one worker a GPU of this host."""
    from virnuc_cli.services import run_worker

    run_worker(**settings)


@cli.command()
@with_options(*UP_OPTIONS, DEBUG)
def up(debug: bool, **settings: Any) -> None:
    """Starts a Prefect server, MLflow and workers on this machine, until Ctrl-C."""
    from virnuc_cli.services import run_up

    run_up(**settings)


cli.add_command(models_group)
cli.add_command(train)
cli.add_command(evaluate)
cli.add_command(doctor)
cli.add_command(config_group)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code; `argv` is without the program's name."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        _require_file_names(arguments)
        require_one_folder()
        result = cli.main(args=arguments, prog_name="virnuc", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.ClickException as error:
        return _report(in_words(error), error.exit_code, arguments)
    except VirnucError as error:
        return _report(str(error), error.exit_code, arguments)
    except OSError as error:
        told = storage_error(error)
        return _report(str(told), told.exit_code, arguments)
    except (KeyboardInterrupt, click.Abort):
        return _report(
            "interrupted; finished shards are kept, and the same command continues", INTERRUPTED, arguments
        )
    except Exception as error:  # noqa: BLE001 - the outermost border: a person gets one line and a code
        message = (
            f"unexpected {type(error).__name__}: {error}. Run it with --debug and report what that shows."
        )
        return _report(message, UNEXPECTED, arguments)


def _require_file_names(arguments: list[str]) -> None:
    """Refuses what a shell could not have passed, and no file could be called."""
    for argument in arguments:
        try:
            is_name = b"\0" not in os.fsencode(argument)
        except UnicodeEncodeError:
            is_name = False
        if not is_name:
            raise UsageError(f"the argument {argument!r} holds what cannot be in an argument: leave it out.")


def _report(message: str, exit_code: int, arguments: list[str]) -> int:
    """Says what went wrong, in the form that was asked for."""
    if "--debug" in arguments:
        traceback.print_exc()
    print(f"virnuc: error: {message}", file=sys.stderr)
    if "--json" in arguments:
        print(json.dumps({"error": message, "exit_code": exit_code}))
    return exit_code
