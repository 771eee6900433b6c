"""The benchmark of loading, on small files."""

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import loading
from virnuc_core.models.catalogue import find_entries
from virnuc_core.models.hub import open_checkpoint


@pytest.mark.parametrize("file_format", ["safetensors", "torch"])
def test_files_are_models_of_the_catalogue(file_format: str, tmp_path: Path) -> None:
    [entry] = find_entries("8M", "esm2")
    weights = loading.make_folder(entry.spec, tmp_path, file_format)
    assert {path.name for path in tmp_path.iterdir()} == {weights.name, "config.json"}
    checkpoint = open_checkpoint(str(tmp_path), None)
    assert checkpoint.spec == entry.spec
    drawn = torch.cat([part.flatten() for parts in checkpoint.published_parts().values() for part in parts])
    assert float(drawn.std()) == pytest.approx(loading.STD, rel=1e-2)
    assert drawn.unique().numel() > 0.5 * drawn.numel()


def test_ratios_are_to_one_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "loading.json"
    options = ["--model", "8M", "--precision", "fp32", "--repeats", "1", "--folder", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["loading", *options, "--out", str(out)])
    loading.main()
    report = json.loads(out.read_text())
    [found] = report["rounds"]
    assert report["file"]["bytes"] > found["weight_bytes"] > 0.99 * report["file"]["bytes"]
    assert report["over_reading"]["load"] == pytest.approx(found["seconds"] / found["read"])
    assert str(tmp_path) not in report["command"]
    assert [path.name for path in tmp_path.iterdir()] == ["loading.json"]
