"""The names inside the folder of a run.

A run that is reprocessed has a folder `next` in its own, of the same form: the run with the new settings, as far as it
has come. It reads the frame store of the run around it through a link, and that link is what makes it one. When it is
complete it is renamed `incoming`, and its files are moved over those of the run around it.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

EMBED_SUFFIX: Final = ".run"
_SHARED_FRAMES: Final = "../frames"


class _Inside:
    """A path inside the run's folder, as an attribute."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: "RunFolder", owner: type) -> Path:
        return folder.root / self._name


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The names inside a run's folder; nothing else in the product spells them."""

    root: Path

    plan = _Inside("plan.json")
    frames = _Inside("frames")  # the frame store
    shards = _Inside("shards")  # folder of finished shards
    lanes = _Inside("lanes")  # folder of journals
    embeddings = _Inside("embeddings.h5")  # vectors and scores of every frame, in input order
    predictions = _Inside("predictions.tsv")  # a row a chunk
    predictions_parquet = _Inside("predictions.parquet")
    contigs = _Inside("contigs.tsv")
    contigs_parquet = _Inside("contigs.parquet")
    prediction_results = _Inside("prediction_results.txt")  # a row a frame, in VirNucPro's format
    highest_score = _Inside(
        "prediction_results_highestscore.csv"
    )  # a row a scored chunk, in VirNucPro's format
    rejected = _Inside("rejected.tsv")  # records that could not be used
    regions = _Inside("regions.tsv")  # a row a viral region
    regions_bed = _Inside("regions.bed")
    regions_gff3 = _Inside("regions.gff3")
    regions_parquet = _Inside("regions.parquet")
    regions_fasta = _Inside("regions.fa.gz")
    viral_contigs = _Inside("viral_contigs.fa.gz")
    report = _Inside("run.json")  # what was run, how fast, and with what
    page = _Inside("report.html")
    sequences = _Inside("sequences")  # folder of FASTA and labels taken out of GenBank files
    training = _Inside("training")  # folder of what the training of a head leaves beside the head

    def shard(self, index: int) -> Path:
        """The file of one shard."""
        return self.shards / f"shard_{index:05d}.h5"

    def lane_journal(self, name: str) -> Path:
        """The journal of one lane."""
        return self.lanes / f"{name}.jsonl"

    @property
    def results(self) -> tuple[Path, ...]:
        """What a finished predict run leaves for its user, the report of it last."""
        tables = (self.predictions, self.contigs, self.prediction_results, self.highest_score)
        regions = (
            self.regions,
            self.regions_bed,
            self.regions_gff3,
            self.regions_parquet,
            self.regions_fasta,
        )
        others = (self.viral_contigs, self.predictions_parquet, self.contigs_parquet)
        return (*tables, *regions, *others, self.embeddings, self.rejected, self.page, self.report)

    @property
    def next(self) -> "RunFolder":
        """The run that this one is being reprocessed to, while it is incomplete."""
        return RunFolder(self.root / "next")

    @property
    def incoming(self) -> "RunFolder":
        """The same when it is complete, while its files are moved over those of this run."""
        return RunFolder(self.root / "incoming")

    @property
    def previous(self) -> "RunFolder | None":
        """The run that is being reprocessed to this one; None for any other run."""
        is_next = self.frames.is_symlink() and os.readlink(self.frames) == _SHARED_FRAMES
        return RunFolder(self.root.parent) if is_next else None

    def link_frames(self) -> None:
        """Makes this the `next` of the run whose folder it lies in."""
        self.frames.symlink_to(_SHARED_FRAMES, target_is_directory=True)

    @property
    def embedded(self) -> Path:
        """The file that an embed run, or the training of a head, makes: its folder is `FILE.run` beside it."""
        return self.root.with_name(self.root.name.removesuffix(EMBED_SUFFIX))
