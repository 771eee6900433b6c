"""`virnuc train` and `virnuc evaluate`: their options, and what they do."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from virnuc_cli.config import given_origins
from virnuc_cli.options import (
    DNABERT_OPTIONS,
    ENGINE_OPTIONS,
    LANE_OPTIONS,
    OUTPUT_OPTIONS,
    PREDICT_OPTIONS,
    output_mode,
    with_options,
)
from virnuc_core.results.asked_with import asked_with

if TYPE_CHECKING:
    from virnuc_cli.terminal import OutputMode

_SPREAD: Final = frozenset({"--viral", "--other", "--genbank"})
_LABELLED: Final = ("viral", "other", "genbank", "labelled", "labels")


class SpreadCommand(click.Command):
    """A command whose flags for files may be followed by several: `--viral a.fa b.fa` is `--viral a.fa --viral b.fa`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Repeats each of these flags before every file that follows it."""
        spread: list[str] = []
        flag, is_first = "", False
        for place, argument in enumerate(args):
            if argument == "--":
                spread += args[place:]
                break
            if argument.startswith("-") and argument != "-":
                flag, is_first = (argument, True) if argument in _SPREAD else ("", False)
            elif flag:
                if not is_first:
                    spread.append(flag)
                is_first = False
            spread.append(argument)
        return super().parse_args(ctx, spread)


LABELLED_OPTIONS: Final = (
    click.argument("labelled", nargs=-1, metavar="[LABELLED]..."),
    click.option("--viral", multiple=True, metavar="FASTA...", help="Files of viral records alone."),
    click.option("--other", multiple=True, metavar="FASTA...", help="Files of records that are not viral."),
    click.option(
        "--genbank", multiple=True, metavar="FILE...", help="GenBank files: viral or not is in the lineage."
    ),
    click.option("--labels", metavar="TSV", help="Columns record and class, for the records of LABELLED."),
)

TRAIN_OPTIONS: Final = (
    click.option(
        "--out", required=True, metavar="FILE.safetensors", help="The head; its run folder is FILE.run."
    ),
    click.option(
        "--chunk-length", type=int, default=500, metavar="K", help="Chunk length in bp that it is for [500]."
    ),
    click.option(
        "--esm-model",
        default="tiny",
        metavar="NAME|PATH",
        help="ESM-2: tiny, 8M, 35M, 150M, 650M, 3B, 15B, a hub name or a path [tiny].",
    ),
    click.option(
        "--dnabert-model",
        default="tiny",
        metavar="NAME|PATH",
        help="DNABERT-S: tiny, a hub name or a path [tiny].",
    ),
    *DNABERT_OPTIONS,
    click.option(
        "--dna-alone",
        is_flag=True,
        help="Train a head for chunks without an open frame, by their DNA alone (see --dna-head of predict).",
    ),
    click.option("--groups", metavar="TSV", help="Columns record and group: a group is not split."),
    click.option("--seed", type=int, default=0, metavar="N", help="Of split, weights and draws [0]."),
    click.option(
        "--held-out",
        type=float,
        default=0.1,
        metavar="SHARE",
        help="Share of the groups for validation, and again for the test [0.1].",
    ),
    click.option(
        "--group-power",
        type=float,
        default=0.6,
        metavar="P",
        help="A group is drawn as often as its size to this power says [0.6].",
    ),
    click.option(
        "--most-frames", type=int, default=200_000, metavar="N", help="Frames learnt from at most [200000]."
    ),
    click.option("--epochs", type=int, default=20, metavar="N", help="Most rounds over the frames [20]."),
    click.option(
        "--members", type=int, default=2, metavar="N", help="Heads side by side in one, for their mean [2]."
    ),
)


def run_train(
    values: Mapping[str, Any],
    *,
    out: str,
    force: bool,
    mode: str,
    lane_minutes: float,
    output: "OutputMode",
) -> None:
    """`virnuc train`."""
    from flows.outputs import require_head_name
    from virnuc_cli.local_prefect import local_prefect
    from virnuc_cli.preflight import folder_of, require_inputs, require_models
    from virnuc_cli.terminal import show, terminal
    from virnuc_core.settings import LaneSettings, TrainSettings, read_settings, train_config

    chosen = read_settings(TrainSettings, {name: v for name, v in values.items() if name not in _LABELLED})
    lanes = read_settings(LaneSettings, {"mode": mode, "lane_minutes": lane_minutes})
    require_head_name(Path(out))
    folder_of(Path(out))
    config = train_config(chosen)
    require_models({"dnabert_s": config.dnabert_model, "esm2": config.esm_model})
    require_inputs((*_files(values), *filter(None, [chosen.groups])))
    with terminal(output), local_prefect(lasting=lanes.mode == "pool"):
        from flows.train import train
        from virnuc_core.training.labels import LabelledFiles

        files = LabelledFiles(**{name: values[name] for name in _LABELLED})
        report = train(files, out, chosen, force, lanes.mode, lanes.lane_minutes)
    show(output, report.document, report.summary)


def run_evaluate(
    values: Mapping[str, Any],
    *,
    out: str,
    force: bool,
    mode: str,
    lane_minutes: float,
    output: "OutputMode",
) -> None:
    """`virnuc evaluate`."""
    from virnuc_cli.local_prefect import local_prefect
    from virnuc_cli.preflight import require_inputs, require_models_and_head
    from virnuc_cli.terminal import show, terminal
    from virnuc_core.settings import LaneSettings, PredictSettings, predict_config, read_settings

    chosen = read_settings(PredictSettings, {name: v for name, v in values.items() if name not in _LABELLED})
    lanes = read_settings(LaneSettings, {"mode": mode, "lane_minutes": lane_minutes})
    require_models_and_head(predict_config(chosen))
    require_inputs(_files(values))
    with terminal(output), local_prefect(lasting=lanes.mode == "pool"):
        from flows.evaluate import evaluate
        from virnuc_core.training.labels import LabelledFiles

        files = LabelledFiles(**{name: values[name] for name in _LABELLED})
        report = evaluate(files, out, chosen, force, lanes.mode, lanes.lane_minutes)
    show(output, report.document, report.summary)


def _files(values: Mapping[str, Any]) -> Iterator[str]:
    """Every file of LABELLED_OPTIONS that is given."""
    for name in _LABELLED:
        given = values[name]
        yield from () if given is None else (given,) if isinstance(given, str) else given


@click.command(cls=SpreadCommand)
@with_options(*LABELLED_OPTIONS, *TRAIN_OPTIONS, *ENGINE_OPTIONS, *LANE_OPTIONS, *OUTPUT_OPTIONS)
def train(
    out: str,
    force: bool,
    mode: str,
    lane_minutes: float,
    quiet: bool,
    as_json: bool,
    debug: bool,
    **settings: Any,
) -> None:
    """Trains a classifier head for the vectors of two models on labelled sequences.

    A record is viral or not by the flag of its file, by its lineage (GenBank), or by a table (--labels).
    """
    output = output_mode(quiet, as_json)
    with asked_with(given_origins(click.get_current_context())):
        run_train(settings, out=out, force=force, mode=mode, lane_minutes=lane_minutes, output=output)


@click.command(cls=SpreadCommand)
@with_options(*LABELLED_OPTIONS, *PREDICT_OPTIONS, *ENGINE_OPTIONS, *LANE_OPTIONS, *OUTPUT_OPTIONS)
def evaluate(
    out: str,
    force: bool,
    mode: str,
    lane_minutes: float,
    quiet: bool,
    as_json: bool,
    debug: bool,
    **settings: Any,
) -> None:
    """Measures how good a head is on labelled sequences: by class, by length, and how reliable its scores are."""
    output = output_mode(quiet, as_json)
    with asked_with(given_origins(click.get_current_context())):
        run_evaluate(settings, out=out, force=force, mode=mode, lane_minutes=lane_minutes, output=output)
