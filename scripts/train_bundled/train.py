"""Trains the bundled models and their head.

    python -m scripts.train_bundled.train --train train.fa.gz extra.fa.gz --val val.fa.gz --table genomes.tsv \
        --work FOLDER --out virnuc_core/models/bundled

Masked tokens of both models, the classes of rows, chunks and contigs, and which contigs are relatives are learnt together,
on chunks of several lengths and contigs of 1 to 24 chunks, some of them DNA drawn at random, in bf16 with weights in fp32; an
exponential average of the weights is kept. The state is in the work folder: a training that was stopped, or ended after
`--seconds`, goes on with the same command. With `--start` it begins with the models and the vocabulary that an earlier
training wrote. `--val` is measured and never trained on; the settings were chosen with the help of its figures. A share of
the groups of relatives is held out to set the temperatures, and the limit of novelty.
"""

import argparse
import copy
import itertools
import json
import math
import shutil
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

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
    train_vocabulary,
)
from scripts.train_bundled.evaluation import calibrate, evaluate
from scripts.train_bundled.export import TOKENIZER, export, load_exported
from scripts.train_bundled.genomes import Genomes
from scripts.train_bundled.network import DNABERT_SPEC, Network
from scripts.train_bundled.novelty import embed_genomes
from scripts.train_bundled.relatives import relatives
from virnuc_core.batching.tokenizers import DnabertTokenizer
from virnuc_core.training.contigs import ContigBatch, ContigSampler, LossWeights, fit_novelty, make_batch

Int64 = npt.NDArray[np.int64]

