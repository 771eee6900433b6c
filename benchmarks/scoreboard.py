"""The scoreboard: virnuc, Jaeger and a classifier by 6-mers on the same sequences and the same cores.

    python -m benchmarks.scoreboard --data FOLDER [--jaeger VENV] [--compare FOLDER] [-- OPTION...]

FOLDER has far.fa.gz, val.fa.gz and the training files (labelled by class= in the headers) and genomes.tsv. The genomes of
far.fa.gz and val.fa.gz are cut into consecutive pieces of each length; a shorter rest is left out, and of more than --pieces pieces that
many are taken, evenly spaced. With --compare, the FASTA files of that folder (class=viral or another one) are scored as they
are, and figures are given with and without those of which more than 5 % of the 21-mers are in the training files. Every program runs by its own command and with its defaults;
options after `--` are passed to `virnuc predict`. VENV is a virtual environment with `jaeger-bio[cpu]`; without it there
is no row of Jaeger. A sequence without a score counts as not called, and ranks below every score.

What is read of each program:

virnuc: `virus_score`, `call` (a provirus counts as called) and `confidence` of contigs.tsv, where a piece is a contig.
Jaeger: the softmax over the four class scores, of it the phage's; called by `prediction` ("Jaeger"), and by its table of
phages, which takes a least score and reliability, too ("Jaeger, filtered").
6-mers: a logistic regression (benchmarks.kmers); called from 0.5 on.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import dnaio
import numpy as np
import numpy.typing as npt
import torch
from sklearn.metrics import (
    average_precision_score,
    matthews_corrcoef,
    precision_score,
    recall_score,
    roc_auc_score,
)

from benchmarks.kmers import NUM_PIECES, TRAINING_FILES, load_training_genomes, shares_found
from benchmarks.reports import Json, command_of, options_of, read_rows, write_report
from scripts.train_bundled.evaluation import pieces
from scripts.train_bundled.genomes import ANY_VIRUS, CLASSES, Genomes
from virnuc_core.columns import ByteColumn
from virnuc_core.training.metrics import calibration_error

Bool = npt.NDArray[np.bool_]
Float64 = npt.NDArray[np.float64]

PIECE_FILES: Final = ("far", "val")
PIECE_LENGTHS: Final = (500, 3_000, 5_000, 10_000)  # bp
MOST_OVERLAP: Final = 0.05
MOST_PIECES: Final = 4_000  # of each length: fewer than there are of 300, 500 and 1,000 bp
CONFIDENCES: Final = ("confident", "likely", "unsure")
EVERYTHING: Final = "all"
WITHOUT_EUKARYOTIC: Final = "without eukaryotic viruses"
WITHOUT_OVERLAP: Final = "without overlap"
ROOT: Final = Path(__file__).parents[1]
_VIRUSES: Final = {**dict(enumerate(CLASSES)), ANY_VIRUS: "virus, host unknown"}
_JAEGER_CLASSES: Final = ("phage_score", "bacteria_score", "eukarya_score", "archaea_score")


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceSet:
    """n labelled sequences.

    Attributes:
        length: bp of every sequence; None where they differ.
        kinds: the class of each.
        subsets: bool (n,) by name; figures are given for each.
        overlap: with the training sequences, if that was asked for.
    """

    name: str
    length: int | None
    bases: ByteColumn
    is_viral: Bool
    kinds: tuple[str, ...]
    subsets: Mapping[str, Bool]
    overlap: Json | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """What a program says of n sequences.

    Attributes:
        p_virus: float64 (n,), NaN without a score.
        is_called: bool (n,) whether called a virus.
        confidences: of the calls, "NA" without one; None for programs that have none.
    """

    p_virus: Float64
    is_called: Bool
    confidences: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A program that scores a FASTA file.

    Attributes:
        rows: one for each way of reading its calls.
        command: of FASTA and output (a folder or a file).
        read: from the output the answers for n sequences, named s0, s1, ..., by row.
        refusal: what it prints when it ends with an error since no sequence is one for it.
    """

    name: str
    rows: tuple[str, ...]
    version: str
    command: Callable[[Path, Path], list[str]]
    read: Callable[[Path, int], dict[str, Answers]]
    refusal: str | None = None


