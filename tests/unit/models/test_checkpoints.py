import pytest

from virnuc_core.errors import CheckpointError, UsageError
from virnuc_core.models.hub import family_of, open_checkpoint


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("esm2:8M", ("esm2", "8M")),
        ("dnabert:/a/b", ("dnabert_s", "/a/b")),
        ("dnabert:zhihan1996/DNABERT-S", ("dnabert_s", "zhihan1996/DNABERT-S")),
        ("random:650M", ("esm2", "random:650M")),
        ("dnabert:random:tiny", ("dnabert_s", "random:tiny")),
    ],
)
def test_family_of(model: str, expected: tuple[str, str]) -> None:
    assert family_of(model) == expected


def test_unknown_model_alone_is_refused() -> None:
    with pytest.raises(CheckpointError, match="nonsense"):
        family_of("nonsense")


def test_random_weights_are_for_catalogue_models_only() -> None:
    with pytest.raises(CheckpointError, match=r"random:nonsense is not .* one of tiny, 8M"):
        open_checkpoint("random:nonsense", "esm2")
    with pytest.raises(CheckpointError, match="random:650M"):
        open_checkpoint("random:650M", "dnabert_s")
    with pytest.raises(UsageError, match="esm2:random:tiny"):
        open_checkpoint("random:tiny", None)


def test_a_random_checkpoint_is_found_again_by_its_location() -> None:
    checkpoint = open_checkpoint("random:DNABERT-S", None)
    assert open_checkpoint(str(checkpoint.location), "dnabert_s") == checkpoint
