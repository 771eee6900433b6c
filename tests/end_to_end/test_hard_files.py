"""Files that could lose a record, break a table or fill the memory, through the command line."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.end_to_end.conftest import CommandLine, random_dna
from tests.made_models import MadeModels, make_spec, write_model
from virnuc_core.models.heads import load_head, save_head


@pytest.mark.parametrize("charmap", ["ASCII", "ISO-8859-1"])
def test_names_are_read_in_utf8_in_any_locale(tmp_path: Path, charmap: str) -> None:
    environment = {**os.environ, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    if charmap != "ASCII":
        if shutil.which("localedef") is None:
            pytest.skip("localedef, which makes the locale, is not installed")
        locale = tmp_path / f"en_US.{charmap}"
        subprocess.run(["localedef", "-i", "en_US", "-f", charmap, locale], check=True, capture_output=True)
        environment |= {"LOCPATH": str(tmp_path), "LC_ALL": locale.name}
    asked = [sys.executable, "-c", "import locale; print(locale.getencoding())"]
    encoding = subprocess.run(asked, env=environment, check=True, capture_output=True, text=True).stdout
    assert encoding.strip() in (charmap, "ANSI_X3.4-1968")
    path, out = tmp_path / "names.fa", tmp_path / "frames.tsv"
    path.write_text(f">Éch_Å1 Möwe\n{'ACGT' * 15}\n", encoding="utf-8")
    command = [sys.executable, "-m", "virnuc_cli", "frames", path, "--chunk-length", "60", "--out", out]
    subprocess.run(command, env=environment, check=True)
    assert {line.split("_chunk_")[0] for line in out.read_text("utf-8").splitlines()[1:]} == {"Éch_Å1"}


def test_names_of_hdf5_that_all_point_to_one_long_text_are_refused(
    virnuc: CommandLine, models: MadeModels, tmp_path: Path
) -> None:
    path, count, length = tmp_path / "bomb.h5", 1000, 1_000_000
    with h5py.File(path, "w") as file:
        names = file.create_dataset("frame_ids", (count,), dtype=h5py.string_dtype())
        names[0] = "x" * length
        file.create_dataset("vectors", data=np.zeros((count, 192), np.float32))
        place = names.id.get_offset()
    with path.open("r+b") as raw:
        raw.seek(place)
        reference = raw.read(16)
        raw.seek(place)
        raw.write(reference * count)
    out = tmp_path / "scores.tsv"
    message = "its names are larger in memory than in the file"
    virnuc.refused(4, message, "score", path, "--head", models.head, "--out", out)
    assert not out.exists()


@pytest.mark.parametrize("layer", ["contig.3", "embedding"])
def test_a_head_that_gives_contigs_no_numbers_is_refused(
    prefect_server: None, virnuc: CommandLine, models: MadeModels, contigs: Path, tmp_path: Path, layer: str
) -> None:
    head = load_head(models.longest_head)
    head.get_parameter(f"{layer}.weight").fill_(3e38)
    broken, run = tmp_path / "broken.safetensors", tmp_path / "run"
    save_head(head, broken, {})
    command = ("predict", contigs, "--out", run, *models.flags, "--head", broken)
    virnuc.refused(4, "its weights are corrupt", *command)
    assert not (run / "contigs.tsv").exists()


def test_vectors_have_the_same_bits_with_any_number_of_threads(tmp_path: Path) -> None:
    spec = make_spec("esm2", embedding_dim=320, num_heads=20, ffn_dim=320)
    model, proteins = write_model(tmp_path / "esm2", spec), tmp_path / "proteins.faa"
    proteins.write_text("".join(f">p{i}\n{random_dna(450 + 15 * i, i)}\n" for i in range(20)))
    found = []
    for threads in (1, 3):
        out = tmp_path / f"{threads}.h5"
        options = ("--model", model, "--devices", "cpu", "--out", out)
        command = [sys.executable, "-m", "virnuc_cli", "embed", proteins, *options]
        subprocess.run(command, env={**os.environ, "VIRNUC_THREADS": str(threads)}, check=True)
        with h5py.File(out) as file:
            found.append(file["embeddings"][:].tobytes())
    assert found[0] == found[1]
