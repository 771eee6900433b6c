"""The training of the bundled models, in miniature and on random genomes."""

import gzip
import itertools
import json
import string
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from scripts.train_bundled import data, evaluation, export, network, train
from scripts.train_bundled.data import DeviceChunks, View, cut
from scripts.train_bundled.genomes import ANY_VIRUS, CLASSES, Genomes, random_dna
from scripts.train_bundled.relatives import relatives
from virnuc_core.batching.tokenizers import DnabertTokenizer
from virnuc_core.columns import ByteColumn
from virnuc_core.models.catalogue import BUNDLED_TOKENIZER
from virnuc_core.models.checkpoint import load_model
from virnuc_core.models.contig_head import load_contig_head
from virnuc_core.models.hub import open_checkpoint
from virnuc_core.results.fdr import Guard
from virnuc_core.training import contigs

SOURCES = ("viral", "bacteria", "plasmid", "archaea", "fungi", "plant")


@pytest.fixture
def fasta(tmp_path: Path) -> Path:
    """Five genomes of each class; viruses have more of A."""
    rng = np.random.default_rng(0)
    path = tmp_path / "genomes.fa.gz"
    with gzip.open(path, "wt") as file:
        for number in range(5 * len(SOURCES)):
            source = SOURCES[number % len(SOURCES)]
            share = (0.55, 0.15, 0.15, 0.15) if source == "viral" else (0.25,) * 4
            sequence = "".join(rng.choice(list("ACGT"), 10_050, p=share))
            host = "phage" if number % 2 else "virus"
            file.write(
                f'>r{number} class={source} organism="{string.ascii_letters[number]}us {host}"\n{sequence}\n'
            )
    return path


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "genomes.tsv"
    path.write_text(
        "id\tclass\tfamily\torganism\nr0\tviral\tMicroviridae\tX\nr6\tviral\t\tuncultivated virus\n"
    )
    return path


def test_classes_come_from_headers_and_the_table(fasta: Path, table: Path) -> None:
    genomes = Genomes.load([fasta], table)
    found = [([*CLASSES, "?"][number]) for number in genomes.classes[:6].tolist()]
    assert found == ["prokaryotic virus", "bacterium", "plasmid", "archaeon", "eukaryote", "eukaryote"]
    assert genomes.classes[6] == ANY_VIRUS
    assert genomes.is_viral.tolist() == [number % 6 == 0 for number in range(30)]
    assert genomes.organisms[:2] == ("X", "bus phage")
    assert genomes.weights(relatives(genomes), 0.6)[genomes.is_viral].sum() == pytest.approx(
        0.46 / (0.46 + 0.16 + 0.06 + 0.055 + 0.05 + 0.045)
    )


def test_viruses_are_relatives_by_their_proteins() -> None:
    """Whatever their names and codons are; one fragment of a relative is enough, and others keep their groups."""
    rng = np.random.default_rng(0)
    codons = {
        "A": ("GCT", "GCA"),
        "L": ("CTG", "TTA"),
        "K": ("AAA", "AAG"),
        "G": ("GGC", "GGT"),
        "V": ("GTT", "GTA"),
    }

    def coded(protein: str) -> str:
        return "".join(codons[letter][rng.integers(2)] for letter in protein)

    first, second, third = ("".join(rng.choice(list(codons), 3000)) for _ in range(3))
    sequences = [
        coded(first),
        coded(first),
        coded(second),
        coded(first[1000:1500]),
        coded(third),
        coded(third),
    ]
    lengths = np.array(list(map(len, sequences)))
    genomes = Genomes(
        bases=ByteColumn.from_strings(sequences),
        classes=np.array([0, 1, 0, 0, 3, 3]),
        sources=("viral", "viral", "viral", "viral", "bacteria", "bacteria"),
        groups=np.array([0, 1, 0, 0, 2, 3]),
        organisms=("a", "b", "c", "d", "e", "f"),
        families=("",) * 6,
        genera=("",) * 6,
    )
    groups = relatives(genomes)
    assert groups[0] == groups[1] == groups[3]
    assert len(set(groups.tolist())) == 4
    weights = genomes.weights(groups, 0.5)
    shares = np.bincount(groups, weights)[groups]
    # Of the viruses of prokaryotes, a group three times as large has the root of that.
    sizes = np.bincount(groups, lengths)[groups]
    assert weights[[0, 3]].sum() / weights[2] == pytest.approx(
        lengths[[0, 3]].sum() / sizes[0] * (sizes[0] / sizes[2]) ** 0.5
    )
    assert shares[4] == pytest.approx(shares[5])
    assert weights[genomes.classes == 0].sum() / weights[1] == pytest.approx(0.26 / 0.2)


