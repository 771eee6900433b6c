"""The classifier head: its layers, its file formats, and files that must not be loaded."""

import pickle
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from virnuc_core.errors import CheckpointError, MismatchError
from virnuc_core.models.classifier import MLPClassifier, classifier_fingerprint, load_classifier


def trained(hidden_width: int = 512) -> MLPClassifier:
    """A head whose running statistics are not those of a fresh one."""
    torch.manual_seed(0)
    classifier = MLPClassifier(7, hidden_width)
    for _ in range(3):
        classifier(torch.randn(32, 7) * 2 + 1)
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
    with pytest.raises(MismatchError, match="takes 7 features and the models give 8"):
        classifier.virus_probabilities(torch.zeros(2, 8))


@pytest.mark.parametrize("name", ["head.safetensors", "head.pth", "module.pth"])
def test_heads_are_loaded_ready_to_score(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    classifier, path = trained(hidden_width=16), tmp_path / name
    if name == "head.safetensors":
        state = classifier.state_dict()
        del state["bn1.num_batches_tracked"]
        save_file(state, path)
    elif name == "head.pth":
        torch.save(classifier.state_dict(), path)
    else:
        published = type("MLPClassifier", (nn.Module,), {"__module__": "__main__"})
        monkeypatch.setattr(sys.modules["__main__"], "MLPClassifier", published, raising=False)
        module = published()
        for child_name, child in classifier.named_children():
            module.add_module(child_name, child)
        torch.save(module, path)
        monkeypatch.undo()
    loaded = load_classifier(path)
    assert not loaded.training
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    features = torch.randn(3, 7)
    assert torch.equal(loaded.virus_probabilities(features), classifier.virus_probabilities(features))


NO_HEAD = "is not an MLPClassifier head"
FIVE_CLASSES = {"output_layer.weight": torch.zeros(5, 512), "output_layer.bias": torch.zeros(5)}
OTHER_FILES: list[tuple[str, Callable[[], object], str]] = [
    ("a.pth", lambda: nn.Bilinear(2, 2, 2), r"holds a pickled torch\.nn\.modules\.linear\.Bilinear"),
    ("a.pth", lambda: nn.Linear(3, 2), NO_HEAD),
    ("a.pth", lambda: {"hidden_layer.weight": torch.zeros(3)}, NO_HEAD),
    ("a.pth", lambda: {"a": 1}, NO_HEAD),
    ("a.pth", lambda: [1, 2], NO_HEAD),
    ("a.pth", lambda: trained().state_dict() | FIVE_CLASSES, NO_HEAD),
    ("a.pth", lambda: b"half a file", "cannot be read as a torch file"),
    ("a.safetensors", lambda: b"half a file", "cannot be read as safetensors"),
    *(
        ("a.pth", lambda made=made, protocol=protocol: pickle.dumps(made(), protocol), message)
        for made, message in (
            (trained, "is a plain Python pickle, not a"),
            (lambda: [1, 2], "is a plain Python pickle, not a file of"),
        )
        for protocol in (2, 5)
    ),
]


@pytest.mark.parametrize(("name", "content", "message"), OTHER_FILES)
def test_what_is_no_head_is_refused(
    name: str, content: Callable[[], object], message: str, tmp_path: Path
) -> None:
    path, made = tmp_path / name, content()
    if isinstance(made, bytes):
        path.write_bytes(made)
    else:
        torch.save(made, path)
    with pytest.raises(CheckpointError, match=rf"{path.name} .*{message}"):
        load_classifier(path)


def test_the_fingerprint_is_that_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert classifier_fingerprint(tmp_path / "a") == expected
