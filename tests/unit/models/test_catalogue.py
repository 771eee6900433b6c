"""Names of models and heads."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.made_models import GOLDEN
from virnuc_core.errors import CheckpointError, MismatchError, UsageError
from virnuc_core.models.catalogue import (
    BUNDLED_HEADS,
    CATALOGUE,
    HubCommit,
    chunk_rule_of,
    find_entries,
    frames_of,
    head_of,
    known_names,
    require_head,
    require_known_model,
    resolve_head,
)
from virnuc_core.models.heads import MLPClassifier, save_head
from virnuc_core.settings import RunConfig
from virnuc_core.specs import CHUNKS_BY_RECORD, chunk_steps


def test_names_are_unique_and_published_models_pinned_to_a_commit() -> None:
    names = [(entry.family, entry.name.casefold()) for entry in CATALOGUE]
    assert len(set(names)) == len(names)
    published = [entry.source for entry in CATALOGUE if isinstance(entry.source, HubCommit)]
    assert all(re.fullmatch(r"[0-9a-f]{40}", source.revision) for source in published)
    assert known_names("dnabert_s") == ["tiny", "DNABERT-S", "DNABERT-2"]


@pytest.mark.parametrize("name", ["650M", "650m", "esm2_t33_650M_UR50D", "facebook/esm2_t33_650M_UR50D"])
def test_a_model_is_found_by_each_of_its_names(name: str) -> None:
    assert [entry.name for entry in find_entries(name, "esm2")] == ["650M"]
    assert [entry.name for entry in find_entries(name, None)] == ["650M"]
    assert find_entries(name, "dnabert_s") == []
    assert [entry.family for entry in find_entries("tiny", None)] == ["esm2", "dnabert_s"]


def test_what_can_be_the_name_of_a_model_or_head(tmp_path: Path) -> None:
    for name in ("tiny", "facebook/esm2_t33_650M_UR50D", "random:3B", "someone/something", str(tmp_path)):
        require_known_model(name, "esm2")
    assert set(BUNDLED_HEADS) == {"tiny"}
    assert all(resolve_head(name) == path for name, path in BUNDLED_HEADS.items())
    (tmp_path / "mine.pth").touch()
    assert resolve_head(str(tmp_path / "mine.pth")) == tmp_path / "mine.pth"


@pytest.mark.parametrize(
    "name",
    ["3b-large", "random:4B", "DNABERT-S", "/not/a/path", "a\0b", "x" * 5000, "~nobody-here/x", "\ud800"],
)
def test_what_can_be_no_name(name: str) -> None:
    with pytest.raises(CheckpointError, match=r"there is no model .*: .*650M, 3B, 15B"):
        require_known_model(name, "esm2")
    with pytest.raises(CheckpointError, match=r"there is no classifier head .*: .* not one of tiny\."):
        resolve_head(name)


def test_the_head_asked_for_or_the_bundled_one() -> None:
    assert head_of(RunConfig()) == "tiny"
    assert head_of(RunConfig(chunk_length=400, esm_model="TINY")) == "tiny"
    assert head_of(RunConfig(chunk_length=400, esm_model="3B", head="a.pth")) == "a.pth"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"esm_model": "3B"}, r"no head is bundled for tiny and 3B: give --head"),
        ({"dnabert_model": "/models/mine"}, r"no head is bundled for mine and tiny"),
        ({"esm_model": None}, "need both"),
        ({"dnabert_model": None, "head": "a.pth"}, "need both"),
    ],
)
def test_no_head_is_guessed(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        head_of(RunConfig(**changes))


def test_a_head_that_states_its_chunk_length_is_for_no_other(tmp_path: Path) -> None:
    head = tmp_path / "head.safetensors"
    save_head(MLPClassifier(8), head, {"chunk_length": 300})
    assert resolve_head(str(head), 300) == resolve_head(str(head)) == head
    message = (
        r"head\.safetensors was trained for chunks of 300 bp, and these have 500 bp\. Use --chunk-length 300"
    )
    with pytest.raises(MismatchError, match=message):
        resolve_head(str(head), 500)
    with pytest.raises(MismatchError, match="was trained for chunks of 300 bp"):
        require_head(RunConfig(chunk_length=500, head=str(head)))
    save_head(MLPClassifier(8), head)
    for stating_nothing in (head, GOLDEN / "classifier" / "pickled_module.pth"):
        assert resolve_head(str(stating_nothing), 500) == stating_nothing


def test_a_head_that_states_its_frames_is_for_no_others(tmp_path: Path) -> None:
    head = tmp_path / "head.safetensors"
    for facts, own, other in (
        ({"frames": "longest"}, "longest", "open"),
        ({}, "open", "longest"),
        (None, "open", "longest"),
    ):
        save_head(MLPClassifier(8), head, facts)
        assert frames_of(RunConfig(head=str(head))) == own
        assert resolve_head(str(head), frames=own) == resolve_head(str(head)) == head
        with pytest.raises(MismatchError, match=rf"Use a head for those \(`virnuc train --frames {other}`\)"):
            resolve_head(str(head), frames=other)
    assert frames_of(RunConfig()) == "longest"
    assert frames_of(RunConfig(head=str(head), frames="longest")) == "longest"


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
    config = RunConfig(chunk_length=chosen, head=str(head))
    require_head(config)
    assert chunk_rule_of(config) == expected


def test_the_bundled_head_is_for_chunks_of_every_length() -> None:
    assert chunk_rule_of(RunConfig()) == CHUNKS_BY_RECORD
    for rule in (300, 500, 2000, CHUNKS_BY_RECORD):
        assert resolve_head("tiny", rule, "longest") == BUNDLED_HEADS["tiny"]
    with pytest.raises(MismatchError, match=r"head tiny was trained for the longest stop-free stretches"):
        resolve_head("tiny", 500, "open")


def test_records_cut_by_their_length_are_not_for_a_head_of_one_length(tmp_path: Path) -> None:
    head = tmp_path / "head.safetensors"
    save_head(MLPClassifier(8), head, {"chunk_length": 300})
    with pytest.raises(MismatchError, match=r"these have 500 bp in records below 2000 bp, 1000 bp\. Use"):
        resolve_head(str(head), CHUNKS_BY_RECORD)


@pytest.mark.parametrize(
    "rule",
    [
        "",
        "auto:",
        "auto:500<2000",
        "auto:500<2000,1000<2000,2000",
        "auto:500,1000",
        "500",
        "auto:0",
        "auto:a",
    ],
)
def test_a_malformed_chunk_rule_is_refused(rule: str) -> None:
    with pytest.raises(ValueError, match=r"gives no chunk lengths|invalid literal"):
        chunk_steps(rule)


@pytest.mark.parametrize(
    "facts",
    ["{", "[]", '{"chunk_length": "300"}', '{"chunk_length": 0}', '{"frames": "all"}', '{"frames": 1}'],
)
def test_a_head_whose_facts_cannot_be_read_is_refused(tmp_path: Path, facts: str) -> None:
    head = tmp_path / "head.safetensors"
    save_file({"a": torch.zeros(1)}, head, metadata={"virnuc_head": facts})
    with pytest.raises(CheckpointError, match="does not say properly what it was trained for"):
        resolve_head(str(head), 500)