def piece_sets(data: Path, name: str, most: int) -> Iterator[SequenceSet]:
    """Pieces of labelled genomes, at most so many of each length, evenly spaced; viruses are named by their hosts."""
    genomes = Genomes.load([data / f"{name}.fa.gz"], data / "genomes.tsv")
    for length in PIECE_LENGTHS:
        cut = pieces(genomes, length)
        if len(cut.bases) > most:
            cut = cut.take(np.linspace(0, len(cut.bases) - 1, most).astype(np.int64))
        kinds = tuple(
            _VIRUSES[number] if is_viral else source
            for number, source, is_viral in zip(cut.classes.tolist(), cut.sources, cut.is_viral, strict=True)
        )
        others = np.array([kind != "eukaryotic virus" for kind in kinds], np.bool_)
        yield SequenceSet(
            name=name,
            length=length,
            bases=cut.bases,
            is_viral=cut.is_viral,
            kinds=kinds,
            subsets={EVERYTHING: np.ones(len(kinds), np.bool_), WITHOUT_EUKARYOTIC: others},
        )


def compared_sets(folder: Path, training: ByteColumn) -> Iterator[SequenceSet]:
    """The sets of a folder, each with what it shares with the training sequences.

    Raises:
        SystemExit: a header has no class.
    """
    for path in sorted(folder.glob("*.fa.gz")):
        with dnaio.open(path) as records:
            labelled = [(re.search(r"\bclass=(\S+)", one.name), one) for one in records]
        if unlabelled := [record.name for found, record in labelled if found is None]:
            raise SystemExit(f"{path}: no class= in the header of {unlabelled[0]}")
        kinds = tuple(found[1] for found, _ in labelled if found)
        bases = ByteColumn.from_strings(record.sequence for _, record in labelled)
        is_viral, shares = np.array([kind == "viral" for kind in kinds]), shares_found(bases, training)
        is_new = shares <= MOST_OVERLAP
        yield SequenceSet(
            name=path.name.removesuffix(".fa.gz"),
            length=None,
            bases=bases,
            is_viral=is_viral,
            kinds=kinds,
            subsets={EVERYTHING: np.ones(len(kinds), np.bool_), WITHOUT_OVERLAP: is_new},
            overlap={
                "overlapping": int((~is_new).sum()),
                "overlapping_viral": int((~is_new & is_viral).sum()),
                "mean_share_viral": _mean(shares[is_viral]),
                "mean_share_other": _mean(shares[~is_viral]),
            },
        )


def programs_of(arguments: argparse.Namespace, kmer_model: Path) -> Iterator[Program]:
    """`virnuc predict` of this checkout on the CPU without stored vectors, Jaeger if it is there, and the 6-mers."""
    python = sys.executable
    fixed = ["--devices", "cpu", "--embeddings", "none", "--quiet", *arguments.option]
    predict = [python, "-m", "virnuc_cli", "predict"]
    yield Program(
        name="virnuc",
        rows=("virnuc",),
        version=importlib.metadata.version("virnuc"),
        command=lambda fasta, out: [*predict, str(fasta), "--out", str(out), *fixed],
        read=lambda out, count: {"virnuc": read_contigs(out / "contigs.tsv", count)},
    )
    if arguments.jaeger:
        program = str(arguments.jaeger.absolute() / "bin" / "jaeger")
        said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
        threads = ["--workers", str(arguments.threads), "--cpu"]
        yield Program(
            name="Jaeger",
            rows=("Jaeger", "Jaeger, filtered"),
            version=said.split()[-1],
            command=lambda fasta, out: [program, "predict", "-i", str(fasta), "-o", str(out), *threads],
            read=read_jaeger,
            refusal=r"all records in .* are < \d+bp",
        )
    kmers = [python, "-m", "benchmarks.kmers", "predict", "--model", str(kmer_model)]
    yield Program(
        name="6-mers",
        rows=("6-mers",),
        version=f"scikit-learn {importlib.metadata.version('scikit-learn')}",
        command=lambda fasta, out: [*kmers, "--fasta", str(fasta), "--out", str(out)],
        read=lambda out, count: {"6-mers": read_kmers(out, count)},
    )


def read_contigs(path: Path, count: int) -> Answers:
    """What a contigs.tsv says; rejected records have no row there.

    Raises:
        SystemExit: it is of a head for open reading frames, which gives contigs no score of their own.
    """
    rows = read_rows(path)
    if rows and {row["class"] for row in rows} == {"NA"}:
        raise SystemExit(f"{path.name} names no classes: the scoreboard takes heads for `longest` only")
    p_virus, is_called, confidences = np.full(count, np.nan), np.zeros(count, np.bool_), ["NA"] * count
    for row in rows:
        number = _number(row["seq_name"])
        p_virus[number], confidences[number] = _score(row["virus_score"]), row["confidence"]
        is_called[number] = row["call"] in ("virus", "provirus")
    return Answers(p_virus=p_virus, is_called=is_called, confidences=tuple(confidences))


