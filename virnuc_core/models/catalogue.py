"""The models and heads that go by a short name: published ones, pinned to a commit, and the bundled ones."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from virnuc_core.specs import Family

_BUNDLED: Final = Path(__file__).parent / "bundled"


@dataclass(frozen=True, slots=True)
class HubCommit:
    """One state of a repository on the model hub: OWNER/NAME and its 40-digit commit."""

    repo: str
    revision: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CatalogueEntry:
    """One model known by name.

    Attributes:
        name: the short name, unique within its family.
        family: architecture.
        num_layers: transformer layers.
        embedding_dim: width of its vectors.
        source: where it is: on the hub, or in a folder of this package.
    """

    name: str
    family: Family
    num_layers: int
    embedding_dim: int
    source: HubCommit | Path

    def is_called(self, name: str) -> bool:
        """Whether `name` is the short name, the repository, or the repository without its owner."""
        names = {self.name}
        if isinstance(self.source, HubCommit):
            names |= {self.source.repo, self.source.repo.rpartition("/")[2]}
        return name.casefold() in {known.casefold() for known in names}


def _esm2(name: str, num_layers: int, embedding_dim: int, revision: str) -> CatalogueEntry:
    source = HubCommit(f"facebook/esm2_t{num_layers}_{name}_UR50D", revision)
    return CatalogueEntry(
        name=name, family="esm2", num_layers=num_layers, embedding_dim=embedding_dim, source=source
    )


def _dnabert(name: str, repo: str, revision: str) -> CatalogueEntry:
    source = HubCommit(repo, revision)
    return CatalogueEntry(name=name, family="dnabert_s", num_layers=12, embedding_dim=768, source=source)


def _tiny(family: Family, num_layers: int, folder: str) -> CatalogueEntry:
    return CatalogueEntry(
        name="tiny", family=family, num_layers=num_layers, embedding_dim=256, source=_BUNDLED / folder
    )


CATALOGUE: Final = (
    _tiny("esm2", 5, "esm2_tiny"),
    _esm2("8M", 6, 320, "c731040fcd8d73dceaa04b0a8e6329b345b0f5df"),
    _esm2("35M", 12, 480, "6fbf070e65b0b7291e7bbcd451118c216cff79d8"),
    _esm2("150M", 30, 640, "a695f6045e2e32885fa60af20c13cb35398ce30c"),
    _esm2("650M", 33, 1280, "08e4846e537177426273712802403f7ba8261b6c"),
    _esm2("3B", 36, 2560, "476b639933c8baad5ad09a60ac1a87f987b656fc"),
    _esm2("15B", 48, 5120, "5fbca39631164edc1d402a5aa369f982f72ee282"),
    _tiny("dnabert_s", 4, "dnabert_tiny"),
    _dnabert("DNABERT-S", "zhihan1996/DNABERT-S", "00e47f96cdea35e4b6f5df89e5419cbe47d490c6"),
    _dnabert("DNABERT-2", "zhihan1996/DNABERT-2-117M", "7bce263b15377fc15361f52cfab88f8b586abda0"),
)

BUNDLED_HEADS: Final = {
    f"tiny-{length}": _BUNDLED / "heads" / f"tiny_{length}.safetensors" for length in (300, 500)
}


def find_entries(name: str, family: Family | None) -> list[CatalogueEntry]:
    """The entries called `name`, ignoring case; at most one within a family.

    Args:
        name: short name, repository, or repository without its owner.
        family: look among these models only; None looks among all.
    """
    return [entry for entry in CATALOGUE if family in (None, entry.family) and entry.is_called(name)]


def known_names(family: Family | None) -> list[str]:
    """Short names, each once, for messages."""
    return list(dict.fromkeys(entry.name for entry in CATALOGUE if family in (None, entry.family)))
