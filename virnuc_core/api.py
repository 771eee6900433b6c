"""Python API: a few functions over the same code as the commands; see docs/python-api.md.

from virnuc_core import Embedder, Predictor, embed, predict, open_embeddings
"""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import numpy as np
import numpy.typing as npt

from virnuc_core import pipeline
from virnuc_core.errors import InputError, UsageError
from virnuc_core.inference.device import resolve_devices
from virnuc_core.inference.lanes import LocalLanes
from virnuc_core.models.catalogue import chunks_of, require_known_model
from virnuc_core.models.hub import family_of, open_checkpoint
from virnuc_core.remote import output_path
from virnuc_core.results.embeddings import Embeddings
from virnuc_core.results.writers import NOT_AVAILABLE
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.reader import clean, rejection_reason
from virnuc_core.settings import (
    EngineSettings,
    PredictSettings,
    RunConfig,
    ScoringSettings,
    Settings,
    embed_config,
    predict_config,
    read_settings,
)
from virnuc_core.specs import Alphabet

if TYPE_CHECKING:  # slow to import
    import pandas as pd

__all__ = [
    "Embedder",
    "Embeddings",
    "Predictions",
    "Predictor",
    "embed",
    "open_embeddings",
    "predict",
]

Function = TypeVar("Function", bound=Callable[..., Any])


def _takes_settings(kind: type[Settings]) -> Callable[[Function], Function]:
    """Adds the settings to the decorated function's signature, for help() and notebooks."""

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        *named, _ = signature.parameters.values()
        options = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=field.rebuild_annotation(),
            )
            for name, field in kind.model_fields.items()
            if name not in signature.parameters
        ]
        function.__signature__ = signature.replace(parameters=[*named, *options])  # type: ignore[attr-defined]
        return function

    return decorate


@dataclass(frozen=True, kw_only=True, slots=True)
class Predictions:
    """Results of `predict`; docs/results.md describes every column.

    Attributes:
        viruses: one row per viral contig or provirus, as in `virus_summary.tsv`.
        contigs: one row per contig, as in `contigs.tsv`.
        chunks: one row per chunk, as in `chunks.tsv`.
        rejected: one row per unusable record, with the reason.
        report: the content of `run.json`: settings, counts, throughput.
        folder: the run folder, also of results that were copied to a URL; None for a temporary one.
    """

    viruses: "pd.DataFrame"
    contigs: "pd.DataFrame"
    chunks: "pd.DataFrame"
    rejected: "pd.DataFrame"
    report: Mapping[str, Any]
    folder: Path | None


class _Resident:
    """Models of one kind of run, loaded by its first call and kept until they are closed; a context manager."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._lanes = LocalLanes(resolve_devices(config.devices), keep=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees the memory of the devices, after calls of other threads have ended; later calls are a UsageError."""
        self._lanes.close()


class Embedder(_Resident):
    """A model that stays loaded between calls, which may come from several threads; use it in a `with` block, or close it.

    Args:
        model: `esm2:NAME|PATH` for proteins, `dnabert:NAME|PATH` for DNA, or a path alone.
        **options: fields of `virnuc_core.settings.EngineSettings`.

    Raises:
        VirnucError: there is no such model, setting or device.
    """

    @_takes_settings(EngineSettings)
    def __init__(self, model: str, **options: Any) -> None:
        self._family, self._name = family_of(model)
        require_known_model(self._name, self._family)
        super().__init__(embed_config(self._family, self._name, read_settings(EngineSettings, options)))

    def embed(self, sequences: Sequence[str]) -> npt.NDArray[np.float32]:
        """Mean vectors of proteins or DNA, float32 (n, D), in the order of the sequences.

        The first call loads the model, and a later one again if its files have changed. If a call is interrupted or fails,
        the next one may be made all the same.

        Raises:
            InputError: a sequence cannot be embedded; identified by its index, from 0.
            UsageError: the model is closed.
            VirnucError: any other failure; the message says what to do.
        """
        usable = _usable(sequences, "protein" if self._family == "esm2" else "dna")
        if not usable:
            return np.empty((0, open_checkpoint(self._name, self._family).spec.embedding_dim), np.float32)
        with TemporaryDirectory(prefix="virnuc-") as root:
            return pipeline.embed_vectors(usable, Path(root, "run"), self._config, self._lanes)


class Predictor(_Resident):
    """The models and the head of `predict`, kept loaded as by `Embedder`.

    Args:
        **options: fields of `virnuc_core.settings.ScoringSettings`.

    Raises:
        VirnucError: there is no such model, head, setting or device.
    """

    @_takes_settings(ScoringSettings)
    def __init__(self, **options: Any) -> None:
        settings = read_settings(ScoringSettings, options)
        config = predict_config(PredictSettings(**settings.given))
        chunks_of(config)  # before the inputs are read, which is slow
        super().__init__(config)

    def predict(
        self,
        source: str | Path | Sequence[str | Path] | Sequence[tuple[str, str]],
        *,
        out: str | Path | None = None,
        force: bool = False,
    ) -> Predictions:
        """As the function `predict`, with its arguments and errors; UsageError if the models are closed."""
        keeping = nullcontext(out) if out is not None else TemporaryDirectory(prefix="virnuc-")
        with keeping as root, _files(source) as inputs:
            folder = RunFolder(output_path(str(root)))
            report = pipeline.predict(inputs, str(root), self._config, self._lanes, force=force)
            return Predictions(
                viruses=_read_table(folder.summary),
                contigs=_read_table(folder.contigs),
                chunks=_read_table(folder.chunks),
                rejected=_read_table(folder.rejected),
                report=report.document,
                folder=folder.root if out is not None else None,
            )