def test_a_tenth_of_the_chosen_tokens_stays_and_none_is_special(fasta: Path, table: Path) -> None:
    genomes = Genomes.load([fasta], table)
    chunks = DeviceChunks.build(
        cut(genomes, View(chunk_length=500), DnabertTokenizer(BUNDLED_TOKENIZER)), 30, torch.device("cpu")
    )
    made, rng = network.Network(0.0, 0.0), np.random.default_rng(0)
    clean = network.Tokens.take(chunks.protein, np.arange(len(chunks.sizes)), made.esm2)
    masked, chosen = clean.masked(32, (4, 24), rng)
    is_chosen = torch.zeros(len(clean.ids), dtype=torch.bool)
    is_chosen[chosen] = True
    assert (masked.ids[~is_chosen] == clean.ids[~is_chosen]).all()
    ends = torch.from_numpy(np.cumsum(clean.lengths))
    assert not is_chosen[ends - 1].any()
    assert not is_chosen[ends - torch.from_numpy(clean.lengths)].any()
    assert len(chosen) / len(clean.ids) == pytest.approx(0.5 * 0.175, rel=0.1)
    assert (masked.ids[chosen] == 32).float().mean() == pytest.approx(0.8, abs=0.02)
    assert (masked.ids[chosen] == clean.ids[chosen]).float().mean() == pytest.approx(0.1 + 0.1 / 20, abs=0.02)
    per_row = torch.tensor([rows.any() for rows in is_chosen.split(clean.lengths.tolist())])
    assert per_row.float().mean() == pytest.approx(0.5, abs=0.05)


def test_random_dna_resembles_eukaryotes_in_triplets_and_has_a_group_of_its_own(
    fasta: Path, table: Path
) -> None:
    genomes = Genomes.load([fasta], table)
    more = genomes.with_random_dna(3, 6000, seed=1)
    added = more.take(np.arange(len(genomes.classes), len(genomes.classes) + 3))
    assert added.bases.lengths.tolist() == [6000] * 3
    assert added.classes.tolist() == [CLASSES.index("eukaryote")] * 3
    assert not added.is_viral.any()
    assert len(set(added.groups.tolist())) == 1
    assert not set(added.groups) & set(genomes.groups)
    assert more.take(np.arange(len(genomes.classes))).bases.to_strings() == genomes.bases.to_strings()
    shares = [[text.count(base) / 6000 for base in "ACGT"] for text in added.bases.to_strings()]
    assert np.std(shares, axis=0).max() > 0.02  # compositions differ
    assert more.weights(more.groups, 0.6)[-3:].sum() == pytest.approx(
        0.035 / (0.46 + 0.16 + 0.06 + 0.055 + 0.05 + 0.045 + 0.035)
    )
    # A triplet that the template lacks is rare: no G after AA.
    template = ByteColumn.from_strings(["AACT" * 3000])
    [text] = random_dna(template, 1, 6000, np.random.default_rng(0)).to_strings()
    assert text.count("AAG") < 0.01 * text.count("AAC")