def read_jaeger(out: Path, count: int) -> dict[str, Answers]:
    """What Jaeger's two tables say: by `prediction`, and by being among the phages; short sequences have no row there."""
    p_virus, is_phage, is_listed = (
        np.full(count, np.nan),
        np.zeros(count, np.bool_),
        np.zeros(count, np.bool_),
    )
    for row in read_rows(out / "default" / "input_jaeger.tsv"):
        scores, number = np.array([float(row[name]) for name in _JAEGER_CLASSES]), _number(row["contig_id"])
        p_virus[number] = 1 / np.exp(scores - scores[0]).sum()
        is_phage[number] = row["prediction"] == "phage"
    for row in read_rows(out / "default" / "input_phages_jaeger.tsv"):
        is_listed[_number(row["contig_id"])] = True
    ways = {"Jaeger": is_phage, "Jaeger, filtered": is_listed}
    return {name: Answers(p_virus=p_virus, is_called=called) for name, called in ways.items()}


def read_kmers(path: Path, count: int) -> Answers:
    p_virus = np.full(count, np.nan)
    for row in read_rows(path):
        p_virus[_number(row["seq_name"])] = _score(row["virus_score"])
    return Answers(p_virus=p_virus, is_called=np.nan_to_num(p_virus) >= 0.5)


def _number(name: str) -> int:
    return int(name.removeprefix("s"))


def _score(cell: str) -> float:
    return float(cell.replace("NA", "nan"))


def run(program: Program, bases: ByteColumn, scratch: Path) -> tuple[Json, dict[str, Answers]]:
    """Seconds and peak memory of a program on some sequences, and its answers; none if it refused them.

    Raises:
        SystemExit: it failed.
    """
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        fasta, out = Path(folder) / "input.fa", Path(folder) / "out"
        records = enumerate(bases.to_strings())
        fasta.write_text("".join(f">s{number}\n{sequence}\n" for number, sequence in records))
        used = run_measured(program.command(fasta, out), scratch, program.refusal)
        if used["refused"]:
            count = len(bases)
            nothing = Answers(p_virus=np.full(count, np.nan), is_called=np.zeros(count, np.bool_))
            return used, dict.fromkeys(program.rows, nothing)
        return used, program.read(out, len(bases))


