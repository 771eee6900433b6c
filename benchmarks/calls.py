"""Whether calls can be trusted: contigs of labelled genomes, mixtures of them, proviruses, and reads without a virus.

    python -m benchmarks.calls --fasta far.fa.gz --hosts val.fa.gz --without-virus reads_ecoli.fa.gz

Headers hold `class=`, "viral" or any other. Everything is called through `virnuc predict` with the bundled models. Mixtures are
drawn from the scores of the contigs, and called as a run with these contigs alone would call them.
"""

import math
import random
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import dnaio
import numpy as np
import pyarrow.parquet as pq
from sklearn.metrics import roc_auc_score

from benchmarks.reports import Json, command_of, options_of, print_and_write
from virnuc_cli.main import main as virnuc
from virnuc_core.columns import Bool, Float64
from virnuc_core.results.sample import Mixture
from virnuc_core.specs import CallRule
from virnuc_core.training.metrics import RELIABILITY_BINS, calibration_error

SEED: Final = 6
LENGTHS: Final = (1_000, 10_000)  # bp of the contigs
SHARES: Final = (0.005, 0.02, 0.1, 0.5)  # of viruses in mixtures
MIXTURES: Final = 100
MIXTURE_CONTIGS: Final = 1_000
PROVIRUS_CONTIGS: Final = 60
PROVIRUS_BASES: Final = (15_000, 20_000)
HOST_CONTIG_BASES: Final = 30_000
MIN_OVERLAP: Final = (
    0.7  # of a provirus with the sequence that was put in: bases of both over bases of either
)