def test_every_chunk_has_rows_whatever_is_done_to_it(fasta: Path, table: Path) -> None:
    genomes = Genomes.load([fasta], table)
    tokenizer = DnabertTokenizer(BUNDLED_TOKENIZER)
    plain = cut(genomes, View(chunk_length=500), tokenizer)
    assert np.bincount(plain.record).tolist() == [21] * 30
    assert np.diff(plain.first_row).min() >= 1
    assert (plain.sizes[:, 0] + 2 == plain.protein.num_tokens).all()
    recoded = cut(genomes, View(chunk_length=500, recoded=0.9), tokenizer)
    assert (recoded.protein.input_ids == plain.protein.input_ids).all()
    assert len(recoded.dna.input_ids) != len(plain.dna.input_ids)
    with_errors = cut(genomes, View(chunk_length=500, shift=100, errors=0.05), tokenizer)
    assert np.bincount(with_errors.record).tolist() == [20] * 30


def test_vectors_are_those_of_their_rows_in_any_order(fasta: Path, table: Path) -> None:
    genomes = Genomes.load([fasta], table)
    chunks = DeviceChunks.build(
        cut(genomes, View(chunk_length=300), DnabertTokenizer(BUNDLED_TOKENIZER)), 30, torch.device("cpu")
    )
    made = network.Network(0.0, 0.0).eval()
    rows = np.random.default_rng(0).choice(len(chunks.sizes), 12, replace=False)

    def vectors(rows: npt.NDArray[np.int64]) -> torch.Tensor:
        protein = network.Tokens.take(chunks.protein, rows, made.esm2)
        dna = network.Tokens.take(chunks.dna, rows, made.dnabert)
        return torch.cat(made.vectors(protein, dna)[0], dim=1)

    one_by_one = torch.cat([vectors(rows[[place]]) for place in range(len(rows))])
    torch.testing.assert_close(vectors(rows), one_by_one, rtol=1e-4, atol=1e-5)


