"""`virnuc embed`: one vector per sequence, for both model families."""

from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.end_to_end.conftest import CommandLine
from tests.made_models import WIDTH, MadeModels

pytestmark = pytest.mark.usefixtures("prefect_server")


def test_proteins_with_a_model_named_by_family_or_known_by_content(
    virnuc: CommandLine, models: MadeModels, proteins: Path, contigs: Path, tmp_path: Path
) -> None:
    named, alone = tmp_path / "named.h5", tmp_path / "alone.h5"
    result = virnuc.done("embed", proteins, "--out", named, "--model", f"esm2:{models.esm2}")
    assert "9 sequences embedded" in result.out
    virnuc.done("embed", proteins, "--out", alone, "--model", models.esm2)
    with h5py.File(named) as file, h5py.File(alone) as other:
        assert [name.decode() for name in file["ids"]] == [f"protein_{i}" for i in range(9)]
        assert file["lengths"][()].tolist() == [30 + 7 * i for i in range(9)]
        assert file["embeddings"].shape == (9, WIDTH)
        np.testing.assert_array_equal(file["embeddings"][()], other["embeddings"][()])
    other = ("--out", tmp_path / "x.h5", "--model", f"dnabert:{models.esm2}")
    virnuc.refused(4, "contains an ESM-2 model, but a DNABERT-S model is needed", "embed", contigs, *other)


def test_dna_from_standard_input_in_half_precision(
    virnuc: CommandLine, models: MadeModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequences, out = tmp_path / "piped.fa", tmp_path / "piped.h5"
    sequences.write_text(">a\nACGTACGTTTGACA\n>b\nGGGACACATTT\n")
    flags = ("--model", f"dnabert:{models.dnabert}", "--embeddings", "float16", "--json")
    with sequences.open() as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        result = virnuc.done("embed", "-", "--out", out, *flags)
    assert result.document["inputs"][0]["name"] == "-"
    with h5py.File(out) as file:
        assert file["embeddings"].dtype == np.float16
        assert len(file["ids"]) == 2


def test_force_removes_the_old_file_before_anything_else(
    virnuc: CommandLine, models: MadeModels, proteins: Path, tmp_path: Path
) -> None:
    out, empty = tmp_path / "x.h5", tmp_path / "empty.faa"
    empty.touch()
    flags = ("--out", out, "--model", f"esm2:{models.esm2}")
    virnuc.done("embed", proteins, *flags)
    virnuc.refused(4, "input_digest: was proteins.faa", "embed", empty, *flags)
    assert out.exists()
    virnuc.refused(3, "no sequence", "embed", empty, *flags, "--force")
    assert not out.exists()
