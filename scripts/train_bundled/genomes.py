"""Labelled genomes: classes, groups of relatives, and which groups are held out."""

import csv
import gzip
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import numpy as np
import numpy.typing as npt
from Bio.SeqIO.FastaIO import SimpleFastaParser

from virnuc_core.columns import ByteColumn

Int64 = npt.NDArray[np.int64]

CLASSES: Final = (
    "prokaryotic virus",
    "eukaryotic virus",
    "plasmid",
    "bacterium",
    "archaeon",
    "eukaryote",
    "organelle",
)
NUM_VIRUS: Final = 2
# Class of a virus whose host is not known, after those of the head.
ANY_VIRUS: Final = len(CLASSES)
# Source of DNA that is drawn at random: see `random_dna`.
_RANDOM: Final = "random"
_CLASS_OF: Final = {
    "plasmid": "plasmid",
    "bacteria": "bacterium",
    "archaea": "archaeon",
    "fungi": "eukaryote",
    "protozoa": "eukaryote",
    "plant": "eukaryote",
    "vertebrate": "eukaryote",
    "invertebrate": "eukaryote",
    "metazoa": "eukaryote",
    "mobile": "eukaryote",  # transposons, nearly all of plants and animals
    "organelle": "organelle",
    _RANDOM: "eukaryote",
}
_PROKARYOTIC, _OTHER_VIRUS = "virus of prokaryotes", "other virus"
# Share of the training samples of each class of the data, viruses of prokaryotes apart.
_SHARES: Final = {
    _PROKARYOTIC: 0.23,
    _OTHER_VIRUS: 0.23,
    "bacteria": 0.12,
    "plasmid": 0.085,
    "archaea": 0.065,
    "fungi": 0.06,
    "protozoa": 0.05,
    "plant": 0.05,
    "vertebrate": 0.035,
    _RANDOM: 0.025,
    "mobile": 0.02,
    "organelle": 0.02,
    "metazoa": 0.015,
    "invertebrate": 0.015,
}
_PROKARYOTIC_FAMILIES: Final = re.compile(
    r"phage|Kyanoviridae|Autographiviridae|Straboviridae|Herelleviridae|Vilmaviridae|Peduoviridae|Casjensviridae|"
    r"Rountreeviridae|Siphoviridae|Drexlerviridae|Aliceevansviridae|Ackermannviridae|Pootjesviridae|Schitoviridae|"
    r"Myoviridae|Podoviridae|Tectiviridae|Corticoviridae|Plectroviridae|Inoviridae|Microviridae|Rudiviridae|"
    r"Lipothrixviridae|Bicaudaviridae|Pleolipoviridae|Fuselloviridae|archaeal virus|prokaryotic_virus|Caudoviricetes|"
    r"Demerecviridae|Hafunaviridae|Druskaviridae|Magrovirus|Halovirus|Inovirus",
    re.IGNORECASE,
)
_HOST_UNKNOWN: Final = re.compile(
    r"uncultivated|Cenote-Taker test|^length=|^\d+\|length|metagenomic_virus", re.IGNORECASE
)
_FIELD: Final = re.compile(r'(\w+)=("[^"]*"|\S+)')
_SMALL_GROUP: Final = 20_000  # bases
_COMPOSITION_SPREAD: Final = 0.4  # standard deviation of the logarithm of the change of each base's share
_BASES: Final = np.frombuffer(b"ACGT", np.uint8)


