"""Speed of both tokenizers and of the packing, and how full the batches are.

    python -m benchmarks.batching --tokenizer tokenizer.json --proteins proteins.faa.gz

Writes benchmarks/results/batching.json. Frames are random: 100 to 166 residues and their DNA, the lengths of open
frames of 300 and 500 bp chunks. The BPE uses as many threads as the machine has, the rest one.
"""

import argparse
import os
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from benchmarks.reports import print_and_write
from virnuc_core.batching.packing import pack
from virnuc_core.batching.tokenizers import DnabertTokenizer, Esm2Tokenizer, TokenColumn
from virnuc_core.columns import ByteColumn
from virnuc_core.sequences.reader import iter_records

TOKEN_BUDGETS = (4096, 16384, 65536)
REPEATS = 5

P = TypeVar("P")
T = TypeVar("T")


def best_seconds(prepare: Callable[[], P], work: Callable[[P], T]) -> tuple[float, T]:
    """Shortest time of `work` over some runs, and its last result; what `prepare` takes is not counted."""
    seconds = []
    for _ in range(REPEATS):
        prepared = prepare()
        begin = time.perf_counter()
        result = work(prepared)
        seconds.append(time.perf_counter() - begin)
    return min(seconds), result


def random_column(lengths: npt.NDArray[np.int64], letters: bytes, rng: np.random.Generator) -> ByteColumn:
    """Random strings of the given lengths."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return ByteColumn(rng.choice(np.frombuffer(letters, np.uint8), offsets[-1]), offsets)


def tokenizer_speed(
    make: Callable[[], Esm2Tokenizer | DnabertTokenizer], column: ByteColumn
) -> tuple[TokenColumn, dict[str, float]]:
    """Tokens of a column, and how many are made a second; each run has a tokenizer with an empty cache."""
    seconds, tokens = best_seconds(make, lambda tokenizer: tokenizer.encode(column))
    letters = int(column.lengths.sum())
    return tokens, {
        "mega_letters_per_s": round(letters / seconds / 1e6, 1),
        "mega_tokens_per_s": round(len(tokens.input_ids) / seconds / 1e6, 2),
        "kilo_sequences_per_s": round(len(tokens) / seconds / 1e3, 1),
    }


def gather(tokens: TokenColumn, batches: list[npt.NDArray[np.int64]]) -> None:
    """Makes every batch and keeps none."""
    for rows in batches:
        tokens.take(rows)


def packing_speed(tokens: TokenColumn) -> dict[str, dict[str, float]]:
    """Fill and speed of packing alone and of gathering all batches, for each token budget."""
    figures = {}
    for budget in TOKEN_BUDGETS:
        pack_s, packing = best_seconds(lambda: tokens.num_tokens, partial(pack, token_budget=budget))
        gather_s, _ = best_seconds(partial(getattr, packing, "batches"), partial(gather, tokens))
        figures[str(budget)] = {
            "efficiency": round(packing.efficiency, 4),
            "batches": len(packing.batches),
            "pack_mega_sequences_per_s": round(len(tokens) / pack_s / 1e6, 2),
            "gather_mega_tokens_per_s": round(packing.num_tokens / gather_s / 1e6),
        }
    return figures


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json of a DNABERT-S model")
    parser.add_argument("--proteins", type=Path, help="FASTA of proteins")
    parser.add_argument("--frames", type=int, default=20_000)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "batching.json")
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    residues = rng.integers(100, 167, arguments.frames)

    protein, esm2 = tokenizer_speed(Esm2Tokenizer, random_column(residues, Esm2Tokenizer.residues[:20], rng))
    report: dict[str, object] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "frames": arguments.frames,
        "esm2_tokenizer": esm2,
        "esm2_packing_of_frames": packing_speed(protein),
    }
    if arguments.tokenizer:
        column = random_column(3 * residues + 1, b"ACGT", rng)
        dna, report["dnabert_tokenizer"] = tokenizer_speed(
            lambda: DnabertTokenizer(arguments.tokenizer), column
        )
        report["dnabert_packing_of_frames"] = packing_speed(dna)
    if arguments.proteins:
        records = iter_records([str(arguments.proteins)], "protein")
        tokens = Esm2Tokenizer().encode(ByteColumn.from_strings(record.sequence for record in records))
        report["proteins"] = {"file": arguments.proteins.name, "sequences": len(tokens)}
        report["esm2_packing_of_proteins"] = packing_speed(tokens)
    print_and_write(report, arguments.out)


if __name__ == "__main__":
    main()
