"""Names of models and heads."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from virnuc_core.errors import CheckpointError, MismatchError, UsageError
from virnuc_core.models.catalogue import (
    BUNDLED_HEADS,
    CATALOGUE,
    chunks_of,
    find_entries,
    head_of,
    known_names,
    require_known_model,
    resolve_head,
)
from virnuc_core.models.heads import MLPClassifier, save_head
from virnuc_core.settings import RunConfig
from virnuc_core.specs import CHUNKS_BY_RECORD, ChunkRule, FrameRule


def test_names_are_unique_and_published_models_pinned_to_a_commit() -> None:
    names = [(entry.spec.family, entry.name.casefold()) for entry in CATALOGUE]
    assert len(set(names)) == len(names)
    published = [entry for entry in CATALOGUE if not entry.bundled]
    assert all(re.fullmatch(r"[0-9a-f]{40}", entry.revision) for entry in published)
    assert known_names("dnabert_s") == "tiny, DNABERT-S, DNABERT-2"


@pytest.mark.parametrize("name", ["650M", "650m", "esm2_t33_650M_UR50D", "facebook/esm2_t33_650M_UR50D"])
def test_a_model_is_found_by_each_of_its_names(name: str) -> None:
    assert [entry.name for entry in find_entries(name, "esm2")] == ["650M"]
    assert [entry.name for entry in find_entries(name, None)] == ["650M"]
    assert find_entries(name, "dnabert_s") == []
    assert [entry.spec.family for entry in find_entries("tiny", None)] == ["esm2", "dnabert_s"]


@pytest.mark.parametrize(
    "name",
    ["3b-large", "random:4B", "DNABERT-S", "/not/a/path", "a\0b", "x" * 5000, "~nobody-here/x", "\ud800"],
)
def test_what_can_be_no_name(name: str) -> None:
    with pytest.raises(CheckpointError, match=r"unknown model .*: .*650M, 3B, 15B"):
        require_known_model(name, "esm2")
    with pytest.raises(CheckpointError, match=r"unknown classifier head .*: .* not one of tiny\."):
        resolve_head(name)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "tiny"),
        ({"chunk_length": 400, "esm_model": "TINY"}, "tiny"),
        ({"chunk_length": 400, "esm_model": "3B", "head": "a.pth"}, "a.pth"),
        ({"esm_model": "3B"}, r"no classifier head is bundled for tiny and 3B: give --head"),
        ({"dnabert_model": "/models/mine"}, r"no classifier head is bundled for mine and tiny"),
        ({"esm_model": None}, "need both"),
        ({"dnabert_model": None, "head": "a.pth"}, "need both"),
    ],
)
def test_the_head_asked_for_or_the_bundled_one(changes: dict[str, object], expected: str) -> None:
    if " " not in expected:
        assert head_of(RunConfig(**changes)) == expected
        return
    with pytest.raises(UsageError, match=expected):
        head_of(RunConfig(**changes))


@pytest.mark.parametrize(
    ("facts", "chunk_length", "frames", "message"),
    [
        ({"chunk_length": 300}, 300, None, None),
        ({"chunk_length": 300}, None, None, None),
        ({"chunk_length": 300}, 500, None, "of 300 bp, but these have 500 bp. Use --chunk-length 300"),
        (
            {"chunk_length": 300},
            CHUNKS_BY_RECORD,
            None,
            "have 500 bp for sequences below 2,000 bp, else 1,000 bp. Use",
        ),
        ({}, 500, "open", None),
        (None, 500, "open", None),
        ({}, 500, "longest", "Use a head for those (`virnuc train --frames longest`)"),
        (None, 500, "longest", "Use a head for those (`virnuc train --frames longest`)"),
        ({"frames": "longest"}, 500, "longest", None),
        ({"frames": "longest"}, 500, "open", "Use a head for those (`virnuc train --frames open`)"),
    ],
)
def test_a_head_is_for_the_chunks_and_frames_that_it_states(
    facts: dict[str, object] | None,
    chunk_length: ChunkRule | None,
    frames: FrameRule | None,
    message: str | None,
    tmp_path: Path,
) -> None:
    head = tmp_path / "head.safetensors"
    save_head(MLPClassifier(8), head, facts)
    assert chunks_of(RunConfig(head=str(head)))[1] == (facts or {}).get("frames", "open")
    if message is None:
        assert resolve_head(str(head), chunk_length, frames) == head
        return
    with pytest.raises(MismatchError, match=re.escape(message)):
        resolve_head(str(head), chunk_length, frames)


def test_a_false_discovery_rate_needs_a_calibrated_head(tmp_path: Path) -> None:
    head = tmp_path / "head.safetensors"
    config = RunConfig(head=str(head), fdr=0.1)
    save_head(MLPClassifier(8), head, {"frames": "longest"})
    assert chunks_of(config)[1] == "longest"
    for facts in ({"frames": "open"}, {"frames": "longest", "calibrated": False}):
        save_head(MLPClassifier(8), head, facts)
        with pytest.raises(UsageError, match=r"head\.safetensors is not one"):
            chunks_of(config)


@pytest.mark.parametrize(
    ("facts", "chosen", "expected"),
    [
        ({"frames": "longest"}, "auto", CHUNKS_BY_RECORD),
        ({"frames": "longest"}, 700, 700),
        ({"frames": "longest", "chunk_length": 300}, "auto", 300),
        ({"chunk_length": 300}, "auto", 300),
        ({}, "auto", 500),
        ({}, None, None),
    ],
)
def test_the_head_chooses_the_chunk_length(
    tmp_path: Path, facts: dict[str, object], chosen: int | str | None, expected: int | str | None
) -> None:
    head = tmp_path / "head.safetensors"
    save_head(MLPClassifier(8), head, facts)
    assert chunks_of(RunConfig(chunk_length=chosen, head=str(head)))[0] == expected


def test_the_bundled_head_is_for_chunks_of_every_length() -> None:
    assert chunks_of(RunConfig()) == (CHUNKS_BY_RECORD, "longest")
    for rule in (300, 500, 2000, CHUNKS_BY_RECORD):
        assert resolve_head("tiny", rule, "longest") == BUNDLED_HEADS["tiny"]
    with pytest.raises(MismatchError, match=r"head tiny was trained on the longest ORFs"):
        resolve_head("tiny", 500, "open")


@pytest.mark.parametrize(
    "facts",
    ["{", "[]", '{"chunk_length": "300"}', '{"chunk_length": 0}', '{"frames": "all"}', '{"frames": 1}'],
)
def test_a_head_whose_facts_cannot_be_read_is_refused(tmp_path: Path, facts: str) -> None:
    head = tmp_path / "head.safetensors"
    save_file({"a": torch.zeros(1)}, head, metadata={"virnuc_head": facts})
    with pytest.raises(CheckpointError, match="has invalid training metadata"):
        resolve_head(str(head), 500)