def test_observed_rates_are_those_of_the_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of scores that are probabilities, and of scores that say too much."""
    monkeypatch.setattr(evaluation, "_SAMPLES", {500: 40})
    rng = np.random.default_rng(0)
    is_viral = rng.random(4000) < 0.5
    margins = rng.normal(np.where(is_viral, 4.2, -4.2), 2.9)
    trusting, by_default = Guard(temperature=1.0, outliers=0.0, margin=0.0, caution=0.0), Guard()
    figures = {}
    for slope in (1.0, 3.0):
        p_virus = np.append(1 / (1 + np.exp(-slope * margins)), np.nan)
        rows = evaluation.fdr_rates(p_virus, np.append(is_viral, True), [trusting, by_default])
        assert {(row["promised"], row["share"]) for row in rows} == set(
            itertools.product((0.05, 0.1), (0.005, 0.02, 0.1, 0.5))
        )
        figures[slope] = {
            (row["guard"]["caution"], row["share"]): row for row in rows if row["promised"] == 0.1
        }
    for share in (0.005, 0.02, 0.1, 0.5):
        assert figures[1.0][0.35, share]["fdr"] <= 0.1
        assert figures[3.0][0.0, share]["fdr"] > 0.1
    assert figures[1.0][0.35, 0.5]["recall"] > 0.7


def test_a_training_goes_on_where_it_was_stopped_and_its_models_load(
    fasta: Path,
    table: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    small = {"num_layers": 1, "embedding_dim": 32, "num_heads": 2, "ffn_dim": 32}
    monkeypatch.setattr(network, "ESM2_SPEC", replace(network.ESM2_SPEC, **small))
    monkeypatch.setattr(network, "DNABERT_SPEC", replace(network.DNABERT_SPEC, **small))
    monkeypatch.setattr(train, "VIEWS", (View(chunk_length=500), View(chunk_length=1000, shift=7)))
    monkeypatch.setattr(contigs, "CONTIG_SIZES", ((3, 1, 2), (2, 9, 10)))
    monkeypatch.setattr(data, "_VOCABULARY_WINDOWS", 2_000)
    monkeypatch.setattr(evaluation, "_SAMPLES", {50: 2})
    monkeypatch.setattr(evaluation, "_CONTIGS", ((5000, 500), (5000, 2000)))

    def run(*further: str) -> str:
        files = (
            "--train",
            fasta,
            "--val",
            fasta,
            "--table",
            table,
            "--work",
            tmp_path / "work",
            "--out",
            tmp_path / "out",
        )
        options = ("--device", "cpu", "--jobs", "1", "--steps", "4", "--held-out", "0.2", *further)
        monkeypatch.setattr(sys, "argv", ["train", *map(str, files), *options])
        train.main()
        return capsys.readouterr().out

    assert "0 of 4 steps are done" in run("--seconds", "0")
    assert not (tmp_path / "out").exists()
    run()
    report = json.loads((tmp_path / "out" / "training.json").read_text())
    figures = report["figures"]["val"]
    assert figures["chunks of 500 bp"]["count"] == 30 * 21
    for name in ("chunks of 500 bp", "contigs of 5000 bp, chunks of 500"):
        rates = figures[name]["false discovery rates"]
        assert len(rates) == len(evaluation.GUARDS) * 2 * 4
        assert (
            rates[0].items()
            >= {"promised": 0.05, "share": 0.005, "size": 50, "guard": asdict(Guard())}.items()
        )
    assert "false discovery rates" not in report["figures"]["held out"]["chunks of 500 bp"]
    contigs_figures = figures["contigs of 5000 bp, chunks of 2000"]
    assert 0 < contigs_figures["errors"] < 1
    assert contigs_figures["errors of the 80% least novel, over all"] > 0
    assert 0 <= contigs_figures["unsure for novelty"] <= 1
    for folder, family in (("esm2_tiny", "esm2"), ("dnabert_tiny", "dnabert_s")):
        model = load_model(open_checkpoint(str(tmp_path / "out" / folder), family), "cpu", "fp32")
        assert model.spec.embedding_dim == 32
    head = load_contig_head(tmp_path / "out" / "heads" / "tiny.safetensors")
    assert head.spec.classes == CLASSES
    assert 0 < len(head.centroids) <= 30 * 8
    assert 0 < head.novelty_limit < 2
    assert (tmp_path / "out" / "heads" / "SHA256SUMS").read_text().count("tiny") == 1
    state = torch.load(tmp_path / "work" / "state.pt", weights_only=True)
    assert state["step"] == 4

    started = ("--work", str(tmp_path / "next"), "--out", str(tmp_path / "later"))
    tokenizer = tmp_path / "out" / "dnabert_tiny" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + "\n")
    run("--seconds", "0", "--start", str(tmp_path / "out"), *started)
    assert (tmp_path / "next" / "tokenizer.json").read_bytes() == tokenizer.read_bytes()
    begun = torch.load(tmp_path / "next" / "state.pt", weights_only=True)["network"]
    for name, weights in state["average"].items():
        is_kept = not any(word in name for word in ("_mlm.", "temperature"))
        assert torch.allclose(begun[name], weights, atol=1e-3) or not is_kept, name
    assert not torch.equal(begun["head.chunk.0.weight"], state["network"]["head.chunk.0.weight"])
    run("--start", str(tmp_path / "out"), "--start-share", "0.25", "--used-share", "0.5", *started)
    state = torch.load(tmp_path / "next" / "state.pt", weights_only=True)
    assert state["step"] == 2
    ended = state["average"]
    given = network.Network(0.0, 0.0)
    export.load_exported(given, tmp_path / "later")
    for name, weights in given.named_parameters():
        if "_mlm." not in name:
            expected = 0.75 * ended[name] + 0.25 * begun[name]
            assert torch.allclose(weights, expected, atol=1e-3), name
    report = json.loads((tmp_path / "later" / "training.json").read_text())
    assert report["start"]["steps"] == report["settings"]["steps"] == 4
