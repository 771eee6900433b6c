"""Heads of the MLflow registry as files: the version that was meant, whole, and without pickle."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tasks.registry import registered_head
from tasks.tracking import tracked_run
from tests.made_mlflow import mlflow_server
from tests.made_models import make_head
from virnuc_core.errors import CheckpointError, StorageLostError, UsageError
from virnuc_core.models.classifier import classifier_fingerprint, load_classifier
from virnuc_core.remote import staging_folder

SetEnv = Callable[..., None]
NAME = "virnuc-head-made"


@pytest.fixture(
    scope="module", params=[pytest.param("sqlite"), pytest.param("server", marks=pytest.mark.slow)]
)
def uri(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("store")
    if request.param == "sqlite":
        MlflowClient(f"sqlite:///{folder}/mlflow.db").create_experiment("virnuc", (folder / "files").as_uri())
        yield f"sqlite:///{folder}/mlflow.db"
    else:
        with mlflow_server(folder) as server:
            yield server.url


@pytest.fixture(autouse=True)
def client(uri: str, tmp_path: Path, set_env: SetEnv) -> MlflowClient:
    set_env(MLFLOW_TRACKING_URI=uri, VIRNUC_HOME=tmp_path / "home")
    return MlflowClient(uri)


def register(path: Path, name: str = NAME, *, champion: bool = False, sha256: str | None = None) -> str:
    tags = {"sha256": sha256 or classifier_fingerprint(path)}
    with tracked_run("train", {}, {}) as run:
        run.register_head(name, path, tags, "# made", features=8, champion=champion)
    return str(run.run_id)


def test_the_first_head_is_champion_until_another_is_made_it(client: MlflowClient, tmp_path: Path) -> None:
    heads = [make_head(tmp_path / f"{seed}.safetensors", 8, seed=seed) for seed in range(3)]
    register(heads[0])
    register(heads[1])
    assert registered_head(f"models:/{NAME}@champion").read_bytes() == heads[0].read_bytes()
    register(heads[2], champion=True)
    found = registered_head(f"models:/{NAME}@champion")
    assert found == staging_folder() / "heads" / NAME / "3" / f"{NAME}-v3.safetensors"
    assert found.read_bytes() == heads[2].read_bytes()
    assert load_classifier(registered_head(f"models:/{NAME}/2")).in_features == 8

    found.write_bytes(b"damaged")
    assert registered_head(f"models:/{NAME}@champion").read_bytes() == heads[2].read_bytes()


@pytest.mark.parametrize("reference", ["none@champion", f"{NAME}@none", f"{NAME}/99"])
def test_what_is_not_there_is_named(reference: str) -> None:
    with pytest.raises(CheckpointError, match=f"there is no head models:/{reference}"):
        registered_head(f"models:/{reference}")


@pytest.mark.parametrize(
    "reference", ["models:/none", "models:/../x/1", "models:/a/b/1", "models:/a@b/1", "models:/a/latest"]
)
def test_what_is_no_reference_is_refused(reference: str) -> None:
    with pytest.raises(UsageError, match="names no head"):
        registered_head(reference)


def test_a_head_that_is_not_as_registered_is_not_used(tmp_path: Path) -> None:
    register(make_head(tmp_path / "head.safetensors", 8, seed=0), "changed", sha256="0" * 64)
    with pytest.raises(StorageLostError, match="another SHA-256"):
        registered_head("models:/changed@champion")
    assert not list(staging_folder().rglob("*.safetensors"))


def test_pickled_models_are_refused(tmp_path: Path) -> None:
    (tmp_path / "head.pth").write_bytes(b"\x80")
    register(tmp_path / "head.pth", "pickled")
    with pytest.raises(CheckpointError, match="reads no pickled models"):
        registered_head("models:/pickled@champion")


def test_a_registry_that_is_away_is_worth_a_retry(set_env: SetEnv) -> None:
    set_env(MLFLOW_TRACKING_URI="http://user:secret@127.0.0.1:1")
    with pytest.raises(StorageLostError) as raised:
        registered_head(f"models:/{NAME}@champion")
    assert "secret" not in str(raised.value)
