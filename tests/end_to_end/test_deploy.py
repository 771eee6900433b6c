"""`virnuc deploy`: the models of the nightly run are validated on deployment and then used."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client

from deployments.register import NIGHTLY
from flows.nightly import nightly
from tests.end_to_end.conftest import Checkpoints, CommandLine

pytestmark = pytest.mark.usefixtures("prefect_server", "fast_lanes")


@pytest.fixture
def client() -> Iterator[SyncPrefectClient]:
    with get_client(sync_client=True) as client:
        yield client


def note_of_nightly(virnuc_flows: CommandLine, *flags: str) -> str:
    result = virnuc_flows("deploy", *flags, "--json")
    assert result.code == 0, result.err
    [note] = [item["note"] for item in json.loads(result.out)["registered"] if item["name"] == NIGHTLY]
    return str(note)


def test_the_nightly_batch_runs_the_models_that_were_deployed(
    virnuc_flows: CommandLine,
    checkpoints: Checkpoints,
    contigs: Path,
    client: SyncPrefectClient,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inbox, out = tmp_path / "inbox", tmp_path / "out"
    inbox.mkdir()
    (inbox / "sample.fa").write_bytes(contigs.read_bytes())
    monkeypatch.chdir(checkpoints.head.parent)
    models = ("--esm-model", checkpoints.esm.name, "--dnabert-model", str(checkpoints.dnabert))
    folders = ("--inbox", str(inbox), "--out", str(out))
    note = note_of_nightly(virnuc_flows, *folders, *models, "--head", checkpoints.head.name)
    assert f"esm_model {checkpoints.esm}" in note

    deployed = client.read_deployment_by_name(NIGHTLY).parameters
    assert deployed["settings"] == {
        "esm_model": str(checkpoints.esm),
        "dnabert_model": str(checkpoints.dnabert),
        "head": str(checkpoints.head),
    }
    nightly(**{**deployed, "mode": "local", "settle_seconds": 0})
    [report] = out.glob("sample*/run.json")
    assert json.loads(report.read_text())["head"]["location"] == str(checkpoints.head)

    # Models are set together: naming one resets the others, naming none keeps all.
    assert note_of_nightly(virnuc_flows, "--cron", "0 3 * * *").startswith(
        "pool virnuc-runs, 0 3 * * * UTC, esm_model"
    )
    assert note_of_nightly(virnuc_flows, "--preset", "tiny").endswith(", preset tiny")
    assert client.read_deployment_by_name(NIGHTLY).parameters["settings"] == {"preset": "tiny"}


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (("--head", "absent.pth"), 4, "no classifier head absent.pth"),
        (("--preset", "virnucpro-500"), 2, "no head is bundled for DNABERT-S and 3B"),
        (("--esm-model", "4B"), 4, "there is no model 4B"),
        (("--chunk-length", "2"), 2, "chunk_length"),
    ],
)
def test_models_that_cannot_be_used_are_refused_when_deployed(
    virnuc_flows: CommandLine, flags: tuple[str, ...], code: int, message: str
) -> None:
    result = virnuc_flows("deploy", *flags)
    assert result.code == code
    assert message in result.err
