"""`virnuc predict`: results, resuming, refusing, and starting over."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import numpy.typing as npt
import pytest

from tests.end_to_end.conftest import Checkpoints, CommandLine, random_dna, rows
from virnuc_core.env_config import reload
from virnuc_core.inference import sharding

pytestmark = pytest.mark.usefixtures("fast_lanes")

RESULTS = {
    "contigs.parquet",
    "contigs.tsv",
    "embeddings.h5",
    "prediction_results.txt",
    "prediction_results_highestscore.csv",
    "predictions.parquet",
    "predictions.tsv",
    "regions.bed",
    "regions.fa.gz",
    "regions.gff3",
    "regions.parquet",
    "regions.tsv",
    "rejected.tsv",
    "report.html",
    "viral_contigs.fa.gz",
    "run.json",
    "plan.json",
    "frames",
    "lanes",
    "shards",
}


def visible_names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


def test_gives_every_result_and_accounts_for_every_record(
    virnuc_flows: CommandLine, checkpoints: Checkpoints, contigs: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    result = virnuc_flows("predict", contigs, "--out", out, *checkpoints.flags)
    assert result.code == 0, result.err
    assert visible_names(out) == RESULTS
    assert result.out.startswith("6 contigs: ")
    assert str(out) in result.out
    assert [row[0] for row in rows(out / "contigs.tsv")[1:]] == [f"contig_{i}" for i in range(5)] + ["closed"]
    assert [row[1] for row in rows(out / "rejected.tsv")[1:]] == ["not_dna"]
    assert rows(out / "predictions.tsv")[-1][-1] == "no_open_frame"
    with h5py.File(out / "embeddings.h5") as file:
        num_frames = len(file["frame_ids"])
        assert file["dna"].shape == (num_frames, 24)
        assert file["protein"].shape == (num_frames, 32)
    assert len(rows(out / "prediction_results.txt")) == num_frames + 1


def test_another_threshold_reuses_the_shards_and_a_least_length_does_not(
    virnuc_flows: CommandLine, checkpoints: Checkpoints, contigs: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    command = ("predict", contigs, "--out", out, "--json", "--min-length", 1000, *checkpoints.flags)
    first = json.loads(virnuc_flows(*command).out)
    assert (first["threshold"], first["min_length"]) == (0.5, 1000)
    assert {row[1]: row[4] for row in rows(out / "rejected.tsv")[1:]}["contig_0"].startswith(
        "shorter than 1000"
    )
    strict = json.loads(virnuc_flows(*command, "--threshold", 0.999).out)
    assert strict["shards"] == {"total": first["shards"]["total"], "computed": 0}
    assert json.loads((out / "run.json").read_text())["threshold"] == strict["threshold"] == 0.999
    assert strict["counts"]["viral_chunks"] == 0 < first["counts"]["scored_chunks"]
    assert virnuc_flows("fsck", out).code == 0
    assert virnuc_flows(*command, "--threshold", 1.5).code == 2
    assert virnuc_flows("predict", contigs, "--out", out, *checkpoints.flags).code == 4


def test_says_only_what_was_asked_for(
    virnuc_flows: CommandLine, checkpoints: Checkpoints, contigs: Path, tmp_path: Path
) -> None:
    plain = virnuc_flows("predict", contigs, "--out", tmp_path / "run", *checkpoints.flags)
    stages = ["index", "plan", "embed", "validate", "aggregate", "classify", "publish"]
    lines = plain.err.splitlines()
    assert [
        line.removeprefix("virnuc: ") for line in lines if line.count(":") == 1 and "lane" not in line
    ] == stages
    assert all(line.startswith("virnuc: ") for line in lines), "something else writes to the terminal"

    document = virnuc_flows("predict", contigs, "--out", tmp_path / "run", "--json", *checkpoints.flags)
    facts = json.loads(document.out)
    assert facts["shards"] == {"total": 1, "computed": 0}
    assert facts["counts"]["rejected"] == 1

    quiet = virnuc_flows("predict", contigs, "--out", tmp_path / "run", "--quiet", *checkpoints.flags)
    assert (quiet.code, quiet.out, quiet.err) == (0, "", "")


def test_continues_without_computing_again_and_starts_over_with_force(
    virnuc_flows: CommandLine, checkpoints: Checkpoints, contigs: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    command = ("predict", contigs, "--out", out, "--json", *checkpoints.flags)
    assert virnuc_flows(*command).code == 0
    [shard] = (out / "shards").iterdir()
    made_at = shard.stat().st_mtime_ns
    first = {name: (out / name).read_bytes() for name in RESULTS if (out / name).is_file()}
    (out / "notes.txt").write_text("of the user")

    assert virnuc_flows(*command).code == 0
    assert shard.stat().st_mtime_ns == made_at

    again = json.loads(virnuc_flows(*command, "--force").out)
    assert again["shards"] == {"total": 1, "computed": 1}
    assert shard.stat().st_mtime_ns > made_at
    for name in first.keys() - {"run.json", "report.html"}:
        assert (out / name).read_bytes() == first[name], name
    assert (out / "notes.txt").exists()


def test_refuses_to_mix_runs_and_names_both_values(
    virnuc_flows: CommandLine, checkpoints: Checkpoints, contigs: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    command = ("predict", contigs, "--out", out, *checkpoints.flags)
    assert virnuc_flows(*command).code == 0
    predictions = (out / "predictions.tsv").read_bytes()

    chunks = virnuc_flows(*command, "--chunk-length", "300")
    assert chunks.code == 4
    assert "500" in chunks.err
    assert "300" in chunks.err
    assert "--force" in chunks.err

    head = virnuc_flows(*command, "--head", checkpoints.other_head)
    assert head.code == 4
    assert "head_1.safetensors" in head.err
    assert "head_2.safetensors" in head.err

    other = tmp_path / "other.fa"
    other.write_text(f">one\n{random_dna(600, seed=9)}\n")
    inputs = virnuc_flows("predict", other, "--out", out, *checkpoints.flags)
    assert inputs.code == 4
    assert "contigs.fa" in inputs.err
    assert "other.fa" in inputs.err

    assert (out / "predictions.tsv").read_bytes() == predictions
    forced = virnuc_flows("predict", other, "--out", out, "--force", *checkpoints.flags)
    assert forced.code == 0, forced.err
    assert [row[0] for row in rows(out / "contigs.tsv")[1:]] == ["one"]


def test_computes_a_damaged_shard_again(
    virnuc_flows: CommandLine, checkpoints: Checkpoints, contigs: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    command = ("predict", contigs, "--out", out, "--json", *checkpoints.flags)
    assert virnuc_flows(*command).code == 0
    [shard] = (out / "shards").iterdir()
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-100])
    again = virnuc_flows(*command)
    assert json.loads(again.out)["shards"] == {"total": 1, "computed": 1}
    assert "Set aside" in again.err
    assert shard.read_bytes() == whole


def test_packed_padded_and_one_by_one_agree(
    virnuc_flows: CommandLine,
    checkpoints: Checkpoints,
    contigs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def vectors(name: str, *flags: str) -> npt.NDArray[np.float32]:
        out = tmp_path / name
        assert virnuc_flows("predict", contigs, "--out", out, *flags, *checkpoints.flags).code == 0
        with h5py.File(out / "embeddings.h5") as file:
            return np.hstack([file["dna"][()], file["protein"][()]])

    reference = vectors("reference", "--engine", "reference")
    np.testing.assert_allclose(vectors("packed"), reference, atol=1e-5)
    monkeypatch.setenv("VIRNUC_DISABLE_PACKING", "1")
    reload()
    np.testing.assert_allclose(vectors("padded"), reference, atol=1e-5)


def test_a_run_under_way_is_rescued_by_a_switch(
    virnuc_flows: CommandLine,
    checkpoints: Checkpoints,
    contigs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sharding, "MAX_SHARD_ROWS", 4)
    run = tmp_path / "run"
    command = ("predict", contigs, "--out", run, *checkpoints.flags, "--json")
    assert virnuc_flows(*command).code == 0
    shards = sorted((run / "shards").iterdir())
    kept = {path.name: path.read_bytes() for path in shards[:2]}
    for path in (*shards[2:], run / "run.json", run / "embeddings.h5"):
        path.unlink()
    monkeypatch.setenv("VIRNUC_DISABLE_PACKING", "1")
    monkeypatch.setenv("VIRNUCPRO_DISABLE_FP16", "1")
    reload()
    result = virnuc_flows(*command)
    assert result.code == 0, result.err
    assert f"{len(shards) - 2} of {len(shards)} shards are missing and compute with" in result.err
    assert "VIRNUCPRO_DISABLE_FP16 is a variable of VirNucPro" in result.err
    assert "set VIRNUC_DISABLE_FP16 instead" in result.err
    document = json.loads(result.out)
    assert document["shards"] == {"total": len(shards), "computed": len(shards) - 2}
    [part] = document["continued"]
    assert part["switches"] == ["VIRNUC_DISABLE_PACKING"]
    assert part["shards"] == list(range(2, len(shards)))
    assert {model["attention"] for model in part["models"]} == {"padded"}
    assert any("other emergency switches" in note for note in document["notes"])
    assert {path.name: path.read_bytes() for path in shards[:2]} == kept
    assert virnuc_flows("fsck", run).code == 0
    assert f"arithmetic of {len(shards) - 2} of {len(shards)} shards" in virnuc_flows("inspect", run).out


def test_the_report_says_how_each_model_was_run_and_who_said_so(
    virnuc_flows: CommandLine,
    checkpoints: Checkpoints,
    contigs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text("[defaults]\nshard-seconds = 0.001\n")
    monkeypatch.setenv("VIRNUC_PREDICT_DNABERT_ENGINE", "reference")
    command = ("--config", settings, "predict", contigs, "--out", tmp_path / "run", "--json")
    result = virnuc_flows(*command, *checkpoints.flags, "--token-budget", "300")
    document = json.loads(result.out)
    origins = document["settings_from"]
    assert origins["shard-seconds"] == f"{settings} [defaults]"
    assert origins["dnabert-engine"] == "environment variable VIRNUC_PREDICT_DNABERT_ENGINE"
    assert origins["token-budget"] == "flag --token-budget"
    assert "precision" not in origins
    names = ("family", "precision", "engine", "attention", "compile_mode", "token_budget")
    assert [tuple(model[name] for name in names) for model in document["models"]] == [
        ("dnabert_s", "fp32", "reference", "reference", "none", 1),
        ("esm2", "fp32", "packed", "sdpa", "none", 300),
    ]
    assert document["shards"]["total"] > 1


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (("--esm-model", "no/such/model/anywhere"), 4, "no/such/model/anywhere"),
        (("--repr-layer", "7"), 2, "layer 7"),
        (("--devices", "99"), 5, "99"),
        (("--devices", "fast"), 2, "fast"),
        (("--token-budget", "0"), 2, "token_budget"),
        (("--precision", "fp16"), 5, "fp16"),
    ],
)
def test_exit_code_says_what_kind_of_error(
    virnuc_flows: CommandLine,
    checkpoints: Checkpoints,
    contigs: Path,
    tmp_path: Path,
    flags: tuple[str, ...],
    code: int,
    words: str,
) -> None:
    result = virnuc_flows("predict", contigs, "--out", tmp_path / "run", *checkpoints.flags, *flags)
    assert result.code == code, result.err
    assert words in result.err
    assert "Traceback" not in result.err
    assert result.out == ""


def test_bad_input_is_one_clear_line(
    virnuc_flows: CommandLine, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    missing = virnuc_flows("predict", tmp_path / "none.fa", "--out", tmp_path / "a", *checkpoints.flags)
    assert missing.code == 3
    assert missing.err.splitlines()[-1].startswith("virnuc: error: ")
    assert "none.fa" in missing.err

    unusable = tmp_path / "unusable.fa"
    unusable.write_text(">a\nEFILPQEFILPQ\n")
    rejected = virnuc_flows("predict", unusable, "--out", tmp_path / "b", "--json", *checkpoints.flags)
    assert rejected.code == 3
    assert json.loads(rejected.out)["exit_code"] == 3
    assert rows(tmp_path / "b" / "rejected.tsv")[1][1] == "a"


def test_second_run_in_the_same_folder_is_kept_out(
    virnuc_flows: CommandLine, checkpoints: Checkpoints, contigs: Path, tmp_path: Path
) -> None:
    from virnuc_core.results.run_opening import open_run_folder

    with open_run_folder(tmp_path / "run", force=False):
        result = virnuc_flows("predict", contigs, "--out", tmp_path / "run", *checkpoints.flags)
    assert result.code == 2
    assert "another run" in result.err


@pytest.mark.slow
def test_interrupt_ends_every_process_and_says_so(
    checkpoints: Checkpoints, contigs: Path, tmp_path: Path
) -> None:
    """A separate process with a temporary server, interrupted by Ctrl-C during the run."""
    large = tmp_path / "large.fa"
    large.write_text("".join(f">c{i}\n{random_dna(30_000, seed=i)}\n" for i in range(60)))
    out = tmp_path / "run"
    flags = (*checkpoints.flags, "--engine", "reference")
    command = [sys.executable, "-m", "virnuc_cli", "predict", str(large), "--out", str(out), *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            wait_until((out / "shards").exists, seconds=120)
            os.killpg(process.pid, signal.SIGINT)
            _, err = process.communicate(timeout=60)
            wait_until(lambda: is_empty_group(process.pid), seconds=10)
        finally:
            if not is_empty_group(process.pid):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert err.splitlines()[-1].startswith("virnuc: error: interrupted")


def test_killed_run_leaves_no_server(checkpoints: Checkpoints, contigs: Path, tmp_path: Path) -> None:
    """The server is in the run's process group, which is empty only when both are gone."""
    flags = (*checkpoints.flags, "--engine", "reference")
    command = [
        sys.executable,
        "-m",
        "virnuc_cli",
        "predict",
        str(contigs),
        "--out",
        str(tmp_path / "run"),
        *flags,
    ]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True) as process:
        try:
            wait_until((tmp_path / "run" / "frames").exists, seconds=120)
            process.kill()
            process.wait()
            wait_until(lambda: is_empty_group(process.pid), seconds=30)
        finally:
            if not is_empty_group(process.pid):
                os.killpg(process.pid, signal.SIGKILL)


def wait_until(happens: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


def is_empty_group(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False
