"""The functions for notebooks: same numbers as the commands, input order, clear errors, no main guard on the CPU."""

import gzip
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import virnuc_core
from tests.made_models import MadeModels, MadeRun
from virnuc_core import embed, predict
from virnuc_core.api import Predictions
from virnuc_core.errors import CheckpointError, InputError, UsageError, VirnucError
from virnuc_core.results.inspect import inspect_path

PROTEINS = ["MKVLAAGIVGLCAKAYAE", "mkv", "MSTNPKPQRKTKRNTNRRPQDVKFPGG", "MKV", "MXBZUO*-."]


def settings_of(models: MadeModels) -> dict[str, str | int]:
    names = {"esm_model": models.esm2, "dnabert_model": models.dnabert, "head": models.head}
    return {"chunk_length": 60, "devices": "cpu", **{name: str(path) for name, path in names.items()}}


def predict_made(models: MadeModels, source: object, **changes: object) -> Predictions:
    return predict(source, **{**settings_of(models), **changes})  # type: ignore[arg-type]


def test_importing_the_package_loads_nothing_heavy() -> None:
    script = "import sys, virnuc_core; print(sorted({'torch', 'numpy', 'pandas', 'h5py'} & set(sys.modules)), dir(virnuc_core))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("[] ")
    for name in ("embed", "predict", "open_embeddings"):
        assert name in done.stdout
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = virnuc_core.no_such_name


def test_vectors_come_in_the_order_of_the_sequences(made_models: MadeModels) -> None:
    vectors = embed(PROTEINS, f"esm2:{made_models.esm2}", devices="cpu")
    assert (vectors.shape, vectors.dtype) == ((5, 96), np.float32)
    assert np.array_equal(vectors[1], vectors[3])
    alone = embed([PROTEINS[2]], str(made_models.esm2), devices="cpu")
    np.testing.assert_allclose(vectors[2], alone[0], atol=1e-5)
    assert embed([], f"esm2:{made_models.esm2}").shape == (0, 96)


@pytest.mark.parametrize(
    ("sequences", "model", "options", "error", "message"),
    [
        (["MKV", ""], "esm2:tiny", {}, InputError, "sequence 1 cannot be embedded: empty"),
        (["MK1"], "esm2:tiny", {}, InputError, "sequence 0 cannot be embedded: not a protein"),
        (["MKV", ">x\nMKV"], "esm2:tiny", {}, InputError, "sequence 1 cannot be embedded: not a protein"),
        (["MKV"], "esm2:tiny", {"precision": "fp17"}, UsageError, r"precision: .*'fp17'"),
        (["MKV"], "esm2:tiny", {"speed": "high"}, UsageError, "speed: Extra inputs"),
        (["MKV"], "esm2:none", {}, CheckpointError, "unknown model"),
    ],
)
def test_what_cannot_be_embedded(
    sequences: list[str], model: str, options: dict[str, str], error: type[VirnucError], message: str
) -> None:
    with pytest.raises(error, match=message):
        embed(sequences, model, **options)


@pytest.mark.parametrize(
    ("source", "changes", "message"),
    [
        ([("a b", "ACGT")], {}, "the id of sequence 0"),
        ([("a", "ACGT"), ("b\n>c", "ACGT")], {}, "the id of sequence 1"),
        ([("a", ">b\nACGT")], {}, "sequence 0 contains non-letters"),
        ([("a", "ACGT"), "b.fa"], {}, "not both"),
        ("x.fa", {"esm_model": "650M", "head": None}, "no classifier head is bundled"),
    ],
)
def test_what_cannot_be_predicted(
    made_models: MadeModels, source: object, changes: dict[str, object], message: str
) -> None:
    with pytest.raises((InputError, UsageError), match=message):
        predict_made(made_models, source, **changes)


def test_a_script_without_guard_writes_what_a_run_with_lanes_writes(
    finished_run: MadeRun, made_models: MadeModels, contigs: Path, tmp_path: Path
) -> None:
    out, script = tmp_path / "run", tmp_path / "script.py"
    options = {**settings_of(made_models), "out": str(out), "shard_seconds": 0.05}
    script.write_text(
        "from virnuc_core import predict\n"
        f"found = predict({str(contigs)!r}, **{options!r})\n"
        "print(len(found.contigs), found.folder)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.stdout == f"{finished_run.store.num_records} {out}\n", done.stderr
    folder = finished_run.folder
    results = [path for path in folder.results if path not in folder.timed]
    assert all((out / path.name).read_bytes() == path.read_bytes() for path in results)
    assert inspect_path(out).problems == ()


def test_frames_have_the_columns_of_the_tables(made_models: MadeModels, tmp_path: Path) -> None:
    pairs = [("NA", "ATGGCC" * 30), ("0012", "TTAATTAACTAGCTAG" * 12), ("empty", "")]
    found = predict_made(made_models, pairs)
    assert found.folder is None
    assert found.contigs["seq_name"].tolist() == ["NA", "0012"]
    assert found.contigs["call"].tolist()[1] == "unscored"
    assert found.contigs["virus_score"].isna().tolist() == [False, True]
    assert found.chunks["chunk"].dtype.kind == "i"
    assert found.rejected["id"].tolist() == ["empty"]
    assert found.viruses.columns.tolist()[:3] == ["seq_name", "length", "topology"]
    assert found.report["counts"]["records"] == 2
    fasta = tmp_path / "pairs.fa.gz"
    with gzip.open(fasta, "wt") as file:
        file.write("".join(f">{name}\n{sequence}\n" for name, sequence in pairs))
    assert predict_made(made_models, [fasta]).chunks.equals(found.chunks)
