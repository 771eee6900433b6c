"""Names of models and heads."""

import re
from pathlib import Path

import pytest

from virnuc_core.models.catalogue import BUNDLED_HEADS, CATALOGUE, HubCommit, find_entries, known_names

PUBLISHED = {entry.name: entry.source for entry in CATALOGUE if isinstance(entry.source, HubCommit)}


def test_names_are_unique_within_a_family() -> None:
    names = [(entry.family, entry.name.casefold()) for entry in CATALOGUE]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_are_pinned_to_a_commit(name: str) -> None:
    assert re.fullmatch(r"[0-9a-f]{40}", PUBLISHED[name].revision)


def test_esm2_sizes_and_repositories() -> None:
    sizes = {e.name: (e.num_layers, e.embedding_dim) for e in CATALOGUE if e.family == "esm2"}
    sizes.pop("tiny")
    assert sizes == {
        "8M": (6, 320),
        "35M": (12, 480),
        "150M": (30, 640),
        "650M": (33, 1280),
        "3B": (36, 2560),
        "15B": (48, 5120),
    }
    assert PUBLISHED["650M"].repo == "facebook/esm2_t33_650M_UR50D"


@pytest.mark.parametrize("name", ["650M", "650m", "esm2_t33_650M_UR50D", "facebook/esm2_t33_650M_UR50D"])
def test_a_model_is_found_by_each_of_its_names(name: str) -> None:
    assert [entry.name for entry in find_entries(name, "esm2")] == ["650M"]
    assert [entry.name for entry in find_entries(name, None)] == ["650M"]
    assert find_entries(name, "dnabert_s") == []


def test_tiny_is_a_model_of_each_family() -> None:
    assert [entry.family for entry in find_entries("tiny", None)] == ["esm2", "dnabert_s"]
    assert all(isinstance(entry.source, Path) for entry in find_entries("tiny", None))
    assert known_names("dnabert_s") == ["tiny", "DNABERT-S", "DNABERT-2"]


def test_bundled_heads_have_a_name_for_each_chunk_length() -> None:
    assert set(BUNDLED_HEADS) == {"tiny-300", "tiny-500"}
