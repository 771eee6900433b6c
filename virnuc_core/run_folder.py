"""The names inside the folder of a run.

A run that is reprocessed has a folder `next` in its own, of the same form: the run with the new settings, up to
wherever it has come. It reads the frame store of the run around it through a link, and that link is what makes it
one. When all of it is whole it is renamed `incoming`, and its files are moved over those of the run around it.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

EMBED_SUFFIX: Final = ".run"
_SHARED_FRAMES: Final = "../frames"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The names inside a run's folder; nothing else in the product spells them."""

    root: Path

    @property
    def plan(self) -> Path:
        """The plan, `plan.json`."""
        return self.root / "plan.json"

    @property
    def frames(self) -> Path:
        """The frame store."""
        return self.root / "frames"

    @property
    def shards(self) -> Path:
        """The folder of finished shards."""
        return self.root / "shards"

    def shard(self, index: int) -> Path:
        """The file of one shard."""
        return self.shards / f"shard_{index:05d}.h5"

    @property
    def lanes(self) -> Path:
        """The folder of journals: what lanes told while they worked."""
        return self.root / "lanes"

    def lane_journal(self, name: str) -> Path:
        """The journal of one lane."""
        return self.lanes / f"{name}.jsonl"

    @property
    def embeddings(self) -> Path:
        """Vectors and scores of every frame, in input order."""
        return self.root / "embeddings.h5"

    @property
    def predictions(self) -> Path:
        """One row a chunk."""
        return self.root / "predictions.tsv"

    @property
    def contigs(self) -> Path:
        """One row a contig."""
        return self.root / "contigs.tsv"

    @property
    def prediction_results(self) -> Path:
        """One row a frame, in VirNucPro's format."""
        return self.root / "prediction_results.txt"

    @property
    def highest_score(self) -> Path:
        """One row a scored chunk, in VirNucPro's format."""
        return self.root / "prediction_results_highestscore.csv"

    @property
    def rejected(self) -> Path:
        """The records that could not be used."""
        return self.root / "rejected.tsv"

    @property
    def regions(self) -> Path:
        """One row a viral region."""
        return self.root / "regions.tsv"

    @property
    def regions_bed(self) -> Path:
        """The same as BED."""
        return self.root / "regions.bed"

    @property
    def regions_gff3(self) -> Path:
        """The same as GFF3."""
        return self.root / "regions.gff3"

    @property
    def regions_parquet(self) -> Path:
        """The same as Parquet."""
        return self.root / "regions.parquet"

    @property
    def regions_fasta(self) -> Path:
        """The bases of the regions, as FASTA."""
        return self.root / "regions.fa.gz"

    @property
    def viral_contigs(self) -> Path:
        """The contigs that are called virus, as FASTA."""
        return self.root / "viral_contigs.fa.gz"

    @property
    def predictions_parquet(self) -> Path:
        """One row a chunk, as Parquet."""
        return self.root / "predictions.parquet"

    @property
    def contigs_parquet(self) -> Path:
        """One row a contig, as Parquet."""
        return self.root / "contigs.parquet"

    @property
    def report(self) -> Path:
        """What was run, how fast, and with what, `run.json`."""
        return self.root / "run.json"

    @property
    def page(self) -> Path:
        """The report that a person opens in a browser, `report.html`."""
        return self.root / "report.html"

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
    def sequences(self) -> Path:
        """The folder of what was taken out of GenBank files, as FASTA with tables of labels."""
        return self.root / "sequences"

    @property
    def training(self) -> Path:
        """The folder of what the training of a head leaves beside the head."""
        return self.root / "training"

    @property
    def next(self) -> "RunFolder":
        """The run that this one is being reprocessed to, while it is not whole."""
        return RunFolder(self.root / "next")

    @property
    def incoming(self) -> "RunFolder":
        """The same when it is whole, while its files are moved over those of this run."""
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
