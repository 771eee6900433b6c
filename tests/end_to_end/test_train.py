"""`virnuc train` and `virnuc evaluate`: from labelled sequences to a head, its metrics and its calls."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from mlflow import MlflowClient
from sklearn.metrics import accuracy_score, average_precision_score, roc_auc_score

from tests.end_to_end.conftest import Checkpoints, CommandLine, random_dna, rows
from tests.end_to_end.test_predict import is_empty_group, wait_until
from tests.unit.training.test_labels import made_record, write_genbank
from virnuc_cli.main import main
from virnuc_core.env_config import env
from virnuc_core.inference import sharding
from virnuc_core.models.classifier import load_classifier

pytestmark = pytest.mark.usefixtures("fast_lanes")

FAST = ("--epochs", "3", "--members", "1")


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "MAX_SHARD_ROWS", 64)


def write_class(path: Path, gc: float, count: int, seed: int) -> Path:
    """Records of one base composition, by which the test models can separate the classes."""
    draws = random.Random(seed)
    with path.open("w") as file:
        for number in range(count):
            length = draws.choice([150, 300, 900])
            bases = "".join(draws.choices("ACGT", [1 - gc, gc, gc, 1 - gc], k=length))
            file.write(f">{path.stem}_{number}\n{bases}\n")
    return path


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("labelled")
    return write_class(folder / "viral.fa", 0.3, 12, 1), write_class(folder / "other.fa", 0.7, 20, 2)


def models(checkpoints: Checkpoints) -> tuple[str, ...]:
    """Only the models, with chunks short enough to have stop-free frames."""
    flags = dict(zip(checkpoints.flags[::2], checkpoints.flags[1::2], strict=True))
    del flags["--head"]
    return (*(part for pair in flags.items() for part in pair), "--chunk-length", "60")


def classes(labelled: Sequence[Path]) -> tuple[str, ...]:
    viral, other = labelled
    return ("--viral", str(viral), "--other", str(other))


def content(head: Path) -> dict[str, bytes]:
    """The head and all files about it."""
    names = ("figures.json", "records.tsv", "roc.png", "reliability.png")
    about = {name: (Path(f"{head}.run") / "training" / name).read_bytes() for name in names}
    return about | {"head": head.read_bytes(), "card": head.with_suffix(".md").read_bytes()}


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory,
    prefect_server: None,
    checkpoints: Checkpoints,
    labelled: tuple[Path, Path],
) -> Path:
    """A head from an uninterrupted run."""
    head = tmp_path_factory.mktemp("trained") / "made.safetensors"
    assert main(["train", *classes(labelled), "--out", str(head), *models(checkpoints), *FAST]) == 0
    return head


def test_a_head_comes_with_its_card_its_figures_and_a_registered_model(trained: Path) -> None:
    run = Path(f"{trained}.run")
    assert load_classifier(trained).in_features == 32 + 24
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
        "| temperature | ",
        auroc,
    ):
        assert said in card

    client = MlflowClient(f"sqlite:///{env().home / 'mlflow.db'}")
    model = client.get_registered_model("virnuc-head-dnabert_random-esm2_random-60bp")
    versions = client.search_model_versions(f"name='{model.name}'")
    (version,) = [version for version in versions if version.run_id == report["links"]["mlflow_run_id"]]
    assert auroc in version.description
    assert len(version.description) < 5000  # which is what MLflow takes
    assert version.tags["sha256"] == hashlib.sha256(trained.read_bytes()).hexdigest()
    tracked = client.get_run(str(version.run_id))
    assert tracked.data.metrics["test_chunks_auroc"] == figures["test"]["chunks"]["auroc"]
    assert [file.path for file in client.list_artifacts(str(version.run_id), "model")] == [
        f"model/{trained.name}"
    ]


def test_the_same_command_computes_nothing_and_gives_the_same_files(
    virnuc_flows: CommandLine, checkpoints: Checkpoints, labelled: tuple[Path, Path], trained: Path
) -> None:
    before = content(trained)
    trained.unlink()
    result = virnuc_flows(
        "train", *classes(labelled), "--out", trained, *models(checkpoints), *FAST, "--json"
    )
    shards = json.loads(result.out)["shards"]
    assert shards["computed"] == 0 < shards["total"]
    assert content(trained) == before
    fsck = virnuc_flows("fsck", f"{trained}.run")
    assert fsck.code == 0, fsck.out


def test_calls_of_the_records_held_out_are_as_good_as_the_card_says(
    virnuc_flows: CommandLine,
    checkpoints: Checkpoints,
    labelled: tuple[Path, Path],
    trained: Path,
    tmp_path: Path,
) -> None:
    training = Path(f"{trained}.run") / "training"
    sequences = {}
    for path in labelled:
        lines = path.read_text().splitlines()
        sequences |= {name[1:]: bases for name, bases in zip(lines[::2], lines[1::2], strict=True)}
    test = [row[1] for row in rows(training / "records.tsv") if row[4] == "test"]
    held_out, table = tmp_path / "held_out.fa", tmp_path / "labels.tsv"
    held_out.write_text("".join(f">{name}\n{sequences[name]}\n" for name in test))
    table.write_text("record\tclass\n" + "".join(f"{name}\t{name.split('_')[0]}\n" for name in test))
    out = tmp_path / "evaluated"
    flags = ("--labels", table, "--head", trained, "--out", out, *models(checkpoints))
    assert virnuc_flows("evaluate", held_out, *flags).code == 0
    figures = json.loads((out / "evaluation.json").read_text())
    for level, expected in json.loads((training / "figures.json").read_text())["test"].items():
        assert figures[level]["confusion"] == expected["confusion"]
        assert figures[level]["count"] == expected["count"]
        assert figures[level]["auroc"] == pytest.approx(expected["auroc"], abs=1e-3)
        assert figures[level]["ece"] == pytest.approx(expected["ece"], abs=1e-4)


def test_figures_of_an_evaluation_are_those_of_its_tables(
    virnuc_flows: CommandLine, checkpoints: Checkpoints, labelled: tuple[Path, Path], tmp_path: Path
) -> None:
    out = tmp_path / "evaluated"
    flags = (*models(checkpoints), "--head", checkpoints.head)
    result = virnuc_flows("evaluate", *classes(labelled), "--out", out, *flags, "--json")
    assert result.code == 0, result.err
    figures = json.loads((out / "evaluation.json").read_text())
    assert json.loads(result.out) == figures
    scored = [row for row in rows(out / "run" / "predictions.tsv")[1:] if row[7] == "scored"]
    truth = np.array([row[0].startswith("viral") for row in scored])
    p, called = np.array([float(row[5]) for row in scored]), np.array([row[6] == "virus" for row in scored])
    chunks = figures["chunks"]
    assert chunks["scored"] == len(scored) < chunks["count"]
    assert chunks["auroc"] == pytest.approx(roc_auc_score(truth, p), abs=1e-6)
    assert chunks["auprc"] == pytest.approx(average_precision_score(truth, p), abs=1e-6)
    assert chunks["accuracy"] == pytest.approx(accuracy_score(truth, called), abs=1e-6)
    contigs = [row for row in rows(out / "run" / "contigs.tsv")[1:] if row[8] != "unscored"]
    right = [(row[8] == "virus") == row[0].startswith("viral") for row in contigs]
    assert figures["contigs"]["accuracy"] == pytest.approx(sum(right) / len(right), abs=1e-6)
    for name in ("roc.png", "reliability.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    assert "AUROC" in (out / "evaluation.md").read_text()


@pytest.mark.slow
def test_a_training_that_was_killed_goes_on_with_the_shards_that_are_there(
    virnuc_flows: CommandLine, checkpoints: Checkpoints, labelled: tuple[Path, Path], tmp_path: Path
) -> None:
    head = tmp_path / "head.safetensors"
    flags = (*classes(labelled), *models(checkpoints), *FAST, "--shard-seconds", "0.001")
    command = [sys.executable, "-m", "virnuc_cli", "train", "--out", str(head), *map(str, flags)]
    shards = Path(f"{head}.run") / "shards"
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True) as process:
        wait_until(lambda: len(list(shards.glob("shard_*.h5"))) > 2, seconds=120)
        os.killpg(process.pid, signal.SIGKILL)
    wait_until(lambda: is_empty_group(process.pid), seconds=10)
    assert not head.exists()
    left = {path.name: path.stat().st_mtime_ns for path in shards.glob("shard_*.h5")}
    result = virnuc_flows("train", "--out", head, *flags, "--json")
    assert result.code == 0, result.err
    counts = json.loads(result.out)["shards"]
    assert counts["computed"] + len(left) == counts["total"]
    assert {name: (shards / name).stat().st_mtime_ns for name in left} == left
    assert load_classifier(head).in_features == 32 + 24


def test_labels_from_genbank(virnuc_flows: CommandLine, checkpoints: Checkpoints, tmp_path: Path) -> None:
    lineages = {"PHAGE": ["Viruses"], "HOST": ["Bacteria"]}
    records = [made_record(f"{name}{i}", lineages[name]) for name in lineages for i in range(6)]
    genbank = write_genbank(tmp_path / "genomes.gb", *records)
    head = tmp_path / "head.safetensors"
    result = virnuc_flows("train", "--genbank", genbank, "--out", head, *models(checkpoints), *FAST)
    assert result.code == 0, result.err
    assert "GenBank: 12 records; 0 left out" in (tmp_path / "head.md").read_text()


def test_what_cannot_be_trained_on(
    virnuc_flows: CommandLine, checkpoints: Checkpoints, labelled: tuple[Path, Path], tmp_path: Path
) -> None:
    viral, other = labelled
    few, closed, same = tmp_path / "few.fa", tmp_path / "closed.fa", tmp_path / "same.fa"
    few.write_text(f">a\n{random_dna(300, 1)}\n>b\n{random_dna(300, 2)}\n")
    closed.write_text("".join(f">c{i}\n{'TTAATTAACTAGCTAG' * (10 + i)}\n" for i in range(9)))
    closed_too = tmp_path / "closed_too.fa"
    closed_too.write_text(f">d\n{'TTAATTAACTAGCTAG' * 40}\n")
    same.write_text(f">x\n{viral.read_text().splitlines()[1]}\n")
    damaged = write_genbank(tmp_path / "damaged.gb", made_record("PHAGE", ["Viruses"]))
    damaged.write_text(damaged.read_text()[:-300])
    out = tmp_path / "head.safetensors"
    for files, code, message in (
        (("--viral", few, "--other", other), 3, "2 groups of related viral records"),
        (("--viral", closed, "--other", few), 3, "groups of related viral records"),
        (("--viral", closed, "--other", closed_too), 3, "no record has a stop-free frame"),
        (("--viral", viral, "--other", other, same), 3, "the same sequence is viral and is not"),
        (("--genbank", damaged), 3, "damaged GenBank"),
        (("--viral", closed, "--other", tmp_path / "none.fa"), 3, "does not exist"),
        ((), 2, "no sequences are given"),
    ):
        result = virnuc_flows("train", *files, "--out", out, *models(checkpoints), "--force")
        assert result.code == code, result.err
        assert message in result.err
        assert not out.exists()
    named = virnuc_flows("train", *classes(labelled), "--out", tmp_path / "head.pth", *models(checkpoints))
    assert named.code == 2
    assert "must end in .safetensors" in named.err
    wide = ("--head", "tiny-500", "--out", tmp_path / "evaluated", *models(checkpoints))
    result = virnuc_flows("evaluate", *classes(labelled), *wide)
    assert result.code == 4
    assert "512 features" in result.err


def test_a_head_for_dna_alone_scores_the_chunks_that_have_no_open_frame(
    virnuc_flows: CommandLine,
    checkpoints: Checkpoints,
    labelled: tuple[Path, Path],
    tmp_path: Path,
) -> None:
    # Short chunks of this composition always have a stop-free frame.
    flags = (*models(checkpoints)[:-1], "300")
    dna_head = tmp_path / "dna_alone.safetensors"
    chosen = ("--dna-alone", "--out", dna_head, *flags, *FAST)
    result = virnuc_flows("train", *classes(labelled), *chosen)
    assert result.code == 0, result.err
    assert load_classifier(dna_head).in_features == 24
    report = json.loads((Path(f"{dna_head}.run") / "run.json").read_text())
    assert report["rows"] == "closed_chunks"
    assert [model["family"] for model in report["models"]] == ["dnabert_s"]
    assert "--dna-head dna_alone.safetensors" in dna_head.with_suffix(".md").read_text()

    heads = ("--head", checkpoints.head, "--dna-head", dna_head)
    out = tmp_path / "evaluated"
    evaluation = virnuc_flows("evaluate", *classes(labelled), "--out", out, *heads, *flags)
    assert evaluation.code == 0, evaluation.err
    figures = json.loads((out / "evaluation.json").read_text())
    header, *chunks = rows(out / "run" / "predictions.tsv")
    status = header.index("status")
    closed = [row for row in chunks if row[status] == "dna_alone"]
    assert len(closed) == report["work"]["frames"] > 0
    assert figures["dna_alone_chunks"]["count"] == figures["dna_alone_chunks"]["scored"] == len(closed)
    assert figures["chunks"]["count"] == len(chunks) - len(closed)
    assert figures["dna_alone_chunks"]["auroc"] > 0.6
    page = (out / "run" / "report.html").read_text()
    assert f'"dna_alone_chunks":{len(closed)}' in page.replace(": ", ":")
