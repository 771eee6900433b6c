"""`virnuc train` and `virnuc evaluate`: from labelled sequences to a head, its figures, and its calls."""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from mlflow import MlflowClient
from sklearn.metrics import accuracy_score, average_precision_score, roc_auc_score

from tests.end_to_end.conftest import Checkpoints, CommandLine, random_dna, rows
from tests.end_to_end.test_predict import is_empty_group, wait_until
from tests.unit.training.test_genbank import made_record, write_genbank
from virnuc_core import env_config
from virnuc_core.inference import sharding
from virnuc_core.models.classifier import load_classifier

pytestmark = pytest.mark.xdist_group("flows")

FAST = ("--epochs", "3", "--members", "1")


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "MAX_SHARD_ROWS", 64)


def write_class(path: Path, gc: float, count: int, seed: int) -> Path:
    """Records of one base composition, by which the made models can tell the classes apart."""
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
    """The models alone, and chunks short enough to have open frames."""
    flags = dict(zip(checkpoints.flags[::2], checkpoints.flags[1::2], strict=True))
    del flags["--head"]
    return (*(part for pair in flags.items() for part in pair), "--chunk-length", "60")


def classes(labelled: Sequence[Path]) -> tuple[str, ...]:
    viral, other = labelled
    return ("--viral", str(viral), "--other", str(other))


def content(folder: Path) -> dict[str, bytes]:
    names = ("figures.json", "records.tsv", "roc.png", "reliability.png")
    return {name: (folder / "training" / name).read_bytes() for name in names}


def test_a_head_is_trained_and_calls_with_it_are_as_good_as_its_card_says(
    virnuc_flows: CommandLine,
    checkpoints: Checkpoints,
    labelled: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/tracking.db")
    monkeypatch.chdir(tmp_path)
    env_config.reload()
    head, run = tmp_path / "made.safetensors", tmp_path / "made.safetensors.run"
    command = ("train", *classes(labelled), "--out", head, *models(checkpoints), *FAST)
    result = virnuc_flows(*command, "--json")
    assert result.code == 0, result.err
    document = json.loads(result.out)
    assert load_classifier(head).in_features == 32 + 24
    parts = {row[1]: row[4] for row in rows(run / "training" / "records.tsv")[1:]}
    assert set(parts.values()) == {"train", "validation", "test"}
    assert document["shards"]["computed"] == document["shards"]["total"] > 1
    card = (tmp_path / "made.md").read_text()
    assert document["models"][0]["weights_fingerprint"] in card
    assert virnuc_flows("fsck", run).code == 0

    first = head.read_bytes(), card, content(run)
    again = virnuc_flows(*command, "--json")
    assert json.loads(again.out)["shards"]["computed"] == 0
    assert (head.read_bytes(), (tmp_path / "made.md").read_text(), content(run)) == first

    client = MlflowClient(f"sqlite:///{tmp_path}/tracking.db")
    (model,) = client.search_registered_models()
    assert model.name == "virnuc-head-dnabert_random-esm2_random-60bp"
    assert {version.version for version in client.search_model_versions(f"name='{model.name}'")} == {1, 2}
    tracked = client.get_run(document["links"]["mlflow_run_id"])
    assert tracked.data.metrics["test_chunks_auroc"] == document["test"]["chunks"]["auroc"]
    assert client.list_artifacts(tracked.info.run_id, "model")[0].path == f"model/{head.name}"

    # The same figures by the normal way of a run, on the records that were held out.
    held_out = tmp_path / "held_out.fa"
    table = tmp_path / "labels.tsv"
    sequences = {}
    for path in labelled:
        lines = path.read_text().splitlines()
        sequences |= {name[1:]: bases for name, bases in zip(lines[::2], lines[1::2], strict=True)}
    test = [name for name, part in parts.items() if part == "test"]
    held_out.write_text("".join(f">{name}\n{sequences[name]}\n" for name in test))
    table.write_text("record\tclass\n" + "".join(f"{name}\t{name.split('_')[0]}\n" for name in test))
    evaluated = tmp_path / "evaluated"
    flags = ("--labels", table, "--head", head, "--out", evaluated, *models(checkpoints))
    assert virnuc_flows("evaluate", held_out, *flags).code == 0
    figures = json.loads((evaluated / "evaluation.json").read_text())
    for level in ("chunks", "contigs"):
        expected = document["test"][level]
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


def test_a_training_that_was_killed_goes_on_with_the_shards_that_are_there(
    virnuc_flows: CommandLine, checkpoints: Checkpoints, labelled: tuple[Path, Path], tmp_path: Path
) -> None:
    killed, whole = tmp_path / "killed.safetensors", tmp_path / "whole.safetensors"
    flags = (*classes(labelled), *models(checkpoints), *FAST, "--shard-seconds", "0.0001")
    command = [sys.executable, "-m", "flows.cli", "train", "--out", str(killed), *map(str, flags)]
    shards = Path(f"{killed}.run") / "shards"
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True) as process:
        wait_until(lambda: len(list(shards.glob("shard_*.h5"))) > 2, seconds=120)
        os.killpg(process.pid, signal.SIGKILL)
    wait_until(lambda: is_empty_group(process.pid), seconds=10)
    assert not killed.exists()
    result = virnuc_flows("train", "--out", killed, *flags, "--json")
    assert result.code == 0, result.err
    counts = json.loads(result.out)["shards"]
    assert 0 < counts["computed"] < counts["total"]
    assert virnuc_flows("train", "--out", whole, *flags).code == 0
    assert killed.read_bytes() == whole.read_bytes()


