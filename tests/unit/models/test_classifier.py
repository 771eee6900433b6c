"""The classifier head: its layers, its file formats, and files that must not be loaded."""

import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from virnuc_core.errors import CheckpointError, MismatchError
from virnuc_core.models.catalogue import BUNDLED_HEADS
from virnuc_core.models.classifier import MLPClassifier, classifier_fingerprint, load_classifier


def trained(in_features: int = 7, hidden_width: int = 512) -> MLPClassifier:
    """A head whose running statistics differ from the initial ones."""
    torch.manual_seed(0)
    classifier = MLPClassifier(in_features, hidden_width)
    for _ in range(3):
        classifier(torch.randn(32, in_features) * 2 + 1)
    return classifier.eval()


def test_probabilities_are_those_of_the_formula() -> None:
    classifier = trained()
    features = torch.randn(5, 7)
    state = classifier.state_dict()
    hidden = features @ state["hidden_layer.weight"].T + state["hidden_layer.bias"]
    scale = state["bn1.weight"] / torch.sqrt(state["bn1.running_var"] + 1e-5)
    hidden = ((hidden - state["bn1.running_mean"]) * scale + state["bn1.bias"]).clamp(min=0)
    logits = hidden @ state["output_layer.weight"].T + state["output_layer.bias"]
    probabilities = classifier.virus_probabilities(features)
    torch.testing.assert_close(probabilities, torch.softmax(logits, 1))
    torch.testing.assert_close(probabilities.sum(1), torch.ones(5))
    assert not probabilities.requires_grad


def test_features_of_another_width_are_refused() -> None:
    with pytest.raises(MismatchError, match="takes 7 features and the models give 8"):
        trained().virus_probabilities(torch.zeros(2, 8))


def test_a_head_can_be_trained() -> None:
    classifier = MLPClassifier(4).train()
    classifier(torch.randn(8, 4)).sum().backward()
    assert classifier.hidden_layer.weight.grad is not None


@pytest.mark.parametrize("name", ["head.safetensors", "head.pt", "head.pth", "head.bin"])
def test_state_dicts_are_loaded_ready_to_score(name: str, tmp_path: Path) -> None:
    classifier = trained(hidden_width=16)
    if name.endswith("safetensors"):
        save_file(classifier.state_dict(), tmp_path / name)
    else:
        torch.save(classifier.state_dict(), tmp_path / name)
    loaded = load_classifier(tmp_path / name)
    assert not loaded.training
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    features = torch.randn(3, 7)
    assert torch.equal(loaded.virus_probabilities(features), classifier.virus_probabilities(features))


def test_a_whole_pickled_module_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published = type("MLPClassifier", (nn.Module,), {"__module__": "__main__"})
    monkeypatch.setattr(sys.modules["__main__"], "MLPClassifier", published, raising=False)
    original = trained()
    module = published()
    for name, child in original.named_children():
        module.add_module(name, child)
    torch.save(module, tmp_path / "model.pth")
    monkeypatch.undo()
    features = torch.randn(3, 7)
    loaded = load_classifier(tmp_path / "model.pth")
    assert torch.equal(loaded.virus_probabilities(features), original.virus_probabilities(features))


class Evil:
    """Unpickling it would create a file."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[object, ...]:
        return (os.system, (self.command,))


@pytest.mark.parametrize("zipped", [True, False])
def test_pickled_code_does_not_run(zipped: bool, tmp_path: Path) -> None:
    evil = trained().state_dict() | {"note": Evil(f"touch {tmp_path / 'ran'}")}
    torch.save(evil, tmp_path / "evil.pth", _use_new_zipfile_serialization=zipped)
    with pytest.raises(
        CheckpointError, match=r"evil\.pth holds a pickled posix\.system, which could run code"
    ):
        load_classifier(tmp_path / "evil.pth")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("protocol", [2, 5])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (trained, r" of virnuc_core\.models\.classifier\.MLPClassifier"),
        (lambda: Evil("touch ran"), r" of posix\.system"),
        (lambda: [1, 2], ""),
    ],
)
def test_a_plain_pickle_is_called_what_it_is(
    content: Callable[[], object], words: str, protocol: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "plain.pth"
    path.write_bytes(pickle.dumps(content(), protocol))
    with pytest.raises(CheckpointError, match=rf"plain\.pth is a plain Python pickle{words}, not a file of"):
        load_classifier(path)
    assert not (tmp_path / "ran").exists()


def test_a_pickled_class_that_is_not_known_is_refused(tmp_path: Path) -> None:
    torch.save(nn.Bilinear(2, 2, 2), tmp_path / "other.pth")
    with pytest.raises(CheckpointError, match=r"holds a pickled torch\.nn\.modules\.linear\.Bilinear"):
        load_classifier(tmp_path / "other.pth")


@pytest.mark.parametrize(
    "content",
    [
        nn.Linear(3, 2),
        nn.Linear(3, 2).state_dict(),
        {"hidden_layer.weight": torch.zeros(3)},
        {"a": 1},
        [1, 2],
        torch.zeros(3),
    ],
)
def test_something_else_is_refused(content: object, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "other.pth")
    with pytest.raises(CheckpointError, match=r"other\.pth is not an MLPClassifier head"):
        load_classifier(tmp_path / "other.pth")


def test_a_head_with_other_outputs_is_refused(tmp_path: Path) -> None:
    state = trained().state_dict() | {
        "output_layer.weight": torch.zeros(5, 512),
        "output_layer.bias": torch.zeros(5),
    }
    save_file(state, tmp_path / "five.safetensors")
    with pytest.raises(CheckpointError, match=r"five\.safetensors is not an MLPClassifier head"):
        load_classifier(tmp_path / "five.safetensors")


@pytest.mark.parametrize("name", ["head.safetensors", "head.pth"])
def test_a_damaged_file_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"half a file")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_classifier(tmp_path / name)


def test_the_fingerprint_is_that_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert classifier_fingerprint(tmp_path / "a") == expected


@pytest.mark.parametrize("name", BUNDLED_HEADS)
def test_bundled_heads_fit_the_bundled_models(name: str) -> None:
    assert load_classifier(BUNDLED_HEADS[name]).in_features == (256 if name.endswith("-dna") else 512)
