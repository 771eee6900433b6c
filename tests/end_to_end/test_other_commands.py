"""Commands without a flow (frames, score, inspect), and the command line itself."""

from pathlib import Path

import click
import numpy as np
import pytest
import torch

from tests.end_to_end.conftest import CommandLine, rows
from tests.made_models import GOLDEN, MadeModels
from virnuc_cli.main import cli


def test_frames_says_which_records_it_has_left_out(
    virnuc: CommandLine, contigs: Path, tmp_path: Path
) -> None:
    out, rejected = tmp_path / "frames.tsv", tmp_path / "frames.tsv.rejected.tsv"
    command = ("--chunk-length", "500", "--out", out)
    assert virnuc.done("frames", contigs, *command, "--json").document["rejected"] == str(rejected)
    assert len(rows(rejected)) == 2
    assert str(rejected) in virnuc.done("frames", contigs, *command).out
    fasta = tmp_path / "in.fa"
    fasta.write_text(">a\nACGTACGTAAACCC\n")
    virnuc.done("frames", fasta, *command)
    assert not rejected.exists()
    fasta.write_text(">a\nQQQQEFILP\n")
    virnuc.refused(3, str(rejected), "frames", fasta, *command)
    assert len(rows(rejected)) == 2


def test_features_of_virnucpro_are_scored(virnuc: CommandLine, tmp_path: Path) -> None:
    golden, out = GOLDEN / "classifier", tmp_path / "scores.tsv"
    with np.load(golden / "golden.npz") as arrays:
        features, expected = torch.from_numpy(arrays["features"]), arrays["probabilities"]
    ids = [f"k141_{i}_chunk_1F1" for i in range(len(features))]
    torch.save({"ids": ids, "data": features}, tmp_path / "output_1_merged.pt")
    command = ("score", tmp_path / "output_1_merged.pt", "--head", golden / "pickled_module.pth")
    result = virnuc.done(*command, "--out", out)
    assert result.out == f"{len(ids)} frames scored: {out}\n"
    assert "warning: " in result.err
    assert "output_1_merged.pt has no virnuc checksums" in result.err
    table = rows(out)[1:]
    assert [row[0] for row in table] == ids
    np.testing.assert_allclose([[float(x) for x in row[2:]] for row in table], expected, rtol=0, atol=1e-6)
    assert [row[1] for row in table] == ["virus" if pair[1] > pair[0] else "others" for pair in expected]


def test_score_and_inspect_what_predict_has_left(
    virnuc: CommandLine, models: MadeModels, run: Path, tmp_path: Path
) -> None:
    scores = tmp_path / "scores.tsv"
    virnuc.done("score", run / "embeddings.h5", "--head", models.head, "--out", scores)
    first, again = rows(run / "prediction_results.txt")[1:], rows(scores)[1:]
    assert [row[0] for row in again] == [row[0] for row in first]
    p_virus = [[float(row[3]) for row in table] for table in (first, again)]
    np.testing.assert_allclose(*p_virus, atol=1e-6)

    shard = next((run / "shards").iterdir())
    for path in (run, run / "embeddings.h5", models.esm2, models.head, shard):
        assert ", intact" in virnuc.done("inspect", path).out
    (run / "embeddings.h5").write_bytes((run / "embeddings.h5").read_bytes()[:-50])
    damaged = virnuc("inspect", run, "--json")
    assert (damaged.code, damaged.document["intact"]) == (4, False)


def test_unexpected_errors_and_those_of_the_disk_are_one_line_unless_debugging(
    virnuc: CommandLine, contigs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @click.command()
    @click.option("--debug", is_flag=True)
    def broken(debug: bool) -> None:
        raise RuntimeError("nobody thought of this")

    monkeypatch.setitem(cli.commands, "broken", broken)
    full = ("frames", contigs, "--chunk-length", "500", "--out", tmp_path / ("x" * 300))
    for command, code, message in (
        (("broken",), 1, "unexpected RuntimeError: nobody thought of this. Run again with --debug"),
        (full, 6, "File name too long"),
    ):
        assert virnuc.refused(code, message, *command).count("\n") == 1
        assert "Traceback" in virnuc(*command, "--debug").err