def run_measured(command: Sequence[str], scratch: Path, refusal: str | None = None) -> Json:
    """Runs a command; gives what benchmarks/child_usage.py measures, and whether it refused its input.

    Raises:
        SystemExit: it failed.
    """
    usage = scratch / "usage.json"
    wrapper = [sys.executable, str(ROOT / "benchmarks" / "child_usage.py"), str(usage)]
    ended = subprocess.run(
        [*wrapper, *command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    # Logs may be wrapped at the width of a terminal.
    said = " ".join(ended.stdout.split())
    has_refused = bool(ended.returncode and refusal and re.search(refusal, said))
    if ended.returncode and not has_refused:
        raise SystemExit(f"{command} ended with exit code {ended.returncode}:\n{ended.stdout[-3000:]}")
    return {**json.loads(usage.read_text()), "refused": has_refused}


def speeds(used: Json, bases: int, start_up: float) -> Json:
    """Mbp a minute, with and without the seconds that a tiny input takes; None where nothing was scored."""

    def rate(seconds: float) -> float | None:
        return None if used["refused"] or seconds <= 0 else round(bases / 1e6 / seconds * 60, 2)

    rates = {"mbp_per_minute": rate(used["seconds"])}
    return {**used, **rates, "mbp_per_minute_without_start_up": rate(used["seconds"] - start_up)}


def figures(answers: Answers, own: SequenceSet, rows: Bool) -> Json:
    """Figures of the chosen rows, bool (n,), with the refused sequences as not called and below every score."""
    viral, called, p_virus = own.is_viral[rows], answers.is_called[rows], answers.p_virus[rows]
    kinds, is_scored = np.array(own.kinds)[rows], ~np.isnan(p_virus)
    ranks, has_both = np.where(is_scored, p_virus, -1.0), bool(viral.any() and not viral.all())
    scored = viral[is_scored]
    counts = np.bincount(scored, minlength=2)
    weights = 1 / counts[scored.astype(int)]
    return {
        "sequences": len(ranks),
        "viral": int(viral.sum()),
        "scored": _mean(is_scored),
        "auroc": _rounded(roc_auc_score(viral, ranks)) if has_both else None,
        "auprc": _rounded(average_precision_score(viral, ranks)) if has_both else None,
        "mcc": _rounded(matthews_corrcoef(viral, called)) if has_both else None,
        "precision": _rounded(precision_score(viral, called)) if called.any() else None,
        "recall": _rounded(recall_score(viral, called)) if viral.any() else None,
        "ece_balanced": calibration_error(p_virus[is_scored], scored, weights) if counts.all() else None,
        "called_virus": {kind: _mean(called[kinds == kind]) for kind in np.unique(kinds).tolist()},
    }


def by_confidence(answers: Answers, is_viral: Bool) -> Json:
    """For each confidence the number of sequences, how many are called right, and of those called viruses the share that are."""
    found: Json = {}
    for confidence in CONFIDENCES:
        own = np.array([each == confidence for each in answers.confidences or ()], np.bool_)
        called = own & answers.is_called
        found[confidence] = {
            "sequences": int(own.sum()),
            "right": _mean((answers.is_called == is_viral)[own]),
            "called_virus": int(called.sum()),
            "precision": _mean(is_viral[called]),
        }
    return found


def _mean(values: npt.NDArray[np.generic]) -> float | None:
    return _rounded(float(np.mean(values.astype(float)))) if len(values) else None


def _rounded(value: float) -> float:
    return round(float(value), 4)


def score_set(
    own: SequenceSet, programs: Sequence[Program], start_up: Mapping[str, Json], scratch: Path
) -> Json:
    bases = int(own.bases.lengths.sum())
    runs, results, of_confidence = {}, {}, {}
    for program in programs:
        used, answers = run(program, own.bases, scratch)
        runs[program.name] = speeds(used, bases, start_up[program.name]["seconds"])
        print(own.name, own.length, program.name, json.dumps(runs[program.name]), flush=True)
        for name, each in answers.items():
            results[name] = {subset: figures(each, own, rows) for subset, rows in own.subsets.items()}
            if each.confidences:
                of_confidence[name] = by_confidence(each, own.is_viral)
    names, counts = np.unique(np.array(own.kinds), return_counts=True)
    return {
        "name": own.name,
        "length": own.length,
        "sequences": len(own.bases),
        "viral": int(own.is_viral.sum()),
        "bases": bases,
        "classes": dict(zip(names.tolist(), counts.tolist(), strict=True)),
        "runs": runs,
        "results": results,
        "confidence": of_confidence,
        **({"overlap": own.overlap} if own.overlap else {}),
    }


def measure_all(arguments: argparse.Namespace, scratch: Path) -> None:
    trained = scratch / "kmers.npz"
    train = ["benchmarks.kmers", "train", "--data", str(arguments.data.absolute()), "--model", str(trained)]
    training = run_measured([sys.executable, "-m", *train, "--pieces", str(arguments.kmer_pieces)], scratch)
    programs = list(programs_of(arguments, trained))
    own_sets = [own for name in PIECE_FILES for own in piece_sets(arguments.data, name, arguments.pieces)]
    tiny = next(own for own in own_sets if own.length == 3000).bases.rows(0, 1)
    # The faster of two runs, since the first one reads its files from disk.
    started = {
        program.name: min(
            (run(program, tiny, scratch)[0] for _ in range(2)), key=lambda used: used["seconds"]
        )
        for program in programs
    }
    if arguments.compare:
        own_sets += compared_sets(arguments.compare, load_training_genomes(arguments.data).bases)
    report: Json = {
        "kind": "scoreboard",
        "command": command_of("scoreboard"),
        "machine": {
            "cpu": torch.cpu.get_capabilities().get("cpu_name", platform.processor()),
            "isa": torch.backends.cpu.get_cpu_capability(),
            "threads": arguments.threads,
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "data": [*(f"{name}.fa.gz" for name in PIECE_FILES), *TRAINING_FILES],
        "programs": {program.name: program.version for program in programs},
        "start_up": started,
        "kmer_training": training,
        "sets": [],
    }
    for own in own_sets:
        report["sets"].append(score_set(own, programs, started, scratch))
        write_report(report, arguments.out)


def main() -> None:
    parser = options_of("scoreboard", __doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--jaeger", type=Path, metavar="VENV")
    parser.add_argument("--compare", type=Path, metavar="FOLDER")
    parser.add_argument("--pieces", type=int, default=MOST_PIECES, help="of each length, at most")
    parser.add_argument("--threads", type=int, default=2, help="cores that all programs are given [2]")
    parser.add_argument("--kmer-pieces", type=int, default=NUM_PIECES, help="the baseline's, of each length")
    parser.add_argument("option", nargs="*", help="of virnuc predict")
    arguments = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    with tempfile.TemporaryDirectory() as scratch:
        measure_all(arguments, Path(scratch))


if __name__ == "__main__":
    main()
