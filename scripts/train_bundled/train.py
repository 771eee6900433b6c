"""Trains the bundled models and their head.

    python -m scripts.train_bundled.train --train train.fa.gz extra.fa.gz more.fa.gz --far far.fa.gz --val val.fa.gz \
        --table genomes.tsv --start OLD_MODELS --work FOLDER --out virnuc_core/models/bundled

Masked tokens of both models, the classes of rows, chunks and contigs, and which contigs are relatives are learnt together,
on chunks of several lengths and contigs of 1 to 24 chunks, some of them DNA drawn at random, in bf16 with weights in fp32. It
begins with the vocabulary and the models of an earlier training, `--start`, of which ESM-2 may have more layers: the first
ones are taken. Of an exponential average of the weights, the one that ranks the genomes of `--far` best is kept: families that
the training genomes do not hold, by which the settings were chosen, too. `--val` is only measured. A share of the groups of
relatives is held out for the calibration and the limit of novelty. The work folder keeps the tokens for further trainings.
"""

import argparse
import copy
import itertools
import json
import math
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Final, Self

import numpy as np
import numpy.typing as npt
import torch

from scripts.train_bundled.data import (
    Chunks,
    DeviceChunks,
    View,
    cut,
    load_chunks,
    save_chunks,
)
from scripts.train_bundled.evaluation import (
    CALIBRATION_SETS,
    RANKED_SETS,
    Sample,
    calibrate,
    evaluate,
    pieces,
)
from scripts.train_bundled.export import TOKENIZER, export, load_exported
from scripts.train_bundled.genomes import Genomes
from scripts.train_bundled.network import Network
from scripts.train_bundled.novelty import embed_genomes
from scripts.train_bundled.relatives import relatives
from virnuc_core.batching.tokenizers import DnabertTokenizer
from virnuc_core.training.contigs import ContigBatch, ContigSampler, LossWeights, fit_novelty, make_batch

Int64 = npt.NDArray[np.int64]

