"""Files and settings at the edge of what can be used: a clear refusal, or a sensible result, in bounded memory."""

import resource
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from tests.end_to_end.conftest import CommandLine, rows
from tests.made_models import MadeModels
from virnuc_core.models.contig_head import load_contig_head, save_contig_head


def test_texts_that_share_their_bytes_are_read_in_bounded_memory(models: MadeModels, tmp_path: Path) -> None:
    """30,000 names that are all the same 4 MB of the file would take 120 GB."""
    path = tmp_path / "embeddings.h5"
    with h5py.File(path, "w") as file:
        for name in ("dna", "protein"):
            file.create_dataset(name, data=np.zeros((30_000, 4), np.float32))
        names = file.create_dataset("frame_ids", (30_000,), h5py.string_dtype())
        names[0] = "A" * (4 << 20)
    share_first_text(path)
    command = ("score", path, "--head", models.head, "--out", tmp_path / "scores.tsv")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "virnuc_cli", *map(str, command)],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=limit_memory,
    )
    assert done.returncode == 4, done.stderr
    assert "a name has more than 65536 letters" in done.stderr
    assert "Traceback" not in done.stderr


def share_first_text(path: Path) -> None:
    """Copies the reference of the first text over those of all others, as h5py cannot."""
    with h5py.File(path, "r") as file:
        dataset = file["frame_ids"]
        begin, size = dataset.id.get_offset(), dataset.id.get_storage_size() // len(dataset)
    content = bytearray(path.read_bytes())
    content[begin : begin + 30_000 * size] = content[begin : begin + size] * 30_000
    path.write_bytes(content)


def limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (6 << 30, 6 << 30))


def test_broken_weights_of_the_contigs_are_named(
    virnuc: CommandLine, models: MadeModels, contigs: Path, tmp_path: Path
) -> None:
    head = load_contig_head(models.longest_head)
    with torch.no_grad():
        head.contig[-1].weight.fill_(3e38)
    broken = tmp_path / "broken.safetensors"
    save_contig_head(head, broken, {})
    flags = ("--esm-model", models.esm2, "--dnabert-model", models.dnabert, "--devices", "cpu")
    virnuc.refused(
        4, "weights are broken", "predict", contigs, *flags, "--head", broken, "--out", tmp_path / "run"
    )


@pytest.mark.parametrize("threshold", ["1e-18", "0", "0.9999999", "1", "nan"])
def test_a_threshold_finer_than_the_scores_is_refused(
    virnuc: CommandLine, models: MadeModels, contigs: Path, tmp_path: Path, threshold: str
) -> None:
    command = ("predict", contigs, *models.flags, "--out", tmp_path / "run", "--threshold", threshold)
    assert "threshold" in virnuc.refused(2, threshold, *command)
    assert not (tmp_path / "run").exists()


def test_the_least_threshold_gives_no_warnings_of_numbers(
    virnuc: CommandLine, models: MadeModels, contigs: Path, tmp_path: Path
) -> None:
    flags = ("--esm-model", models.esm2, "--dnabert-model", models.dnabert, "--devices", "cpu")
    head = ("--head", models.longest_head, "--threshold", "0.000001")
    shown = virnuc.done("predict", contigs, *flags, *head, "--out", tmp_path / "run")
    assert "RuntimeWarning" not in shown.err
    assert any("virus" in row for row in rows(tmp_path / "run" / "contigs.tsv")[1:])