def predict(inputs: Path | Mapping[str, str], folder: Path, *options: str) -> Path:
    """Runs `virnuc predict` with the bundled models on the CPU; returns the folder of the run.

    Raises:
        SystemExit: it failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    fasta = inputs if isinstance(inputs, Path) else folder / "input.fa"
    if not isinstance(inputs, Path):
        fasta.write_text("".join(f">{name}\n{sequence}\n" for name, sequence in inputs.items()))
    command = [
        "predict",
        str(fasta),
        "--out",
        str(folder / "run"),
        "--embeddings",
        "none",
        "--devices",
        "cpu",
    ]
    if code := virnuc([*command, "--quiet", *options]):
        raise SystemExit(code)
    return folder / "run"


def read_genomes(fasta: Path) -> dict[str, dict[str, str]]:
    """Sequences by class and header."""
    genomes: dict[str, dict[str, str]] = {}
    with dnaio.open(fasta) as records:
        for record in records:
            found = re.search(r"class=(\w+)", record.name)
            if found is None:
                raise SystemExit(f"{fasta}: {record.name} has no class=.")
            genomes.setdefault(found[1], {})[record.name] = record.sequence.upper()
    return genomes


def cut(genomes: Mapping[str, Mapping[str, str]], generator: random.Random) -> dict[str, str]:
    """Contigs of lengths that are log-uniform; their names begin with their class."""
    low, high = map(math.log, LENGTHS)
    contigs: dict[str, str] = {}
    for name, sequences in genomes.items():
        for sequence in sequences.values():
            begin = 0
            while len(sequence) - begin >= LENGTHS[0]:
                length = round(math.exp(generator.uniform(low, high)))
                if len(sequence) - begin < length:
                    length = len(sequence) - begin
                contigs[f"{name}_{len(contigs)}"] = sequence[begin : begin + length]
                begin += length
    return contigs


def measure_contigs(contigs: Mapping[str, str], run: Path) -> tuple[Json, Float64, Bool]:
    """Figures of scores from 0.5 on, and the scores of all contigs and which are viral."""
    table = pq.read_table(run / "contigs.parquet")
    scores = np.nan_to_num(table["virus_score"].to_numpy())
    classes = np.array([name.rpartition("_")[0] for name in table["seq_name"].to_pylist()])
    is_viral = classes == "viral"
    balanced = np.where(is_viral, 0.5 / is_viral.sum(), 0.5 / (~is_viral).sum())
    report = {
        "contigs": len(contigs),
        "bases": sum(map(len, contigs.values())),
        "auroc": round(float(roc_auc_score(is_viral, scores)), 4),
        "calibration_error": calibration_error(scores, is_viral, balanced),
        "reliability_bins": RELIABILITY_BINS,
        "called_at_half": {
            name: {
                "contigs": int((classes == name).sum()),
                "called": round(float((scores >= 0.5)[classes == name].mean()), 4),
            }
            for name in sorted(set(classes.tolist()))
        },
    }
    return report, scores, is_viral


def measure_mixtures(scores: Float64, is_viral: Bool) -> list[Json]:
    """Precision by default, and the recall that it loses against calls from 0.5 on, over mixtures by their share of viruses."""
    generator = np.random.default_rng(SEED)
    viruses, others = np.flatnonzero(is_viral), np.flatnonzero(~is_viral)
    rows = []
    for share in SHARES:
        count = round(share * MIXTURE_CONTIGS)
        true = false = at_half = 0
        for _ in range(MIXTURES):
            own = scores[generator.choice(viruses, count)]
            rest = scores[generator.choice(others, MIXTURE_CONTIGS - count)]
            mixture = Mixture.of(np.concatenate((own, rest)))
            assert mixture is not None
            threshold = mixture.threshold(CallRule())
            true += int((own >= threshold).sum())
            false += int((rest >= threshold).sum())
            at_half += int((own >= 0.5).sum())
        rows.append(
            {
                "share": share,
                "precision": round(true / max(1, true + false), 4),
                "recall": round(true / (MIXTURES * count), 4),
                "recall_at_half": round(at_half / (MIXTURES * count), 4),
            }
        )
    return rows


def make_proviruses(
    phages: Mapping[str, str], bacteria: Mapping[str, str], generator: random.Random
) -> dict[str, str]:
    """Contigs of bacterial sequence with a piece of a phage; their names end with its first and last base."""
    viral = [sequence for sequence in phages.values() if len(sequence) >= PROVIRUS_BASES[0]]
    hosts = [
        sequence for sequence in bacteria.values() if len(sequence) >= HOST_CONTIG_BASES - PROVIRUS_BASES[0]
    ]
    contigs = {}
    for number in range(PROVIRUS_CONTIGS):
        phage, host = viral[number % len(viral)], hosts[number % len(hosts)]
        length = min(generator.randint(*PROVIRUS_BASES), len(phage))
        begin = generator.randint(0, len(phage) - length)
        rest = HOST_CONTIG_BASES - length
        place, left = generator.randint(0, len(host) - rest), generator.randint(0, rest)
        flanks = host[place : place + left], host[place + left : place + rest]
        contigs[f"made_{number}_{left + 1}_{left + length}"] = (
            flanks[0] + phage[begin : begin + length] + flanks[1]
        )
    return contigs


def measure_proviruses(contigs: Mapping[str, str], run: Path) -> Json:
    """How many of the proviruses are in virus_summary with coordinates that overlap enough."""
    best = dict.fromkeys(contigs, 0.0)
    rows = pq.read_table(run / "virus_summary.parquet").to_pylist()
    for row in rows:
        contig = row["seq_name"].partition("|")[0]
        if row["coordinates"]:
            first, last = map(int, contig.split("_")[2:])
            start, end = map(int, row["coordinates"].split("-"))
            both = max(0, min(last, end) - max(first, start) + 1)
            best[contig] = max(best[contig], both / (max(last, end) - min(first, start) + 1))
    return {
        "contigs": len(contigs),
        "proviruses": sum(row["topology"] == "provirus" for row in rows),
        "called_whole": sum(row["topology"] != "provirus" for row in rows),
        "found": sum(overlap >= MIN_OVERLAP for overlap in best.values()),
        "min_overlap": MIN_OVERLAP,
    }


def main() -> None:
    parser = options_of("calls", __doc__)
    parser.add_argument("--fasta", type=Path, required=True, help="labelled genomes")
    parser.add_argument(
        "--hosts", type=Path, required=True, help="labelled genomes: bacteria and phages for proviruses"
    )
    parser.add_argument(
        "--without-virus", type=Path, nargs="+", required=True, help="sequences without a virus"
    )
    arguments = parser.parse_args()
    generator = random.Random(SEED)
    genomes, hosts = read_genomes(arguments.fasta), read_genomes(arguments.hosts)
    viruses = {**genomes["viral"], **hosts["viral"]}
    phages = {name: sequence for name, sequence in viruses.items() if "phage" in name.casefold()}
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        contigs = cut(genomes, generator)
        figures, scores, is_viral = measure_contigs(contigs, predict(contigs, root / "contigs"))
        made = make_proviruses(phages, {**genomes["bacteria"], **hosts["bacteria"]}, generator)
        proviruses = measure_proviruses(made, predict(made, root / "proviruses"))
        without = {}
        for path in arguments.without_virus:
            calls = pq.read_table(predict(path, root / path.name) / "contigs.parquet")["call"].to_pylist()
            called = sum(call in ("virus", "provirus") for call in calls)
            without[path.name] = {"sequences": len(calls), "called": called}
    report = {
        "command": command_of("calls"),
        "contigs": figures,
        "mixtures": measure_mixtures(scores, is_viral),
        "proviruses": proviruses,
        "without_virus": without,
    }
    print_and_write(report, arguments.out)


if __name__ == "__main__":
    main()