VIEWS: Final = (
    View(chunk_length=500),
    View(chunk_length=500, shift=251),
    View(chunk_length=500, shift=61, errors=0.005),
    View(chunk_length=300, shift=17),
    View(chunk_length=300, shift=83, errors=0.01),
    View(chunk_length=1000, shift=313),
    View(chunk_length=1000, shift=811),
    View(chunk_length=2000, shift=991),
    View(chunk_length=500, shift=131, recoded=0.85, substituted=0.08),
    View(chunk_length=500, shift=397, recoded=0.85, substituted=0.08),
    View(chunk_length=300, shift=157, recoded=0.85, substituted=0.08),
    View(chunk_length=1000, shift=677, recoded=0.85, substituted=0.08),
    View(chunk_length=2000, shift=1501, recoded=0.85, substituted=0.08),
    View(chunk_length=500, shift=199, recoded=0.4, substituted=0.3),
    View(chunk_length=500, shift=449, recoded=0.85, substituted=0.3),
    View(chunk_length=300, shift=227, recoded=0.4, substituted=0.3),
    View(chunk_length=1000, shift=499, recoded=0.4, substituted=0.3),
    View(chunk_length=2000, shift=500, recoded=0.4, substituted=0.3),
)
_STRONG: Final = 0.3  # of View.substituted
_FULL_BATCH_BASES: Final = 1000  # of a chunk
_RANDOM_RECORDS: Final = 400
_RANDOM_BASES: Final = 20_000  # of a record
_MEASURE_EVERY: Final = 800  # steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What decides the result, apart from the data, the views and the shares of the classes.

    Attributes:
        plain_share: of steps with a view whose codons are as they are.
        strong_share: of the other steps, those with a view of which 30% of the residues are replaced.
        masked_weight: of the loss of masked tokens.
    """

    steps: int = 9175
    seed: int = 3
    learning_rate: float = 8e-4
    weight_decay: float = 0.1
    dropout: float = 0.05
    head_dropout: float = 0.15
    dna_dropout: float = 0.25
    group_power: float = 0.3
    held_out: float = 0.05
    ema_decay: float = 0.999
    warmup: float = 0.016
    batch_scale: float = 2.0
    plain_share: float = 0.75
    strong_share: float = 0.3
    masked_weight: float = 0.15


class Sampler:
    """Draws batches of contigs of genomes, the same ones for a step whenever it is asked.

    Those of chunks of more than 1,000 bases have fewer contigs, and about as many tokens as the others.
    """

    def __init__(self, genomes: Genomes, views: list[DeviceChunks], settings: Settings) -> None:
        weights = genomes.weights(settings.group_power)
        self._views = views
        self._samplers = [ContigSampler(view.first_chunk, weights, genomes.is_viral) for view in views]
        records = [np.repeat(np.arange(len(genomes.classes)), np.diff(view.first_chunk)) for view in views]
        self._classes = [genomes.classes[record] for record in records]
        self._groups = [genomes.groups[record] for record in records]
        longest = [int(view.sizes[:, 1].max()) for view in views]
        self._scales = [settings.batch_scale * min(1.0, _FULL_BATCH_BASES / length) for length in longest]
        self._seed = settings.seed
        kinds = np.array([bool(view.recoded) + (view.substituted == _STRONG) for view in VIEWS])
        strong = (1 - settings.plain_share) * settings.strong_share
        shares = np.array([settings.plain_share, 1 - settings.plain_share - strong, strong])
        self._shares = (shares / np.bincount(kinds))[kinds]

    def batches(self) -> Iterator[tuple[DeviceChunks, ContigBatch]]:
        """The batches, drawn by a few threads ahead of time."""
        with ThreadPoolExecutor(3) as pool:
            drawn = deque(pool.submit(self._draw_batch, step) for step in range(6))
            for step in itertools.count(6):
                yield drawn.popleft().result()
                drawn.append(pool.submit(self._draw_batch, step))

    def _draw_batch(self, step: int) -> tuple[DeviceChunks, ContigBatch]:
        rng = np.random.default_rng((self._seed, step))
        number = int(rng.choice(len(self._views), p=self._shares))
        chunks, contigs = self._views[number], self._samplers[number].draw(self._scales[number], rng)
        return chunks, make_batch(chunks.first_row, contigs, self._classes[number], self._groups[number])


class Trainer:
    """Trains a network.

    Attributes:
        average: of its weights.
        best: state of the average that ranked the genomes of other families best.
        history: AUROC of the average on each sample of these, every `_MEASURE_EVERY` steps.
    """

    def __init__(self, settings: Settings, start: Path, device: torch.device) -> None:
        torch.manual_seed(settings.seed)
        self.settings = settings
        self.step = 0
        self.network = Network(settings.dropout, settings.head_dropout, settings.dna_dropout)
        load_exported(self.network, start)
        self.network.to(device)
        self.average = copy.deepcopy(self.network).requires_grad_(False).eval()
        self.best: dict[str, torch.Tensor] = {}
        self.history: list[dict[str, float]] = []
        decayed = [p for p in self.network.parameters() if p.ndim > 1]
        others = [p for p in self.network.parameters() if p.ndim <= 1]
        self._optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": settings.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=settings.learning_rate,
            betas=(0.9, 0.98),
            fused=device.type == "cuda",
        )
        self._in_bf16 = self.network.in_bf16()
        pairs = zip(self.network.parameters(), self._in_bf16.parameters(), strict=True)
        # The parameters in fp32 and their copies in bf16.
        self._own, self._copied = zip(*((own, copy) for own, copy in pairs if own is not copy), strict=True)
        for own in self._own:
            own.grad = torch.zeros_like(own)

    def train(self, sampler: Sampler, far: list[Sample]) -> None:
        self._in_bf16.train()
        began = time.monotonic()
        for chunks, batch in itertools.islice(sampler.batches(), self.settings.steps):
            parts = self._take_step(chunks, batch)
            self.step += 1
            if self.step % _MEASURE_EVERY == 0 or self.step == self.settings.steps:
                each = "  ".join(f"{name} {value.item():.3f}" for name, value in parts.items())
                rate = self.step / (time.monotonic() - began)
                print(f"step {self.step}  {rate:.1f} steps/s  {each}  {self.measure(far)}", flush=True)

    def measure(self, far: list[Sample]) -> dict[str, float]:
        """AUROC of the average on each sample; keeps its weights if their mean is the highest so far."""
        figures = evaluate(self.average.in_bf16(), far)
        self.history.append({name: own["auroc"] for name, own in figures.items()})
        means = [float(np.mean(list(own.values()))) for own in self.history]
        if means[-1] == max(means):
            self.best = copy.deepcopy(self.average.state_dict())
        return self.history[-1]

    def _take_step(self, chunks: DeviceChunks, batch: ContigBatch) -> dict[str, torch.Tensor]:
        self._set_rate()
        self._in_bf16.zero_grad(set_to_none=True)
        rng = np.random.default_rng((self.settings.seed, self.step, 1))
        parts = self._in_bf16.loss(chunks, batch, LossWeights(), self.settings.masked_weight, rng)
        torch.stack(list(parts.values())).sum().backward()
        with torch.no_grad():
            torch._foreach_copy_([own.grad for own in self._own], [copy.grad for copy in self._copied])
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self._optimizer.step()
        decay = min(self.settings.ema_decay, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            torch._foreach_copy_(self._copied, self._own)
            torch._foreach_lerp_(list(self.average.parameters()), list(self.network.parameters()), 1 - decay)
        return parts

    def _set_rate(self) -> None:
        done = self.step / self.settings.steps
        rate = min(1.0, done / self.settings.warmup) * 0.5 * (1 + math.cos(math.pi * done))
        for group in self._optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * max(rate, 0.005)


@dataclass(frozen=True, slots=True)
class Data:
    """What is trained on and measured.

    Attributes:
        train: the known genomes and random DNA.
        chunks: of `train`, by view.
        samples: of the genomes "held out" and of others by name.
    """

    known: Genomes
    held: Genomes
    train: Genomes
    tokenizer: Path
    chunks: list[Chunks]
    samples: dict[str, list[Sample]]

    @classmethod
    def read(
        cls,
        train: list[Path],
        others: dict[str, Path],
        table: Path,
        tokenizer: Path,
        work: Path,
        settings: Settings,
        jobs: int,
    ) -> Self:
        """Reads and tokenizes genomes; the tokens are kept in the folder `work`."""
        genomes = Genomes.load(train, table)
        known, held = replace(genomes, groups=relatives(genomes)).split(settings.held_out, settings.seed)
        all_known = known.with_random_dna(_RANDOM_RECORDS, _RANDOM_BASES, settings.seed)
        sets = [("held out", held, lengths) for lengths in CALIBRATION_SETS]
        for name, path in others.items():
            own = Genomes.load([path], table)
            sets += [(name, own, lengths) for lengths in RANKED_SETS]
        sets = [(name, pieces(own, lengths[0]), lengths) for name, own, lengths in sets]
        wanted = [(all_known, view) for view in VIEWS]
        wanted += [(own, View(chunk_length=lengths[1])) for _, own, lengths in sets]
        chunks = tokenized(wanted, work, tokenizer, jobs)
        samples: dict[str, list[Sample]] = {name: [] for name, _, _ in sets}
        for (name, own, lengths), cut_up in zip(sets, chunks[len(VIEWS) :], strict=True):
            samples[name].append(Sample(*lengths, own, cut_up))
        return cls(known, held, all_known, tokenizer, chunks[: len(VIEWS)], samples)

    def views(self, device: torch.device) -> list[DeviceChunks]:
        return [DeviceChunks.build(chunks, len(self.train.classes), device) for chunks in self.chunks]


def tokenized(wanted: list[tuple[Genomes, View]], folder: Path, tokenizer: Path, jobs: int) -> list[Chunks]:
    """The chunks of genomes in a view, from files in a folder; where these are missing they are cut and written."""
    paths = [folder / f"tokens-{number}.npz" for number in range(len(wanted))]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        done = [
            pool.submit(_tokenize, *own, tokenizer, number, path)
            for number, (own, path) in enumerate(zip(wanted, paths, strict=True))
            if not path.exists()
        ]
        for each in done:
            each.result()
    return [load_chunks(path) for path in paths]


def _tokenize(genomes: Genomes, view: View, tokenizer: Path, seed: int, path: Path) -> None:
    save_chunks(cut(genomes, view, DnabertTokenizer(tokenizer), seed), path)


def write_models(trainer: Trainer, data: Data, start: Path, out: Path) -> None:
    """Calibrates the best weights, fits the centroids of novelty, writes all of it, and measures it."""
    settings = trainer.settings
    trainer.average.load_state_dict(trainer.best)
    network, encode = trainer.average.in_bf16(), DnabertTokenizer(data.tokenizer)
    calibrate(network, data.samples["held out"])
    rng = np.random.default_rng(settings.seed)
    own, others = (
        embed_genomes(network, genomes, genomes.weights(settings.group_power), encode, rng)
        for genomes in (data.known, data.held)
    )
    fit_novelty(network.head, own[0], *others, settings.seed)
    export(trainer.average, data.tokenizer, out, asdict(settings))
    report = {
        "start": json.loads((start / "training.json").read_text())["settings"],
        "settings": asdict(settings),
        "views": [asdict(view) for view in VIEWS],
        "far while training": trainer.history,
        "figures": {name: evaluate(network, own) for name, own in data.samples.items()},
    }
    print(json.dumps(report["figures"], indent=1))
    (out / "training.json").write_text(json.dumps(report, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train", type=Path, nargs="+", required=True)
    for name in ("far", "val", "table", "start", "work", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--jobs", type=int, default=13, help="processes that cut and tokenize")
    for name, value in asdict(Settings()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    arguments = vars(parser.parse_args())
    settings = Settings(**{name: arguments[name] for name in asdict(Settings())})
    began = time.monotonic()

    device = torch.device(arguments["device"])
    # Its attention compiles a plan for every new shape, and every batch has new ones.
    torch.backends.cuda.enable_cudnn_sdp(False)
    arguments["work"].mkdir(parents=True, exist_ok=True)
    fastas, table, start, work = (arguments[name] for name in ("train", "table", "start", "work"))
    others = {name: arguments[name] for name in ("far", "val")}
    data = Data.read(fastas, others, table, start / TOKENIZER, work, settings, arguments["jobs"])
    sampler = Sampler(data.train, data.views(device), settings)
    print(f"{time.monotonic() - began:.0f} s to read and tokenize", flush=True)
    trainer = Trainer(settings, start, device)
    trainer.train(sampler, data.samples["far"])
    write_models(trainer, data, start, arguments["out"])
    print(f"{time.monotonic() - began:.0f} s: the models are in {arguments['out']}", flush=True)


if __name__ == "__main__":
    main()
