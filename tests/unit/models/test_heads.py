"""Heads of both kinds: their formulas, what they read alone and in order, and their files."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from tests.made_models import make_contig_head, make_head
from virnuc_core.errors import CheckpointError
from virnuc_core.models.catalogue import HEAD_METADATA
from virnuc_core.models.heads import ContigHead, Head, MLPClassifier, load_head, save_head
from virnuc_core.models.scores import ScoredRows

HEAD = make_contig_head(6, 5)
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=6)


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
    probabilities = classifier.score_rows(features)["scores"]
    torch.testing.assert_close(probabilities, torch.softmax(logits, 1))
    torch.testing.assert_close(probabilities.sum(1), torch.ones(5))
    assert not probabilities.requires_grad


@pytest.mark.parametrize("write", [save_head, lambda head, path: torch.save(head.state_dict(), path)])
def test_heads_are_loaded_ready_to_score(write: Callable[[Head, Path], None], tmp_path: Path) -> None:
    """Pickled whole modules are in tests/golden."""
    classifier = trained(hidden_width=16)
    path = tmp_path / ("head.safetensors" if write is save_head else "head.pth")
    write(classifier, path)
    loaded = load_head(path)
    assert not loaded.training
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    features = torch.randn(3, 7)
    assert torch.equal(loaded.score_rows(features)["scores"], classifier.score_rows(features)["scores"])


NO_HEAD = "is not an MLPClassifier head"
FIVE_CLASSES = {"output_layer.weight": torch.zeros(5, 512), "output_layer.bias": torch.zeros(5)}
OTHER_FILES: list[tuple[str, Callable[[], object], str]] = [
    ("a.pth", lambda: nn.Bilinear(2, 2, 2), r"cannot be read .*GLOBAL torch\.nn\.modules\.linear\.Bilinear"),
    ("a.pth", lambda: nn.Linear(3, 2), "contains no state dict"),
    ("a.pth", lambda: {"hidden_layer.weight": torch.zeros(3)}, NO_HEAD),
    ("a.pth", lambda: {"a": 1}, r"contains more than tensors \(a\)"),
    ("a.pth", lambda: [1, 2], "contains no state dict"),
    ("a.pth", lambda: trained().state_dict() | FIVE_CLASSES, NO_HEAD),
    ("a.pth", lambda: b"half a file", "cannot be read as a torch file"),
    ("a.safetensors", lambda: b"half a file", "cannot be read as safetensors"),
    ("a.pth", lambda: pickle.dumps(trained(), 2), "cannot be read as a torch file"),
    ("a.pth", lambda: pickle.dumps([1, 2], 5), "cannot be read as a torch file"),
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
        load_head(path)


def made_codes(count: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(count, 64)).astype(np.float32))


def slow_hidden(head: ContigHead, codes: Tensor) -> Tensor:
    """Hidden states (C, W) of the chunks of one contig, chunk by chunk."""
    hidden = head.enter(codes)
    for block in head.blocks:
        normed, mixed = block.norm(hidden), hidden.clone()
        [reach] = block.mix.dilation
        for chunk in range(len(codes)):
            mixed[chunk] += block.mix.bias
            for tap in range(7):
                other = chunk + (tap - 3) * reach
                if 0 <= other < len(codes):
                    mixed[chunk] += block.mix.weight[:, 0, tap] * normed[other]
        hidden = mixed + block.feed(mixed)
    return hidden


def slow_contig(head: ContigHead, codes: Tensor) -> tuple[Tensor, Tensor]:
    """Logits in context (C, K) and logits (K,) of one contig."""
    hidden = slow_hidden(head, codes)
    share = functional.softmax(head.attention(hidden), dim=0)
    values = head.values(hidden).unflatten(1, (head.spec.pooling_heads, -1))
    pooled = (values * share.unsqueeze(2)).sum(0).flatten()
    features = torch.cat((pooled, codes.mean(0), torch.tensor([float(len(codes))]).log()))
    return head.context(hidden), head.contig(features[None])[0]


@settings(deadline=None, max_examples=30)
@given(LENGTHS, st.sampled_from([1, 5, 1 << 13]))
def test_contigs_are_read_alone_and_in_segments_of_any_size(lengths: list[int], segment: int) -> None:
    codes = made_codes(sum(lengths))
    contig = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    found = HEAD.contigs(codes, contig, len(lengths), segment)
    for number, own in enumerate(codes.split(lengths)):
        context, logits = slow_contig(HEAD, own)
        torch.testing.assert_close(found.context[contig == number], context, atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(found.logits[number], logits, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(found.embedding.norm(dim=1), torch.ones(len(lengths)))


def test_a_contig_without_chunks_changes_nothing() -> None:
    codes = made_codes(12)
    without = HEAD.contigs(codes, torch.tensor([0] * 5 + [1] * 7), 2)
    found = HEAD.contigs(codes, torch.tensor([1] * 5 + [3] * 7), 5)
    torch.testing.assert_close(found.logits[[1, 3]], without.logits)
    torch.testing.assert_close(found.context, without.context)
    assert torch.isfinite(found.logits).all()


def test_the_order_of_chunks_counts_and_that_of_rows_does_not() -> None:
    codes, contig = made_codes(20), torch.zeros(20, dtype=torch.int64)
    there, back = (HEAD.contigs(x, contig, 1).logits for x in (codes, codes.flip(0)))
    assert (there - back).abs().max() > 1e-3
    chunk = torch.tensor([0, 0, 1, 2, 2])
    pooled = HEAD.chunk_codes(codes[:5], chunk, 3)
    swapped = HEAD.chunk_codes(codes[[1, 0, 2, 4, 3]], chunk, 3)
    torch.testing.assert_close(pooled, swapped)
    torch.testing.assert_close(pooled[1], codes[2])
    weight = functional.softmax(HEAD.gate(codes[:2]), dim=0)
    torch.testing.assert_close(pooled[0], (weight * codes[:2]).sum(0))


def test_rows_chunks_and_contigs_without_a_row() -> None:
    sizes = torch.tensor([[20, 300], [100, 500], [30, 300]])
    results = HEAD.score_rows(torch.randn(3, 11), sizes)
    for head in (HEAD, MLPClassifier(11)):
        rows = ScoredRows(
            read=lambda name, begin, end: results[name][begin:end].numpy(),
            chunk=np.array([1, 1, 3]),
            contig=np.array([0, 0, 1, 2]),
            num_contigs=4,
        )
        found = head.score_contigs(rows)
        assert (
            np.isnan(found.p_chunk).tolist()
            == np.isnan(found.p_region).tolist()
            == [True, False, True, False]
        )
        assert np.isnan(found.p_contig).tolist() == [False, True, False, True]
        assert found.is_novel.tolist() == [False] * 4
        # A chunk of one row has the score of its row.
        assert found.p_chunk[3] == pytest.approx(results["scores"][2, 1].item(), abs=1e-6)
    margins = []
    for temperature in (10.0, 20.0):
        head = make_contig_head(6, 5)
        head.context_temperature.fill_(temperature)
        margins.append(torch.tensor(head.score_contigs(rows).p_region[3]).logit())
    torch.testing.assert_close(margins[0], 2 * margins[1])


def test_temperatures_divide_the_log_odds_of_a_virus() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.5, -1.0], [0.0, 0.0, 3.0, 0.0]])
    p = functional.softmax(logits, dim=1)[:, :2].sum(1)
    margin = torch.logit(p)
    torch.testing.assert_close(HEAD.virus_margin(logits), margin)
    temperature = 1.2 + 0.3 * torch.tensor([1.0, 20.0]).log()
    torch.testing.assert_close(HEAD.contig_margin(logits, torch.tensor([1, 20])), margin / temperature)
    falling = make_contig_head(6, 5)
    falling.contig_temperature.copy_(torch.tensor([1.0, -1.0]))
    margins = falling.contig_margin(logits, torch.tensor([1000, 1_000_000]))
    torch.testing.assert_close(margins, margin / 0.25)


@pytest.mark.parametrize("head", [HEAD, MLPClassifier(11)])
def test_files_are_reproducible_and_give_the_same_head(head: Head, tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.safetensors" for name in ("one", "two")]
    for path in paths:
        save_head(head, path, {"chunk_length": 300})
    assert paths[0].read_bytes() == paths[1].read_bytes()
    loaded = load_head(paths[0])
    assert (type(loaded), loaded.facts, loaded.training) == (type(head), head.facts, False)
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    for name, tensor in head.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor) or "num_batches" in name


def spec_with(**changes: object) -> Callable[[dict[str, Any], dict[str, Tensor]], None]:
    return lambda stated, _: stated["spec"].update(changes)


def tensor_with(name: str, value: float) -> Callable[[dict[str, Any], dict[str, Tensor]], None]:
    return lambda _, state: state.update({name: torch.full_like(state[name], value)})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda stated, _: stated.pop("spec"), "Input should be an object"),
        (lambda _, state: state.pop("gate.weight"), "gate.weight"),
        (lambda _, state: state.update({"gate.weight": state["gate.weight"].half()}), "not finite fp32"),
        (tensor_with("gate.weight", float("nan")), "gate.weight contains values that are not finite"),
        (tensor_with("chunk_temperature", 0.0), "temperature is not positive"),
        (tensor_with("context_temperature", -1.0), "temperature is not positive"),
        (spec_with(hidden_width=10**9), "size mismatch"),
        (spec_with(hidden_width=-1), "hidden_width: Input should be greater than 0"),
        (spec_with(pooling_heads=3), "width 128 is not a multiple of 3 heads"),
        (spec_with(code_width=32), "code_width: Input should be 64"),
        (spec_with(num_virus=4), "4 of 4 classes are viruses"),
        (spec_with(classes=["a", "b", "c", "a"]), "two have the same name"),
        (spec_with(classes="abcd"), "spec|classes"),
        (spec_with(code="os.system"), "code: it is an unknown field"),
    ],
)
def test_damaged_heads_are_refused(
    damage: Callable[[dict[str, Any], dict[str, Tensor]], None], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "head.safetensors"
    save_head(HEAD, path)
    state = dict(HEAD.state_dict())
    stated = {"frames": "longest", "spec": {**vars_of(HEAD)}}
    damage(stated, state)
    save_file(state, path, metadata={HEAD_METADATA: json.dumps(stated)})
    with pytest.raises(CheckpointError, match=message):
        load_head(path)


def vars_of(head: ContigHead) -> dict[str, Any]:
    names = ("dna_width", "protein_width", "classes", "num_virus")
    return {name: getattr(head.spec, name) for name in names}


def test_other_files_are_refused(tmp_path: Path) -> None:
    mlp = make_head(tmp_path / "mlp.safetensors", 11)
    save_head(load_head(mlp), tmp_path / "longest.safetensors", {"frames": "longest"})
    torch.save(HEAD.state_dict(), tmp_path / "head.pt")
    with pytest.raises(CheckpointError, match="is not a head of virnuc train for the longest ORFs"):
        load_head(tmp_path / "longest.safetensors")
    with pytest.raises(CheckpointError, match=NO_HEAD):
        load_head(tmp_path / "head.pt")
    whole = tmp_path / "whole.safetensors"
    save_head(HEAD, whole)
    (tmp_path / "cut.safetensors").write_bytes(whole.read_bytes()[:-100])
    with pytest.raises(CheckpointError):
        load_head(tmp_path / "cut.safetensors")
