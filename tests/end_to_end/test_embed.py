"""`virnuc embed`: one vector per sequence, for both model families."""

import json
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.end_to_end.conftest import Checkpoints, CommandLine


def test_embeds_proteins_by_name_and_by_content(
    virnuc_flows: CommandLine, checkpoints: Checkpoints, proteins: Path, tmp_path: Path
) -> None:
    named, alone = tmp_path / "named.h5", tmp_path / "alone.h5"
    result = virnuc_flows("embed", proteins, "--out", named, "--model", f"esm2:{checkpoints.esm}")
    assert result.code == 0, result.err
    assert "9 sequences embedded" in result.out
    assert virnuc_flows("embed", proteins, "--out", alone, "--model", checkpoints.esm).code == 0
    with h5py.File(named) as file, h5py.File(alone) as other:
        assert [name.decode() for name in file["ids"]] == [f"protein_{i}" for i in range(9)]
        assert file["lengths"][()].tolist() == [30 + 7 * i for i in range(9)]
        assert file["embeddings"].shape == (9, 32)
        np.testing.assert_array_equal(file["embeddings"][()], other["embeddings"][()])


def test_embeds_dna_in_half_precision_from_standard_input(
    virnuc_flows: CommandLine,
    checkpoints: Checkpoints,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sequences = tmp_path / "piped.fa"
    sequences.write_text(">a\nACGTACGTTTGACA\n>b\nGGGACACATTT\n")
    flags = ("--model", f"dnabert:{checkpoints.dnabert}", "--embeddings", "float16", "--json")
    with sequences.open() as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        result = virnuc_flows("embed", "-", "--out", tmp_path / "piped.h5", *flags)
    assert result.code == 0, result.err
    assert json.loads(result.out)["inputs"][0]["name"] == "stdin"
    with h5py.File(tmp_path / "piped.h5") as file:
        assert file["embeddings"].dtype == np.float16
        assert len(file["ids"]) == 2


def test_force_removes_the_old_file_before_anything_else(
    virnuc_flows: CommandLine, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    out, empty = tmp_path / "x.h5", tmp_path / "empty.faa"
    empty.touch()
    for force, stays in (((), True), (("--force",), False)):
        out.touch()
        result = virnuc_flows("embed", empty, "--out", out, "--model", f"esm2:{checkpoints.esm}", *force)
        assert result.code == 3, result.err
        assert out.exists() == stays


def test_model_of_the_other_family_is_refused(
    virnuc_flows: CommandLine, checkpoints: Checkpoints, proteins: Path, tmp_path: Path
) -> None:
    result = virnuc_flows(
        "embed", proteins, "--out", tmp_path / "x.h5", "--model", f"dnabert:{checkpoints.esm}"
    )
    assert result.code in (3, 4), result.err
