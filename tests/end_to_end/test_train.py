"""`virnuc train` and `virnuc evaluate`: from labelled sequences to a head, its metrics and its calls."""

import json
from collections import Counter
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tests.end_to_end.conftest import (
    CommandLine,
    random_dna,
    rows,
    write_class,
)
from tests.made_models import WIDTH, MadeModels
from tests.unit.training.test_labels import made_record, write_genbank
from virnuc_cli.main import main
from virnuc_core.env_config import env
from virnuc_core.inference import sharding
from virnuc_core.models.catalogue import NOT_CALIBRATED, HeadPurpose, read_purpose
from virnuc_core.models.heads import ContigHead, load_head
from virnuc_core.results.inspect import inspect_path

pytestmark = pytest.mark.usefixtures("prefect_server")

FAST = ("--epochs", "3")
PLOTS = ("roc.png", "reliability.png")


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "MAX_SHARD_ROWS", 64)


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Flags of a file of each class."""
    folder = tmp_path_factory.mktemp("labelled")
    viral = write_class(folder / "viral.fa", 0.3, 12, 1)
    other = write_class(folder / "other.fa", 0.7, 20, 2)
    return "--viral", str(viral), "--other", str(other)


@pytest.fixture(scope="module")
def chosen(models: MadeModels) -> tuple[str, ...]:
    """Flags of the models without the head, for chunks short enough to have open reading frames."""
    encoders = ("--esm-model", str(models.esm2), "--dnabert-model", str(models.dnabert))
    return (*encoders, "--devices", "cpu", "--chunk-length", "60")


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory,
    prefect_server: None,
    classes: tuple[str, ...],
    chosen: tuple[str, ...],
) -> Path:
    """A head from an uninterrupted run."""
    head = tmp_path_factory.mktemp("trained") / "made.safetensors"
    assert main(["train", *classes, "--out", str(head), *chosen, *FAST]) == 0
    return head


def content(head: Path) -> dict[str, bytes]:
    """The head and all files about it."""
    training = Path(f"{head}.run") / "training"
    about = [training / name for name in ("figures.json", "records.tsv", *PLOTS)]
    return {path.name: path.read_bytes() for path in (head, head.with_suffix(".md"), *about)}


def test_a_head_comes_with_its_card_and_its_figures(trained: Path) -> None:
    run = Path(f"{trained}.run")
    assert isinstance(loaded := load_head(trained), ContigHead)
    assert (loaded.widths, loaded.spec.classes) == ((WIDTH, WIDTH), ("viral", "other"))
    assert read_purpose(trained) == HeadPurpose(chunk_length=60, frames="longest", calibrated=False)
    figures = json.loads((run / "training" / "figures.json").read_text())
    assert {row[4] for row in rows(run / "training" / "records.tsv")[1:]} == {"train", "validation", "test"}
    report = json.loads((run / "run.json").read_text())
    card = trained.with_suffix(".md").read_text()
    records = Counter((row[2], row[4]) for row in rows(run / "training" / "records.tsv")[1:])
    viral = [records["viral", part] for part in ("train", "validation", "test")]
    chunks, contigs = (figures["test"][level] for level in ("chunks", "contigs"))
    auroc = f"| AUROC | {chunks['auroc']:.3f} | {contigs['auroc']:.3f} |"
    for said in (
        *(model["weights_fingerprint"] for model in report["models"]),
        *(file["sha256"] for file in report["inputs"]),
        f"| viral | {' | '.join(f'{number} ({number})' for number in viral)} | ",
        "| epochs | 3 |",
        "| temperature | not calibrated |",
        "Groups of validation records: 1 viral and 2 other, and at least 10 of each are needed.",
        *(f"> **Warning:** {warning}" for warning in report["notes"]),
        "of 60 bp chunks",
        auroc,
    ):
        assert said in card

    assert figures["loss"]["contig"] > 0
    assert len(report["notes"]) == 2
    [warning] = [line for line in inspect_path(trained).summary.splitlines() if "warning" in line]
    assert NOT_CALIBRATED in warning
    assert trained.stat().st_mode & 0o777 == (run / "run.json").stat().st_mode & 0o777

    assert len(loaded.centroids)
    assert 0 < loaded.novelty_limit < 2

    client = MlflowClient(f"sqlite:///{env().home / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("virnuc")
    (tracked,) = client.search_runs([experiment.experiment_id], f"tags.`virnuc.run` = '{report['id']}'")
    assert tracked.data.params["frames"] == "longest"
    assert tracked.data.metrics["test_chunks_auroc"] == figures["test"]["chunks"]["auroc"]
    losses = client.get_metric_history(tracked.info.run_id, "train_loss")
    assert [loss.step for loss in losses] == [1, 2, 3]


def test_the_same_command_computes_nothing_and_gives_the_same_files(
    virnuc: CommandLine, classes: tuple[str, ...], chosen: tuple[str, ...], trained: Path
) -> None:
    before = content(trained)
    trained.unlink()
    result = virnuc.done("train", *classes, "--out", trained, *chosen, *FAST, "--json")
    assert result.document["shards"]["computed"] == 0 < result.document["shards"]["total"]
    assert content(trained) == before
    virnuc.done("inspect", f"{trained}.run")


def test_an_evaluation_of_the_records_held_out_gives_the_figures_of_the_card_and_of_its_tables(
    virnuc: CommandLine, classes: tuple[str, ...], chosen: tuple[str, ...], trained: Path, tmp_path: Path
) -> None:
    training = Path(f"{trained}.run") / "training"
    lines = [line for path in classes[1::2] for line in Path(path).read_text().splitlines()]
    sequences = {name[1:]: bases for name, bases in zip(lines[::2], lines[1::2], strict=True)}
    test = [row[1] for row in rows(training / "records.tsv") if row[4] == "test"]
    held_out, table, out = (tmp_path / name for name in ("held_out.fa", "labels.tsv", "evaluated"))
    held_out.write_text("".join(f">{name}\n{sequences[name]}\n" for name in test))
    table.write_text("seq_name\tclass\n" + "".join(f"{name}\t{name.split('_')[0]}\n" for name in test))
    flags = ("--labels", table, "--head", trained, "--out", out, *chosen)
    figures = virnuc.done("evaluate", held_out, *flags, "--json").document
    assert json.loads((out / "evaluation.json").read_text()) == figures
    for level, expected in json.loads((training / "figures.json").read_text())["test"].items():
        assert figures[level]["confusion"] == expected["confusion"]
        assert figures[level]["count"] == expected["count"]
        assert figures[level]["auroc"] == pytest.approx(expected["auroc"], abs=1e-3)
        assert figures[level]["ece"] == pytest.approx(expected["ece"], abs=1e-4)

    assert all((out / name).read_bytes().startswith(b"\x89PNG") for name in PLOTS)
    assert "AUROC" in (out / "evaluation.md").read_text()


def test_labels_from_genbank(virnuc: CommandLine, chosen: tuple[str, ...], tmp_path: Path) -> None:
    lineages = {"PHAGE": ["Viruses"], "HOST": ["Bacteria"]}
    records = [made_record(f"{name}{i}", lineages[name]) for name in lineages for i in range(6)]
    genbank = write_genbank(tmp_path / "genomes.gb", *records)
    virnuc.done("train", "--genbank", genbank, "--out", tmp_path / "head.safetensors", *chosen, *FAST)
    assert "GenBank: 12 records; 0 skipped" in (tmp_path / "head.md").read_text()


def test_what_cannot_be_trained_or_evaluated(
    virnuc: CommandLine, classes: tuple[str, ...], chosen: tuple[str, ...], tmp_path: Path
) -> None:
    few, closed, closed_too, same = (
        tmp_path / f"{name}.fa" for name in ("few", "closed", "closed_too", "same")
    )
    few.write_text(f">a\n{random_dna(300, 1)}\n>b\n{random_dna(300, 2)}\n")
    closed.write_text("".join(f">c{i}\n{'TTAATTAACTAGCTAG' * (10 + i)}\n" for i in range(9)))
    closed_too.write_text(f">d\n{'TTAATTAACTAGCTAG' * 40}\n")
    same.write_text(f">x\n{Path(classes[1]).read_text().splitlines()[1]}\n")
    out = tmp_path / "head.safetensors"
    for files, code, message in (
        (("--viral", few, *classes[2:]), 3, "2 groups of related, usable viral records"),
        (("--viral", closed, "--other", closed_too), 3, "no record has an ORF of 10 codons"),
        ((*classes, same), 3, "the same sequence is labelled viral and nonviral"),
        ((), 2, "no sequences given"),
    ):
        virnuc.refused(code, message, "train", *files, "--out", out, *chosen, "--force")
        assert not out.exists()
    named = ("--out", tmp_path / "head.pth")
    virnuc.refused(2, "must end in .safetensors", "train", *classes, *named, *chosen)
    wide = ("--head", "tiny", "--out", tmp_path / "evaluated")
    virnuc.refused(4, "embeddings of width 256 and 256", "evaluate", *classes, *wide, *chosen)


def test_a_head_for_the_longest_orfs_scores_every_chunk_and_no_open_frames(
    virnuc: CommandLine, classes: tuple[str, ...], chosen: tuple[str, ...], tmp_path: Path
) -> None:
    # At this length many chunks have a stop codon in every frame.
    flags = (*chosen[:-1], "300")
    head, out = tmp_path / "head.safetensors", tmp_path / "evaluated"
    virnuc.done("train", *classes, "--out", head, *flags, *FAST)
    virnuc.done("evaluate", *classes, "--out", out, "--head", head, *flags)
    figures = json.loads((out / "evaluation.json").read_text())
    assert figures["frames"] == "longest"
    assert figures["chunks"]["scored"] == figures["chunks"]["count"]
    assert {row[6] for row in rows(out / "run" / "chunks.tsv")[1:]} == {"scored"}
    contigs = rows(out / "run" / "contigs.tsv")
    assert contigs[0][4:] == ["virus_score", "call", "confidence", "class", "novelty"]
    assert all(0 <= float(row[8]) <= 2 for row in contigs[1:])
    called = [(row[0].startswith("viral"), float(row[4]) >= 0.5) for row in contigs[1:]]
    assert sum(is_viral == is_called for is_viral, is_called in called) > 0.9 * len(called)
    assert {(row[5], row[7]) for row in contigs[1:]} <= {("virus", "viral"), ("nonviral", "other")}
    for level in ("chunks", "contigs"):
        assert (
            figures[level]["confusion"]["viral_called_virus"]
            > figures[level]["confusion"]["viral_called_other"]
        )
    head = tmp_path / "open.safetensors"
    again = ("train", *classes, "--out", head, *chosen, *FAST)
    virnuc.done(*again, "--frames", "open")
    assert read_purpose(head) == HeadPurpose(chunk_length=60, frames="open", calibrated=False)
    virnuc.refused(4, "frames: was open, now longest", *again)
