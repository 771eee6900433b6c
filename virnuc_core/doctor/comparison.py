"""A checkpoint through virnuc and through the program that it was published for, on the same real sequences."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from virnuc_core.doctor.original import embed_with_original
from virnuc_core.errors import DeviceError
from virnuc_core.inference.device import resolve_devices, resolve_precision
from virnuc_core.models.checkpoints import family_of, resolve_checkpoint
from virnuc_core.plain_text import visible
from virnuc_core.results.embeddings import EMBED_VECTORS, Embeddings
from virnuc_core.results.whole_run import embed_run
from virnuc_core.run_folder import RunFolder
from virnuc_core.sequences.reader import iter_records
from virnuc_core.settings import RunConfig
from virnuc_core.specs import Alphabet, Engine, Family, ResolvedPrecision

# Eight pieces of examples/contigs.fa.gz of 60 to 3,000 bases, and the longest stop-free stretch of each.
_SEQUENCES: Final[dict[Family, Path]] = {
    family: Path(__file__).with_name(f"{family}.fa") for family in ("esm2", "dnabert_s")
}
_ALPHABETS: Final[dict[Family, Alphabet]] = {"esm2": "protein", "dnabert_s": "dna"}
# Rounding stays above these (docs/performance.md has what was measured); what is computed wrongly is far below.
_LEAST_COSINES: Final[dict[ResolvedPrecision, float]] = {
    "fp32": 0.999999,
    "fp16": 0.9999,
    "bf16": 0.999,
    "fp8": 0.99,
}
_MOST_FP32_DIFFERENCE: Final = 1e-4  # of the largest value


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedRun:
    """virnuc's vectors in one precision beside those of the other program in fp32.

    Attributes:
        engine: that computed them.
        precision: of its arithmetic.
        largest_difference: between two numbers.
        largest_value: of any number, by the other program.
        least_cosine: between two vectors.
        is_same: whether all of it is within rounding.
    """

    engine: Engine
    precision: ResolvedPrecision
    largest_difference: float
    largest_value: float
    least_cosine: float
    is_same: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelComparison:
    """What was compared, and how.

    Attributes:
        model: as it was asked for.
        program: the other program.
        device: where both computed.
        num_sequences: how many there were.
        shortest: letters of the shortest sequence.
        longest: letters of the longest one.
        runs: virnuc's, by engine and precision.
    """

    model: str
    program: str
    device: str
    num_sequences: int
    shortest: int
    longest: int
    runs: tuple[ComparedRun, ...]

    @property
    def is_same(self) -> bool:
        """Whether every run is."""
        return all(run.is_same for run in self.runs)

    @property
    def document(self) -> dict[str, Any]:
        """The same as plain JSON values."""
        return {**asdict(self), "runs": [asdict(run) for run in self.runs], "is_same": self.is_same}

    @property
    def summary(self) -> str:
        """The same in lines for a person, the verdict last."""
        lines = [
            f"{self.model}: virnuc against {self.program} in fp32 on {self.device}",
            f"mean vectors of {self.num_sequences} real sequences of {self.shortest} to {self.longest} letters",
            "engine     precision  largest difference  (largest value)  least cosine",
        ]
        for run in self.runs:
            lines.append(
                f"{run.engine:<9}  {run.precision:<9}  {run.largest_difference:<18.3g}  {run.largest_value:<15.4g}  "
                f"{run.least_cosine:.8f}    {'same' if run.is_same else 'DIFFERS'}"
            )
        verdict = "the same within rounding" if self.is_same else "NOT the same"
        return visible("\n".join([*lines, f"verdict: {verdict}"]))


def compare_model(model: str) -> ModelComparison:
    """Computes the mean vectors of the same sequences by virnuc, in every precision of this machine, and by the original.

    Args:
        model: `esm2:NAME|PATH`, `dnabert:NAME|PATH`, or a name or path alone.

    Raises:
        CheckpointError: the checkpoint cannot be used, by virnuc or by the other program.
        DeviceError: a device failed.
        UsageError: the other program is not installed, or the name is that of two models.
    """
    family, name = family_of(model)
    checkpoint = resolve_checkpoint(name, family)
    fasta = _SEQUENCES[family]
    sequences = [record.sequence.decode() for record in iter_records([fasta], _ALPHABETS[family])]
    device = resolve_devices(("auto",))[0]
    original = embed_with_original(checkpoint, sequences, device)
    lengths = [len(sequence) for sequence in sequences]
    return ModelComparison(
        model=model,
        program=original.program,
        device=device,
        num_sequences=len(sequences),
        shortest=min(lengths),
        longest=max(lengths),
        runs=tuple(
            compare_vectors(
                _embed(name, family, fasta, device, engine, precision), original.vectors, engine, precision
            )
            for engine, precision in _ways(device)
        ),
    )


def compare_vectors(
    ours: npt.NDArray[np.float32],
    theirs: npt.NDArray[np.float32],
    engine: Engine,
    precision: ResolvedPrecision,
) -> ComparedRun:
    """Judges vectors (N, D) by those of the other program."""
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    difference, largest = float(np.abs(a - b).max()), float(np.abs(b).max())
    cosine = float(((a * b).sum(1) / np.sqrt((a * a).sum(1) * (b * b).sum(1))).min())
    # NaN compares as false.
    is_close = precision != "fp32" or difference <= _MOST_FP32_DIFFERENCE * largest
    return ComparedRun(
        engine=engine,
        precision=precision,
        largest_difference=difference,
        largest_value=largest,
        least_cosine=cosine,
        is_same=cosine >= _LEAST_COSINES[precision] and is_close,
    )


def _ways(device: str) -> Iterator[tuple[Engine, ResolvedPrecision]]:
    """The reference engine, and the packed one in all that the device computes in."""
    yield "reference", "fp32"
    for precision in _LEAST_COSINES:
        try:
            yield "packed", resolve_precision(precision, device)
        except DeviceError:
            continue


def _embed(
    name: str, family: Family, fasta: Path, device: str, engine: Engine, precision: ResolvedPrecision
) -> npt.NDArray[np.float32]:
    """As `virnuc embed` does it, fp32 (N, D)."""
    config = RunConfig(
        chunk_length=None,
        esm_model=name if family == "esm2" else None,
        dnabert_model=name if family == "dnabert_s" else None,
        devices=(device.removeprefix("cuda:"),),
        engine=engine,
        precision=precision,
    )
    with TemporaryDirectory(prefix="virnuc-doctor-") as scratch:
        folder = RunFolder(Path(scratch) / "run")
        embed_run([str(fasta)], folder.root, config)
        with Embeddings(folder.embeddings, own=True) as file:
            vectors: npt.NDArray[np.float32] = file.rows(EMBED_VECTORS, 0, len(file))
    return vectors
