"""Files that could lose a record, break a table or fill the memory, through the command line."""

import gzip
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.end_to_end.conftest import CommandLine, random_dna, rows
from tests.made_models import MadeModels, make_spec, write_model
from virnuc_core.models.heads import load_head, save_head

BOM = b"\xef\xbb\xbf"
ANOTHER = "where another record seems to begin"
FIRST, SECOND = b">c1 first\n" + b"ACGT" * 15, b">c2 second\n" + b"GGCA" * 15
READ = b"@r1\nACGTACGT\n+\nIIIIIIII\n"


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (FIRST + SECOND, f"after 60 letters of the sequence of 'c1 first' comes '>c2 second', {ANOTHER}"),
        (FIRST + SECOND + b"\n", ANOTHER),
        (gzip.compress(FIRST) + gzip.compress(SECOND), ANOTHER),
        (FIRST + b"\n" + BOM + SECOND, ANOTHER),
        (FIRST + b"\n  " + SECOND, ANOTHER),
        (FIRST + b"\n" + BOM + b"# made\nACGT\n" + SECOND, ANOTHER),
        (FIRST + b"\n" + b"ACGT" * 1000 + b"\n" + READ, ANOTHER),
        (FIRST + READ, ANOTHER),
        (FIRST + b"\n# end" + SECOND + b"\n", ANOTHER),
        (b"# made" + FIRST + b"\n" + SECOND, "follows its comments"),
        (READ + FIRST, "cannot be parsed"),
        (READ.strip() + READ, "cannot be parsed"),
    ],
    ids=[
        "joined",
        "joined, final newline",
        "joined gzip members",
        "byte order mark within",
        "blanks before",
        "byte order mark and comment",
        "read within",
        "read joined",
        "joined to a comment",
        "joined to the first comment",
        "FASTA after reads",
        "joined reads",
    ],
)
def test_records_that_run_into_each_other_are_refused(
    virnuc: CommandLine, tmp_path: Path, content: bytes, error: str
) -> None:
    path, out = tmp_path / "joined.fa", tmp_path / "frames.tsv"
    path.write_bytes(content)
    message = virnuc.refused(3, error, "frames", path, "--chunk-length", 60, "--out", out)
    assert str(path) in message
    assert not out.exists()


@pytest.mark.parametrize(
    ("content", "used", "rejected"),
    [
        (FIRST + b"\n" + SECOND, ["c1", "c2"], []),
        (gzip.compress(FIRST + b"\n") + gzip.compress(SECOND), ["c1", "c2"], []),
        (b"# a > b\n" + FIRST + b"\n# 5' -> 3'\n\n" + SECOND, ["c1", "c2"], []),
        (FIRST.replace(b"c1", b"c.76A>G") + b"\n" + SECOND, ["c.76A>G", "c2"], []),
        (FIRST + b"\n>c3\n1234\n" + SECOND, ["c1", "c2"], [("2", "c3", "not DNA: 4 of 4 letters")]),
        (
            FIRST + b"\n>c3\n>c4\n\xc3\x89\n" + SECOND,
            ["c1", "c2"],
            [("2", "c3", "empty"), ("3", "c4", "not DNA")],
        ),
    ],
    ids=["separate", "gzip members", "comments", "name with >", "digits", "empty"],
)
def test_every_other_record_is_used_or_listed(
    virnuc: CommandLine, tmp_path: Path, content: bytes, used: list[str], rejected: list[tuple[str, ...]]
) -> None:
    path, out = tmp_path / "records.fa", tmp_path / "frames.tsv"
    path.write_bytes(content)
    virnuc.done("frames", path, "--chunk-length", 60, "--out", out)
    assert sorted({row[0].rpartition("_chunk_")[0] for row in rows(out)[1:]}) == sorted(used)
    listed = tmp_path / "frames.tsv.rejected.tsv"
    found = rows(listed)[1:] if listed.exists() else []
    assert [tuple(row[:2]) for row in found] == [expected[:2] for expected in rejected]
    assert all(row[4].startswith(expected[2]) for row, expected in zip(found, rejected, strict=True))


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


def test_one_record_that_expands_without_end_is_refused(tmp_path: Path) -> None:
    """In 4 GB of address space, of which half may be used at 8 bytes a letter."""
    path, out = tmp_path / "bomb.fa.gz", tmp_path / "frames.tsv"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b">bomb\n")
        for _ in range(400):
            file.write(b"A" * (1 << 20))
    command = [sys.executable, "-m", "virnuc_cli", "frames", path, "--chunk-length", "60", "--out", out]
    done = subprocess.run(
        command,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    assert "bomb.fa.gz holds a record of more than" in done.stderr
    assert "Traceback" not in done.stderr


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
    virnuc.refused(4, "its weights are broken", *command)
    assert not (run / "contigs.tsv").exists()


@pytest.mark.parametrize("threshold", ["1e-18", "0.0000009", "0.9999999", "0", "1"])
def test_a_threshold_beyond_the_decimals_of_tables_is_refused(
    virnuc: CommandLine, contigs: Path, tmp_path: Path, threshold: str
) -> None:
    run = tmp_path / "run"
    virnuc.refused(2, "threshold", "predict", contigs, "--out", run, "--threshold", threshold)
    assert not run.exists()


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
