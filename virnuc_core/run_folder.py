"""Names inside a run folder."""

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from virnuc_core.errors import HostError

EMBED_SUFFIX: Final = ".run"
EVALUATED_RUN: Final = "run"  # folder of the predict run that is evaluated
EVALUATION_FILES: Final = ("evaluation.json", "evaluation.md", "roc.png", "reliability.png")


class _Inside:
    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, folder: "RunFolder", owner: type) -> Path:
        return folder.root / self.name


def run_folder_of(out: str | Path) -> Path:
    """The run folder beside an embeddings file or a head."""
    return Path(f"{out}{EMBED_SUFFIX}")


def card_of(head: Path) -> Path:
    """Path of a head's card."""
    return head.with_suffix(".md")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Names inside a run folder, defined nowhere else."""

    root: Path

    plan = _Inside("plan.json")
    frames = _Inside("frames")  # the frame store
    shards = _Inside("shards")  # folder of finished shards
    lanes = _Inside("lanes")  # folder of journals and logs
    token = _Inside(
        "lanes/token"
    )  # made by the run, by which its lanes recognise that they see the same folder
    embeddings = _Inside("embeddings.h5")  # vectors and scores of every frame, in input order
    summary = _Inside("virus_summary.tsv")  # one row per viral contig or provirus
    summary_parquet = _Inside("virus_summary.parquet")
    virus_fasta = _Inside("virus.fa.gz")
    virus_bed = _Inside("virus.bed")
    virus_gff3 = _Inside("virus.gff3")
    contigs = _Inside("contigs.tsv")
    contigs_parquet = _Inside("contigs.parquet")
    chunks = _Inside("chunks.tsv")
    chunks_parquet = _Inside("chunks.parquet")
    prediction_results = _Inside("prediction_results.txt")  # one row per frame, in VirNucPro's format
    highest_score = _Inside(
        "prediction_results_highestscore.csv"
    )  # one row per scored chunk, in VirNucPro's format
    rejected = _Inside("rejected.tsv")  # unusable records
    report = _Inside("run.json")  # settings, versions, counts and throughput
    page = _Inside("report.html")
    multiqc = _Inside("virnuc_mqc.json")  # the run's row in MultiQC's report
    sequences = _Inside("sequences")  # folder of FASTA and labels extracted from GenBank files
    training = _Inside("training")  # folder of training outputs other than the head

    def shard(self, index: int) -> Path:
        """File of a shard."""
        return self.shards / f"shard_{index:05d}.h5"

    def lane_journal(self, name: str) -> Path:
        """Journal of a lane."""
        return self.lanes / f"{name}.jsonl"

    def lane_log(self, name: str) -> Path:
        """Log of the lane with this journal."""
        return self.lanes / f"{name}.log"

    def require_token(self, token: str) -> None:
        """Raises HostError unless this host sees the folder of the run that has this token."""
        try:
            found = self.token.read_text()
        except OSError as error:
            found = ""
            reason = error.strerror or str(error)
        else:
            reason = "it belongs to another run"
        if found != token:
            raise HostError(
                f"{socket.gethostname()} does not see the run in {self.root} ({self.token.name}: {reason}): mount the shared "
                "folder there under the same path, unless the run was started over."
            )

    @property
    def results(self) -> tuple[Path, ...]:
        """User-facing outputs of a finished predict run, the report last."""
        viral = (self.summary, self.summary_parquet, self.virus_fasta, self.virus_bed, self.virus_gff3)
        tables = (self.contigs, self.contigs_parquet, self.chunks, self.chunks_parquet)
        as_virnucpro = (self.prediction_results, self.highest_score)
        return (*viral, *tables, *as_virnucpro, self.embeddings, self.rejected, *self.timed)

    @property
    def timed(self) -> tuple[Path, ...]:
        """Those of the results with times and speeds, whose bytes differ between equal runs; the report last."""
        return (self.multiqc, self.page, self.report)

    @property
    def embedded(self) -> Path:
        """Output file of an embed or training run, whose folder is `FILE.run` beside it."""
        return self.root.with_name(self.root.name.removesuffix(EMBED_SUFFIX))


# Files and folders at the top of a run folder.
OWN_NAMES: Final = frozenset(
    name.partition("/")[0]
    for name in (inside.name for inside in vars(RunFolder).values() if isinstance(inside, _Inside))
)