@_takes_settings(EngineSettings)
def embed(sequences: Sequence[str], model: str, **options: Any) -> npt.NDArray[np.float32]:
    """Embeds proteins or DNA: one mean vector per sequence; `Embedder` keeps the model for further calls.

    Args:
        sequences: in upper or lower case; duplicates are computed once.
        model: `esm2:NAME|PATH` for proteins, `dnabert:NAME|PATH` for DNA, or a path alone.
        **options: fields of `virnuc_core.settings.EngineSettings`.

    Returns:
        float32 (n, D), in the order of the sequences.

    Raises:
        InputError: a sequence cannot be embedded; identified by its index, from 0.
        VirnucError: any other failure; the message says what to do.
    """
    with Embedder(model, **options) as embedder:
        return embedder.embed(sequences)


@_takes_settings(ScoringSettings)
def predict(
    source: str | Path | Sequence[str | Path] | Sequence[tuple[str, str]],
    *,
    out: str | Path | None = None,
    chunk_length: int | Literal["auto"] | None = None,
    esm_model: str = "tiny",
    dnabert_model: str = "tiny",
    head: str | None = None,
    force: bool = False,
    **options: Any,
) -> Predictions:
    """Classifies contigs as viral or not, as `virnuc predict` does; `Predictor` keeps the models for further calls.

    Args:
        source: a FASTA or FASTQ file (a path or a URL), several of them, or (id, sequence) pairs.
        out: run folder, with all files of the command; an interrupted run there is resumed. None uses a temporary folder. To
            a URL such as `s3://BUCKET/NAME` the results are copied.
        chunk_length: in bp; None is "auto": what the head is for, by record length for the longest ORFs.
        esm_model: ESM-2 model: catalogue name, hub name or path.
        dnabert_model: DNABERT-S model: catalogue name, hub name or path.
        head: classifier head trained on these models; None selects the bundled head, for the bundled models only.
        force: discard an earlier run in `out`.
        **options: other fields of `virnuc_core.settings.ScoringSettings`.

    Raises:
        InputError: a file cannot be read, or contains nothing usable.
        MismatchError: `out` holds a run with other input, models or settings.
        VirnucError: any other failure; the message says what to do.
    """
    with Predictor(
        chunk_length=chunk_length, esm_model=esm_model, dnabert_model=dnabert_model, head=head, **options
    ) as predictor:
        return predictor.predict(source, out=out, force=force)


def open_embeddings(path: str | Path) -> Embeddings:
    """Opens embeddings; vectors are read when sliced.

    Args:
        path: the `embeddings.h5` of a predict run, the output of an embed run, or a file of another program: HDF5 with the
            same datasets, or VirNucPro's `*_merged.pt`.

    Raises:
        InputError: the file does not exist.
        DamagedFileError: it is not an embeddings file, or is corrupt or incomplete.
        CheckpointError: it is a torch file with anything but tensors and names.
    """
    return Embeddings(path)


@contextmanager
def _files(source: str | Path | Sequence[str | Path] | Sequence[tuple[str, str]]) -> Iterator[list[str]]:
    """Paths of the inputs; pairs are first written to a temporary file."""
    if isinstance(source, str | Path):
        yield [str(source)]
        return
    paths = [item for item in source if isinstance(item, str | Path)]
    pairs = [item for item in source if not isinstance(item, str | Path)]
    if paths and pairs:
        raise UsageError("give either files or (id, sequence) pairs, not both.")
    if not pairs:
        yield [str(path) for path in paths]
        return
    with TemporaryDirectory(prefix="virnuc-") as scratch:
        yield [_write_fasta(Path(scratch, "sequences.fa"), pairs)]


def _usable(sequences: Sequence[str], alphabet: Alphabet) -> list[bytes]:
    """The sequences, clean; raises InputError for one that cannot be embedded."""
    usable = []
    for number, text in enumerate(sequences):
        letters = "".join(text.split())
        sequence = clean(letters.encode("ascii", "replace"), alphabet)
        if (reason := rejection_reason(sequence, alphabet)) is not None:
            raise InputError(f"sequence {number} cannot be embedded: {reason}. Remove it.")
        _require_letters(number, letters)
        usable.append(sequence)
    return usable


def _require_letters(number: int, letters: str) -> None:
    if not re.fullmatch(r"[A-Za-z*.-]*", letters):
        raise InputError(f"sequence {number} contains non-letters: give sequences without headers.")


def _write_fasta(path: Path, records: Iterable[tuple[str, str]]) -> str:
    """Raises InputError for an id or sequence that FASTA cannot represent."""
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for number, (name, text) in enumerate(records):
            sequence = "".join(text.split())
            _require_letters(number, sequence)
            if " " in name or not name.isprintable():
                raise InputError(
                    f"the id of sequence {number} contains whitespace or invisible characters: {name!r}."
                )
            file.write(f">{name}\n{sequence}\n")
    return str(path)


def _read_table(path: Path) -> "pd.DataFrame":
    """Reads a result table; NA in a numeric column is NaN."""
    import pandas as pd

    columns = path.read_text(encoding="utf-8").partition("\n")[0].split("\t")
    # Read as text even where values look like numbers or NA.
    known = ("seq_name", "topology", "coordinates", "call", "confidence", "class", "best_frame", "status")
    texts = {*known, "id", "file", "reason"} & {*columns}
    return pd.read_csv(
        path,
        sep="\t",
        quoting=3,
        dtype=dict.fromkeys(texts, str),
        keep_default_na=False,
        na_values={name: [NOT_AVAILABLE] for name in columns if name not in texts},
    )
