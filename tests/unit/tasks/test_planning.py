import pytest

from tasks.planning import family_of
from virnuc_core.errors import CheckpointError


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("esm2:8M", ("esm2", "8M")),
        ("dnabert:/a/b", ("dnabert_s", "/a/b")),
        ("dnabert:zhihan1996/DNABERT-S", ("dnabert_s", "zhihan1996/DNABERT-S")),
    ],
)
def test_family_of(model: str, expected: tuple[str, str]) -> None:
    assert family_of(model) == expected


def test_unknown_model_alone_is_refused() -> None:
    with pytest.raises(CheckpointError, match="nonsense"):
        family_of("nonsense")