def test_labels_from_genbank(virnuc_flows: CommandLine, checkpoints: Checkpoints, tmp_path: Path) -> None:
    lineages = {"PHAGE": ["Viruses"], "HOST": ["Bacteria"]}
    records = [made_record(f"{name}{i}", lineages[name]) for name in lineages for i in range(6)]
    genbank = write_genbank(tmp_path / "genomes.gb", *records)
    head = tmp_path / "head.safetensors"
    result = virnuc_flows("train", "--genbank", genbank, "--out", head, *models(checkpoints), *FAST)
    assert result.code == 0, result.err
    assert "GenBank: 12 records; 0 left out" in (tmp_path / "head.md").read_text()
    evaluated = virnuc_flows(
        "evaluate", genbank, "--head", head, "--out", tmp_path / "out", *models(checkpoints), "--json"
    )
    by_class = json.loads(evaluated.out)["contigs"]["by_class"]
    assert [(one["name"], one["count"]) for one in by_class] == [("viral", 6), ("bacteria", 6)]


def test_what_cannot_be_trained_on(
    virnuc_flows: CommandLine, checkpoints: Checkpoints, labelled: tuple[Path, Path], tmp_path: Path
) -> None:
    viral, other = labelled
    few, closed, same = tmp_path / "few.fa", tmp_path / "closed.fa", tmp_path / "same.fa"
    few.write_text(f">a\n{random_dna(300, 1)}\n>b\n{random_dna(300, 2)}\n")
    closed.write_text("".join(f">c{i}\n{'TTAATTAACTAGCTAG' * (10 + i)}\n" for i in range(9)))
    same.write_text(f">x\n{viral.read_text().splitlines()[1]}\n")
    damaged = write_genbank(tmp_path / "damaged.gb", made_record("PHAGE", ["Viruses"]))
    damaged.write_text(damaged.read_text()[:-300])
    out = tmp_path / "head.safetensors"
    for files, code, message in (
        (("--viral", few, "--other", other), 3, "2 groups of related viral records"),
        (("--viral", closed, "--other", few), 3, "groups of related viral records"),
        (("--viral", viral, "--other", other, same), 3, "the same sequence is viral and is not"),
        (("--genbank", damaged), 3, "damaged GenBank"),
        (("--viral", closed, "--other", tmp_path / "none.fa"), 3, "does not exist"),
        ((), 2, "no sequences are given"),
    ):
        result = virnuc_flows("train", *files, "--out", out, *models(checkpoints), "--force")
        assert result.code == code, result.err
        assert message in result.err
        assert not out.exists()
    wide = ("--head", "tiny-500", "--out", tmp_path / "evaluated", *models(checkpoints))
    result = virnuc_flows("evaluate", *classes(labelled), *wide)
    assert result.code == 4
    assert "512 features" in result.err
