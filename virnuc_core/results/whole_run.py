"""A run from its sequence files to its results, in one call: the stages of the commands, without Prefect."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from virnuc_core.errors import storage_error
from virnuc_core.inference.device import resolve_devices
from virnuc_core.inference.indexing import index_inputs
from virnuc_core.inference.lanes_here import compute_missing, require_main_process
from virnuc_core.inference.planning import open_plan
from virnuc_core.inference.shard import remove_shard_temporaries, require_all_shards
from virnuc_core.results.aggregate import aggregate
from virnuc_core.results.run_json import RunReport, write_report
from virnuc_core.results.run_opening import open_run_folder
from virnuc_core.results.stage_clock import StageClock
from virnuc_core.results.tables import write_tables
from virnuc_core.run_plan import Kind
from virnuc_core.sequences.frame_store import FrameStore
from virnuc_core.settings import RunConfig
from virnuc_core.specs import Alphabet

_log = logging.getLogger(__name__)


def predict_run(inputs: Sequence[str], root: Path, config: RunConfig, *, force: bool = False) -> RunReport:
    """Calls contigs viral or not; called again with the same arguments, it goes on where it stopped.

    Args:
        inputs: FASTA or FASTQ files of DNA, plain or compressed.
        root: folder for the results.
        config: models and how to run them.
        force: keep nothing of an earlier run in that folder.

    Raises:
        VirnucError: what is wrong, where, and what to do.
    """
    return _run(inputs, root, config, "predict", force=force)


def embed_run(inputs: Sequence[str], root: Path, config: RunConfig) -> RunReport:
    """Embeds whole sequences with one model, into `embeddings.h5` in the folder.

    Args:
        inputs: FASTA or FASTQ files of proteins or DNA, whichever the model takes.
        root: the run's folder.
        config: the model and how to run it.

    Raises:
        VirnucError: what is wrong, where, and what to do.
    """
    return _run(inputs, root, config, "embed", force=False)


def _run(inputs: Sequence[str], root: Path, config: RunConfig, kind: Kind, *, force: bool) -> RunReport:
    require_main_process()
    devices = resolve_devices(config.devices)
    clock = StageClock(partial(_log.info, "stage: %s"))
    with _in_own_words(), open_run_folder(root, force=force) as folder:
        with clock.stage("index"):
            alphabet: Alphabet = "protein" if config.dnabert_model is None else "dna"
            index_inputs(folder, list(inputs), config.chunk_length, alphabet, config.rows, config.min_length)
        with clock.stage("plan"):
            store = FrameStore.open(folder.frames)
            plan = open_plan(config, store, kind, devices, folder)
        with clock.stage("embed"):
            lanes = compute_missing(folder, plan, devices)
        with clock.stage("validate"):
            require_all_shards(folder, plan)
            remove_shard_temporaries(folder, range(len(plan.shards)))
        with clock.stage("aggregate"):
            work = aggregate(folder, plan, store)
        with clock.stage("classify"):
            counts = write_tables(folder, store, plan.threshold) if kind == "predict" else None
        report = RunReport(
            plan=plan,
            out=str(root if kind == "predict" else folder.embeddings),
            counts=counts,
            work=work,
            lanes=lanes,
            seconds=clock.seconds,
            links={},
        )
        write_report(folder.report, report)
    return report


@contextmanager
def _in_own_words() -> Iterator[None]:
    """Errors of the operating system say what they mean for the run."""
    try:
        yield
    except OSError as error:
        raise storage_error(error) from error
