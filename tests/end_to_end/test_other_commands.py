"""Commands without a flow (frames, score, inspect), and the command line itself."""

import gzip
import json
from pathlib import Path

import click
import numpy as np
import pytest
import torch

from tests.end_to_end.conftest import Checkpoints, CommandLine, rows
from virnuc_cli.main import cli


@pytest.mark.parametrize(
    "arguments",
    [["nonsense"], ["predict"], ["predict", "a.fa"], ["predict", "a.fa", "--out", "x", "--engine", "fast"]],
)
def test_usage_errors(virnuc: CommandLine, arguments: list[str]) -> None:
    result = virnuc(*arguments)
    assert result.code == 2
    assert result.err.startswith("virnuc: error: ")
    assert len(result.err.splitlines()) <= 2


def test_standard_input_can_be_named_once(virnuc: CommandLine, tmp_path: Path) -> None:
    result = virnuc("frames", "-", "-", "--chunk-length", "500", "--out", tmp_path / "frames.tsv")
    assert result.code == 2
    assert "once" in result.err


@pytest.mark.parametrize("chunk_length", [300, 500])
def test_frames_are_those_of_the_original(
    virnuc: CommandLine, data_dir: Path, tmp_path: Path, chunk_length: int
) -> None:
    golden = data_dir / "golden" / "frames"
    out = tmp_path / "frames.tsv"
    result = virnuc("frames", golden / "input.fa.gz", "--chunk-length", chunk_length, "--out", out, "--json")
    assert result.code == 0, result.err
    with gzip.open(golden / f"expected_{chunk_length}.tsv.gz") as expected:
        assert out.read_bytes() == expected.read()
    assert json.loads(result.out)["counts"]["frames"] == len(rows(out)) - 1


def test_frames_says_which_records_it_has_left_out(
    virnuc: CommandLine, contigs: Path, tmp_path: Path
) -> None:
    out, rejected = tmp_path / "frames.tsv", tmp_path / "frames.tsv.rejected.tsv"
    command = ("--chunk-length", "500", "--out", out)
    result = virnuc("frames", contigs, *command, "--json")
    assert json.loads(result.out)["rejected"] == str(rejected)
    assert len(rows(rejected)) == 2
    assert str(rejected) in virnuc("frames", contigs, *command).out

    good, bad = tmp_path / "good.fa", tmp_path / "bad.fa"
    good.write_text(">a\nACGTACGTAAACCC\n")
    bad.write_text(">a\nQQQQEFILP\n")
    result = virnuc("frames", good, *command, "--json")
    assert "rejected" not in json.loads(result.out)
    assert not rejected.exists()
    result = virnuc("frames", bad, *command)
    assert result.code == 3
    assert str(rejected) in result.err
    assert len(rows(rejected)) == 2


@pytest.mark.parametrize("chunk_length", [2, 10**12])
def test_frames_refuses_a_chunk_length_out_of_range(
    virnuc: CommandLine, contigs: Path, tmp_path: Path, chunk_length: int
) -> None:
    result = virnuc("frames", contigs, "--chunk-length", chunk_length, "--out", tmp_path / "frames.tsv")
    assert result.code == 2
    assert "chunk_length" in result.err


def test_output_never_replaces_an_input(virnuc: CommandLine, tmp_path: Path) -> None:
    source, link = tmp_path / "a.fa", tmp_path / "link"
    source.write_text(">a\nACGTACGTAAACCC\n")
    link.symlink_to(source)
    for command in (
        ("frames", source, "--chunk-length", "300", "--out", link),
        ("embed", link, "--model", "dnabert:tiny", "--force", "--out", source),
        ("score", source, "--head", "none.pth", "--out", link),
        ("score", "none.h5", "--head", link, "--out", source),
    ):
        result = virnuc(*command)
        assert result.code == 2
        assert "is the input" in result.err
        assert source.read_text() == ">a\nACGTACGTAAACCC\n"