@dataclass(frozen=True, kw_only=True, slots=True)
class Genomes:
    """R labelled records.

    Attributes:
        bases: upper-case sequences.
        classes: int64 (R,) index into the head's CLASSES, or ANY_VIRUS.
        sources: the class of each record in its header, or "organelle".
        groups: int64 (R,) related records share a group (family or genus, as far as known).
    """

    bases: ByteColumn
    classes: Int64
    sources: tuple[str, ...]
    groups: Int64

    @classmethod
    def load(cls, fastas: Sequence[Path], table: Path) -> Self:
        """Reads records with class= in their headers, and optionally group=, family=, and organism= or taxon=.

        The table, tab-separated with columns id, class, family and organism, has families of others.
        """
        with table.open(newline="") as handle:
            families = {
                row["id"]: (row["family"], row["organism"]) for row in csv.DictReader(handle, delimiter="\t")
            }
        sequences, classes, sources, kin = [], [], [], []
        for header, sequence in _records(fastas):
            fields = {name: value.strip('"') for name, value in _FIELD.findall(header)}
            stated = (
                fields.get("family", ""),
                fields.get("organism", fields.get("taxon", "").replace("_", " ")),
            )
            family, organism = families.get(header.split()[0], stated)
            source = "organelle" if fields.get("group", "").startswith("organelle") else fields["class"]
            sequences.append(sequence.upper())
            sources.append(source)
            classes.append(_class_of(source, family, organism, fields.get("group", "")))
            known_family = "" if family.startswith("(") else family
            kin.append(f"{source}:{known_family or _genus(organism)}")
        return cls(
            bases=ByteColumn.from_strings(sequences),
            classes=np.array(classes),
            sources=tuple(sources),
            groups=np.unique(kin, return_inverse=True)[1].astype(np.int64),
        )

    @property
    def is_viral(self) -> npt.NDArray[np.bool_]:
        return np.asarray((self.classes < NUM_VIRUS) | (self.classes == ANY_VIRUS))

    def take(self, rows: Int64) -> "Genomes":
        return self.of(rows, self.bases.take(rows))

    def of(self, rows: Int64, bases: ByteColumn) -> "Genomes":
        """Records with the labels of these rows (n,) and other bases, such as pieces of them."""
        return Genomes(
            bases=bases,
            classes=self.classes[rows],
            sources=tuple(self.sources[row] for row in rows.tolist()),
            groups=self.groups[rows],
        )

    def split(self, share: float, seed: int) -> tuple["Genomes", "Genomes"]:
        """Training and held-out genomes: of each source about `share` of the groups, at least one, but none of its largest.

        A group with more than a fifth of a source's bases is needed for training.
        """
        rng = np.random.default_rng(seed)
        sources, lengths = np.array(self.sources), self.bases.lengths
        held = np.zeros(len(sources), np.bool_)
        for source in sorted(set(self.sources)):
            groups, own = np.unique(self.groups[sources == source], return_inverse=True)
            sizes = np.bincount(own, lengths[sources == source])
            small = groups[sizes <= sizes.sum() / 5]
            if len(small) > 1:
                chosen = rng.choice(small, max(1, round(share * len(groups))), replace=False)
                held |= np.isin(self.groups, chosen) & (sources == source)
        return self.take(np.flatnonzero(~held)), self.take(np.flatnonzero(held))

    def with_random_dna(self, count: int, length: int, seed: int) -> "Genomes":
        """These and records of `random_dna` that resemble eukaryotes, in a group of their own."""
        eukaryotes = self.take(np.flatnonzero(self.classes == CLASSES.index("eukaryote")))
        drawn = random_dna(eukaryotes.bases, count, length, np.random.default_rng(seed))
        return Genomes(
            bases=ByteColumn(
                np.concatenate((self.bases.data, drawn.data)),
                np.concatenate((self.bases.offsets, self.bases.offsets[-1] + drawn.offsets[1:])),
            ),
            classes=np.concatenate((self.classes, np.full(count, CLASSES.index(_CLASS_OF[_RANDOM])))),
            sources=(*self.sources, *[_RANDOM] * count),
            groups=np.concatenate((self.groups, np.full(count, self.groups.max() + 1))),
        )

    def weights(self, group_power: float) -> npt.NDArray[np.float64]:
        """Sampling probability of each record, float64 (R,): fixed shares of sources, groups by their size to a power.

        Small groups, of which there are many, are drawn in proportion to their size.
        """
        lengths = self.bases.lengths.astype(float)
        group_size = _SMALL_GROUP + np.bincount(self.groups, lengths)
        weights: npt.NDArray[np.float64] = lengths * (group_size ** (group_power - 1))[self.groups]
        kinds = np.array(self.sources, object)
        kinds[self.is_viral] = _OTHER_VIRUS
        kinds[self.classes == CLASSES.index("prokaryotic virus")] = _PROKARYOTIC
        for kind in set(kinds.tolist()):
            own = kinds == kind
            weights[own] *= _SHARES[kind] / weights[own].sum()
        return np.asarray(weights / weights.sum())


def random_dna(templates: ByteColumn, count: int, length: int, rng: np.random.Generator) -> ByteColumn:
    """DNA without genes: Markov chains of order 2, each with the triplets of a template in another composition.

    There are few eukaryotes to learn from; from these, a network learns what any DNA looks like that codes for nothing.
    """
    codes = np.full(256, -1)
    codes[_BASES] = np.arange(4)
    tables = np.empty((count, 16, 4))
    for row, template in enumerate(rng.integers(0, len(templates), count).tolist()):
        own = codes[templates.data[templates.offsets[template] : templates.offsets[template + 1]]]
        triplets = own[:-2] * 16 + own[1:-1] * 4 + own[2:]
        known = (own[:-2] >= 0) & (own[1:-1] >= 0) & (own[2:] >= 0)
        tables[row] = 1 + np.bincount(triplets[known], minlength=64).reshape(16, 4)
    tables *= np.exp(rng.normal(0, _COMPOSITION_SPREAD, (count, 1, 4)))
    limits = np.cumsum(tables / tables.sum(2, keepdims=True), axis=2)[:, :, :3]
    context, rows = rng.integers(0, 16, count), np.arange(count)
    drawn = np.empty((count, length), np.uint8)
    for place in range(length):
        base = (rng.random((count, 1)) > limits[rows, context]).sum(1)
        drawn[:, place] = _BASES[base]
        context = (context * 4 + base) % 16
    return ByteColumn(drawn.ravel(), np.arange(count + 1) * length)


def _records(fastas: Sequence[Path]) -> Iterator[tuple[str, str]]:
    for path in fastas:
        with gzip.open(path, "rt") as file:
            yield from SimpleFastaParser(file)


def _class_of(source: str, family: str, organism: str, group: str) -> int:
    if source == "organelle":
        return CLASSES.index("organelle")
    if source != "viral":
        return CLASSES.index(_CLASS_OF[source])
    described = f"{family} {organism} {group}"
    if _HOST_UNKNOWN.search(organism) or _HOST_UNKNOWN.search(group):
        return ANY_VIRUS
    return 0 if _PROKARYOTIC_FAMILIES.search(described) else 1


def _genus(organism: str) -> str:
    """First word of the organism's name that is not an accession number."""
    words = [word for word in organism.replace("|", " ").split() if not any(c.isdigit() for c in word)]
    return words[0] if words else organism
