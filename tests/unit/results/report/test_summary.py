"""Sums over contigs, and which of them are shown."""

from pathlib import Path

from tests.made_reports import MadeContig, island, many_contigs, write_run
from virnuc_core.results.report.labels import UNLABELLED
from virnuc_core.results.report.rows import Contig, iter_contigs
from virnuc_core.results.report.summary import summarise

VIRAL = MadeContig(name="viral", p_virus=(0.9, 0.8, None, 0.7), regions=((1, 2000),), tier="confident")


def read(folder: Path, made: list[MadeContig]) -> list[Contig]:
    run, _ = write_run(folder, made)
    return list(iter_contigs(run.contigs, run.regions))


def test_totals_are_those_of_the_table(tmp_path: Path) -> None:
    made = [*many_contigs(50), island("island"), VIRAL]
    totals = summarise(read(tmp_path, made), None, 10).totals
    calls = [contig.call for contig in made]
    assert totals.calls == {call: calls.count(call) for call in ("virus", "other", "unscored")}
    assert totals.contigs == 52
    assert totals.bases == sum(contig.bases for contig in made)
    assert sum(totals.tiers.values()) == calls.count("virus")
    assert totals.histogram.sum() == 52 - calls.count("unscored")
    assert (totals.regions, totals.region_bases) == (2, 20 * 500 + 2000)
    assert (totals.island_contigs, totals.hosts) == (1, 1), "a contig that is viral throughout is no island"


def test_what_matters_most_is_kept_whatever_comes_first(tmp_path: Path) -> None:
    contigs = read(tmp_path, [*many_contigs(40), island("island"), VIRAL])
    ordered = summarise(contigs, None, 1000).shown
    assert ordered[0].name == "island", "viral, with the most viral chunks"
    viral = [contig.call == "virus" or bool(contig.regions) for contig in ordered]
    assert viral == sorted(viral, reverse=True)
    for given in (contigs, contigs[::-1]):
        assert summarise(given, None, 7).shown == ordered[:7]
    assert summarise(contigs, None, 0).shown == ()


def test_classes_add_up_to_all(tmp_path: Path) -> None:
    contigs = read(tmp_path, [*many_contigs(10), VIRAL])
    labels = {"viral": "phage", "contig_1": "bacteria", "contig_2": "bacteria", "elsewhere": "phage"}
    summary = summarise(contigs, labels, 100)
    assert {label: totals.contigs for label, totals in summary.classes.items()} == {
        "bacteria": 2,
        "phage": 1,
        UNLABELLED: 8,
    }
    assert summary.classes["phage"].calls == {"virus": 1}
    assert summary.unknown_labels == 1
    assert summarise(contigs, None, 100).classes == {}