_RECODED: Final = {"recoded": 0.85, "substituted": 0.08}
VIEWS: Final = (
    View(chunk_length=500),
    View(chunk_length=500, shift=131, **_RECODED),
    View(chunk_length=500, shift=263, **_RECODED),
    View(chunk_length=500, shift=397, recoded=0.85, substituted=0.2),
    View(chunk_length=500, shift=61, errors=0.005),
    View(chunk_length=300, shift=17),
    View(chunk_length=300, shift=157, **_RECODED),
    View(chunk_length=300, shift=83, errors=0.01),
    View(chunk_length=200, shift=41, **_RECODED),
    View(chunk_length=1000, shift=313),
    View(chunk_length=1000, shift=677, **_RECODED),
    View(chunk_length=2000, shift=991),
    View(chunk_length=2000, shift=1501, **_RECODED),
    View(chunk_length=4000, shift=1999, **_RECODED),
)
_FULL_BATCH_BASES: Final = 1000  # of a chunk
_RANDOM_RECORDS: Final = 400
_RANDOM_BASES: Final = 20_000  # of a record
_SAVE_EVERY: Final = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Everything that decides the result, apart from the data, the views and the weights of the other parts of the loss.

    Attributes:
        plain_share: of steps with a view whose codons are as they are.
        masked_weight: of the loss of masked tokens.
        used_share: of the steps after which the training ends, while the learning rate still falls.
        start_share: of the weights that a training began with in those that it gives. Between the two lie models that are
            better on genomes of other families than either.
    """

    steps: int = 8281
    seed: int = 3
    learning_rate: float = 1.2e-3
    weight_decay: float = 0.1
    dropout: float = 0.08
    head_dropout: float = 0.2
    dna_dropout: float = 0.3
    group_power: float = 0.6
    held_out: float = 0.05
    ema_decay: float = 0.9995
    warmup: float = 0.04
    batch_scale: float = 2.0
    plain_share: float = 0.43
    masked_weight: float = 0.3
    used_share: float = 1.0
    start_share: float = 0.0

    @property
    def last_step(self) -> int:
        return int(self.steps * self.used_share)


class Sampler:
    """Draws batches of contigs of genomes, the same ones for a step whenever it is asked.

    Those of chunks of more than 1,000 bases have fewer contigs, and about as many tokens as the others.
    """

    def __init__(self, genomes: Genomes, views: list[DeviceChunks], settings: Settings) -> None:
        groups = relatives(genomes)
        weights = genomes.weights(groups, settings.group_power)
        self._views = views
        self._samplers = [ContigSampler(view.first_chunk, weights, genomes.is_viral) for view in views]
        records = [np.repeat(np.arange(len(genomes.classes)), np.diff(view.first_chunk)) for view in views]
        self._classes = [genomes.classes[record] for record in records]
        self._groups = [groups[record] for record in records]
        longest = [int(view.sizes[:, 1].max()) for view in views]
        self._scales = [settings.batch_scale * min(1.0, _FULL_BATCH_BASES / length) for length in longest]
        self._seed = settings.seed
        is_plain = np.array([not view.recoded for view in VIEWS])
        shares = np.where(is_plain, settings.plain_share, 1 - settings.plain_share)
        shares /= np.where(is_plain, is_plain.sum(), (~is_plain).sum())
        self._shares = shares / shares.sum()

    def batches(self, first: int) -> Iterator[tuple[DeviceChunks, ContigBatch]]:
        """The batches from a step on, drawn by a few threads ahead of time."""
        with ThreadPoolExecutor(3) as pool:
            drawn = deque(pool.submit(self._draw_batch, step) for step in range(first, first + 6))
            for step in itertools.count(first + 6):
                yield drawn.popleft().result()
                drawn.append(pool.submit(self._draw_batch, step))

    def _draw_batch(self, step: int) -> tuple[DeviceChunks, ContigBatch]:
        rng = np.random.default_rng((self._seed, step))
        number = int(rng.choice(len(self._views), p=self._shares))
        chunks, contigs = self._views[number], self._samplers[number].draw(self._scales[number], rng)
        return chunks, make_batch(chunks.first_row, contigs, self._classes[number], self._groups[number])


class Trainer:
    def __init__(
        self, settings: Settings, folder: Path, device: torch.device, start: Path | None = None
    ) -> None:
        torch.manual_seed(settings.seed)
        self.settings = settings
        self.step = 0
        self.network = Network(settings.dropout, settings.head_dropout, settings.dna_dropout)
        if start is not None:
            load_exported(self.network, start)
        self.network.to(device)
        self.average = copy.deepcopy(self.network).requires_grad_(False).eval()
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
        self._path = folder / "state.pt"
        if self._path.exists():
            state = torch.load(self._path, map_location=device, weights_only=True)
            self.step = int(state["step"])
            self.network.load_state_dict(state["network"])
            self.average.load_state_dict(state["average"])
            self._optimizer.load_state_dict(state["optimizer"])
        self._in_bf16 = self.network.in_bf16()
        pairs = zip(self.network.parameters(), self._in_bf16.parameters(), strict=True)
        # The parameters in fp32 and their copies in bf16.
        self._own, self._copied = zip(*((own, copy) for own, copy in pairs if own is not copy), strict=True)
        for own in self._own:
            own.grad = torch.zeros_like(own)

    def save(self) -> None:
        state = {
            "step": self.step,
            "network": self.network.state_dict(),
            "average": self.average.state_dict(),
            "optimizer": self._optimizer.state_dict(),
        }
        temporary = self._path.with_suffix(".tmp")
        torch.save(state, temporary)
        temporary.replace(self._path)

    def mix_with_start(self, start: Path) -> None:
        """Takes `start_share` of the weights of the models that it began with into the average."""
        begun = copy.deepcopy(self.average).cpu()
        load_exported(begun, start)
        device = next(self.average.parameters()).device
        weights = [parameter.to(device) for parameter in begun.parameters()]
        with torch.no_grad():
            torch._foreach_lerp_(list(self.average.parameters()), weights, self.settings.start_share)

    def train(self, sampler: Sampler, until: float) -> None:
        """Trains to the last step, or to the given time of `time.monotonic`."""
        self._in_bf16.train()
        saved = began = time.monotonic()
        first = self.step
        for chunks, batch in sampler.batches(first):
            if self.step >= self.settings.last_step or time.monotonic() > until:
                break
            parts = self._take_step(chunks, batch)
            if self.step % 250 == 0:
                each = "  ".join(f"{name} {value.item():.3f}" for name, value in parts.items())
                rate = (self.step - first) / (time.monotonic() - began + 1e-9)
                print(f"step {self.step}  {rate:.1f} steps/s  {each}", flush=True)
            self.step += 1
            if time.monotonic() - saved > _SAVE_EVERY:
                self.save()
                saved = time.monotonic()
        self.save()

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


def tokenized(genomes: Genomes, tokenizer: Path, folder: Path, jobs: int) -> list[Chunks]:
    paths = [folder / f"view-{number}.npz" for number in range(len(VIEWS))]
    missing = [number for number, path in enumerate(paths) if not path.exists()]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        done = [pool.submit(_tokenize, genomes, number, tokenizer, paths[number]) for number in missing]
        for each in done:
            each.result()
    return [load_chunks(path) for path in paths]


def _tokenize(genomes: Genomes, number: int, tokenizer: Path, path: Path) -> None:
    save_chunks(cut(genomes, VIEWS[number], DnabertTokenizer(tokenizer), seed=number), path)


def write_models(
    trainer: Trainer,
    known: Genomes,
    held: Genomes,
    val: Genomes,
    tokenizer: Path,
    out: Path,
    started_with: dict[str, Any] | None,
) -> None:
    """Calibrates the models, fits the centroids of novelty, writes all of it, and measures it.

    `started_with` are the settings of the training whose models this one began with.
    """
    settings = trainer.settings
    network, encode = trainer.average.in_bf16(), DnabertTokenizer(tokenizer)
    calibrate(network, held, encode)
    own, _ = embed_genomes(network, known, encode)
    fit_novelty(network.head, own, *embed_genomes(network, held, encode), settings.seed)
    export(trainer.average, tokenizer, out, asdict(settings))
    report = {
        "start": started_with,
        "settings": asdict(settings),
        "views": [asdict(view) for view in VIEWS],
        "figures": {
            "held out": evaluate(network, held, encode),
            "val": evaluate(network, val, encode),
        },
    }
    print(json.dumps(report["figures"], indent=1))
    (out / "training.json").write_text(json.dumps(report, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train", type=Path, nargs="+", required=True)
    for name in ("val", "table", "work", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--start", type=Path, help="models to begin with, a folder as --out has them")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--jobs", type=int, default=13, help="processes that cut and tokenize")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop training after so many")
    for name, value in asdict(Settings()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    arguments = vars(parser.parse_args())
    settings = Settings(**{name: arguments[name] for name in asdict(Settings())})
    began = time.monotonic()

    work, device = arguments["work"], torch.device(arguments["device"])
    # Its attention compiles a plan for every new shape, and every batch has new ones.
    torch.backends.cuda.enable_cudnn_sdp(False)
    work.mkdir(parents=True, exist_ok=True)
    table, start = arguments["table"], arguments["start"]
    started_with = json.loads((start / "training.json").read_text())["settings"] if start else None
    known, held = Genomes.load(arguments["train"], table).split(settings.held_out, settings.seed)
    train = known.with_random_dna(_RANDOM_RECORDS, _RANDOM_BASES, settings.seed)
    tokenizer = work / "tokenizer.json"
    if start:
        shutil.copyfile(start / TOKENIZER, tokenizer)
    elif not tokenizer.exists():
        weights = known.weights(relatives(known), settings.group_power)
        rng = np.random.default_rng(settings.seed)
        train_vocabulary(known, weights, DNABERT_SPEC.vocab_size, tokenizer, rng)
    views = [
        DeviceChunks.build(chunks, len(train.classes), device)
        for chunks in tokenized(train, tokenizer, work, arguments["jobs"])
    ]
    print(f"{time.monotonic() - began:.0f} s to read and tokenize", flush=True)
    trainer = Trainer(settings, work, device, start)
    trainer.train(Sampler(train, views, settings), began + arguments["seconds"])
    if trainer.step < settings.last_step:
        print(
            f"{trainer.step} of {settings.last_step} steps are done: run the same command again", flush=True
        )
        return
    if start:
        trainer.mix_with_start(start)
    val = Genomes.load([arguments["val"]], table)
    write_models(trainer, known, held, val, tokenizer, arguments["out"], started_with)
    print(f"{time.monotonic() - began:.0f} s: the models are in {arguments['out']}", flush=True)


if __name__ == "__main__":
    main()
