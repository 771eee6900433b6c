"""Runs whose inputs and results are at object storage."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.recording import require_places
from tests.end_to_end.conftest import CommandLine, write_class
from tests.made_models import MadeModels
from tests.made_storage import ObjectStorage, WebServer, storage, web
from virnuc_core.errors import UsageError
from virnuc_core.remote import output_path

pytestmark = pytest.mark.usefixtures("prefect_server")
__all__ = ["storage", "web"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, set_env: Callable[..., None]) -> Path:
    set_env(VIRNUC_STAGING=tmp_path / "staging")
    return tmp_path / "staging"


def test_predict_reads_and_writes_object_storage_and_computes_once(
    virnuc: CommandLine, models: MadeModels, contigs: Path, finished: Path, storage: ObjectStorage
) -> None:
    source, out = storage.put("in/contigs.fa", contigs.read_bytes()), f"{storage.url}/results/run"
    command = ("predict", source, "--out", out, *models.flags)
    document = virnuc.done(*command, "--json").document
    assert document["shards"]["computed"] > 0
    names = {name.removeprefix("results/run/") for name in storage.written if name.startswith("results/")}
    assert {
        "run.json",
        "plan.json",
        "contigs.tsv",
        "embeddings.h5",
        "report.html",
        "virnuc_mqc.json",
    } <= names
    assert storage.get("results/run/contigs.tsv") == (finished / "contigs.tsv").read_bytes()
    report = json.loads(storage.get("results/run/run.json"))
    assert report["links"]["results"] == out
    assert report["inputs"][0]["name"] == "contigs.fa"

    before = storage.written
    result = virnuc.done(*command, "--json")
    assert result.document["shards"]["computed"] == 0
    changed = {name for name, moment in storage.written.items() if before[name] != moment}
    assert changed <= {f"results/run/{name}" for name in ("run.json", "report.html", "virnuc_mqc.json")}

    storage.put("in/contigs.fa", b">other\n" + b"ACGT" * 200 + b"\n")
    virnuc.refused(4, "input_digest: was contigs.fa", *command)


def test_embed_writes_its_file_and_its_run(
    virnuc: CommandLine, models: MadeModels, proteins: Path, storage: ObjectStorage, web: WebServer
) -> None:
    web.files["/proteins.faa"] = proteins.read_bytes()
    out = f"{storage.url}/vectors.h5"
    virnuc.done("embed", f"{web.url}/proteins.faa?token=secret", "--out", out, "--model", models.esm2)
    assert storage.get("vectors.h5") == output_path(out).read_bytes()
    assert "secret" not in storage.get("vectors.h5.run/run.json").decode()


def test_another_runs_results_are_not_replaced(
    virnuc: CommandLine, models: MadeModels, contigs: Path, storage: ObjectStorage
) -> None:
    storage.put("run/run.json", b'{"plan_fingerprint": "other"}')
    command = ("predict", contigs, "--out", f"{storage.url}/run", *models.flags)
    virnuc.refused(4, "contains results of a run with other inputs", *command)
    assert not list(output_path(f"{storage.url}/run").glob("shards/*.h5"))
    virnuc.done(*command, "--force")


def test_a_pool_needs_a_staging_folder_that_is_named(set_env: Callable[..., None]) -> None:
    set_env(VIRNUC_STAGING="")
    with pytest.raises(UsageError, match="VIRNUC_STAGING"):
        require_places(["s3://bucket/contigs.fa"], "/tmp/run", "pool")


def test_a_head_is_trained_on_files_at_urls(
    virnuc: CommandLine, models: MadeModels, tmp_path: Path, web: WebServer
) -> None:
    for name, gc, seed in (("viral.fa", 0.3, 1), ("other.fa", 0.7, 2)):
        web.files[f"/{name}"] = write_class(tmp_path / name, gc, 12, seed).read_bytes()
    encoders = ("--esm-model", models.esm2, "--dnabert-model", models.dnabert, "--chunk-length", 60)
    files = ("--viral", f"{web.url}/viral.fa", "--other", f"{web.url}/other.fa")
    fast = ("--epochs", 2, "--json")
    report = virnuc.done("train", *files, "--out", tmp_path / "head.safetensors", *encoders, *fast).document
    assert (tmp_path / "head.safetensors").exists()
    assert len(report["inputs"]) == 2