def test_frames_needs_a_folder_to_write_to(virnuc: CommandLine, contigs: Path, tmp_path: Path) -> None:
    result = virnuc("frames", contigs, "--chunk-length", "500", "--out", tmp_path / "no" / "frames.tsv")
    assert result.code == 2


def test_features_of_virnucpro_are_scored(virnuc: CommandLine, data_dir: Path, tmp_path: Path) -> None:
    golden, out = data_dir / "golden" / "classifier", tmp_path / "scores.tsv"
    with np.load(golden / "golden.npz") as arrays:
        features, expected = torch.from_numpy(arrays["features"]), arrays["probabilities"]
    ids = [f"k141_{i}_chunk_1F1" for i in range(len(features))]
    torch.save({"ids": ids, "data": features}, tmp_path / "output_1_merged.pt")
    head = golden / "pickled_module.pth"
    result = virnuc("score", tmp_path / "output_1_merged.pt", "--head", head, "--out", out)
    assert (result.code, result.out) == (0, f"{len(ids)} frames scored in {out}\n")
    assert "warning: " in result.err
    assert "output_1_merged.pt carries no checksums of virnuc" in result.err
    table = rows(out)[1:]
    assert [row[0] for row in table] == ids
    np.testing.assert_allclose([[float(x) for x in row[2:]] for row in table], expected, rtol=0, atol=1e-6)
    assert [row[1] for row in table] == ["virus" if pair[1] > pair[0] else "others" for pair in expected]


def test_score_and_inspect_what_predict_has_left(
    virnuc_flows: CommandLine, checkpoints: Checkpoints, contigs: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert virnuc_flows("predict", contigs, "--out", run, *checkpoints.flags).code == 0

    same, other = tmp_path / "same.tsv", tmp_path / "other.tsv"
    for head, out in ((checkpoints.head, same), (checkpoints.other_head, other)):
        assert virnuc_flows("score", run / "embeddings.h5", "--head", head, "--out", out).code == 0
    first, again, changed = (rows(path) for path in (run / "prediction_results.txt", same, other))
    assert [row[0] for row in again] == [row[0] for row in first] == [row[0] for row in changed]
    np.testing.assert_allclose(
        [float(row[3]) for row in again[1:]], [float(row[3]) for row in first[1:]], atol=1e-6
    )
    assert changed != first

    for path in (
        run,
        run / "embeddings.h5",
        checkpoints.esm,
        checkpoints.head,
        next((run / "shards").iterdir()),
    ):
        found = virnuc_flows("inspect", path)
        assert found.code == 0, found.out
        assert "whole" in found.out

    (run / "embeddings.h5").write_bytes((run / "embeddings.h5").read_bytes()[:-50])
    damaged = virnuc_flows("inspect", run, "--json")
    assert damaged.code == 4
    assert not json.loads(damaged.out)["whole"]


def test_inspect_nothing(virnuc: CommandLine, tmp_path: Path) -> None:
    assert virnuc("inspect", tmp_path / "none").code == 3


def test_unexpected_error_is_one_line_unless_debugging(
    virnuc: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    @click.command()
    @click.option("--debug", is_flag=True)
    def broken(debug: bool) -> None:
        raise RuntimeError("nobody thought of this")

    monkeypatch.setitem(cli.commands, "broken", broken)
    result = virnuc("broken")
    assert result.code == 1
    assert result.err.splitlines() == [
        "virnuc: error: unexpected RuntimeError: nobody thought of this. Run it with --debug and report what that shows."
    ]
    assert "Traceback" in virnuc("broken", "--debug").err


def test_error_of_the_disk_is_one_line_unless_debugging(
    virnuc: CommandLine, contigs: Path, tmp_path: Path
) -> None:
    command = ("frames", contigs, "--chunk-length", "500", "--out", tmp_path / ("x" * 300))
    result = virnuc(*command)
    assert result.code == 6
    assert len(result.err.splitlines()) == 1
    assert "File name too long" in result.err
    assert "Traceback" in virnuc(*command, "--debug").err
