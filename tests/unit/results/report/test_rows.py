"""Tables are read by the names of their columns, and contigs together with their regions."""

from pathlib import Path

import pytest

from tests.made_reports import island, many_contigs, write_run
from virnuc_core.errors import DamagedFileError
from virnuc_core.results.report.rows import iter_blocks, iter_contigs, iter_rows


def test_columns_are_found_by_name_wherever_they_are(tmp_path: Path) -> None:
    table = tmp_path / "t.tsv"
    table.write_text("b\ta\n1\t2\n3\t4\n")
    assert list(iter_rows(table, ("a", "b"))) == [("2", "1"), ("4", "3")]
    assert list(iter_rows(table, ("a",), optional=("c", "b"))) == [("2", "NA", "1"), ("4", "NA", "3")]
    assert list(iter_blocks(table, ("a", "b"))) == [(("2", "4"), ("1", "3"))]


@pytest.mark.parametrize("content", [None, "", "a\n1\n", "a\tb\n1\n", "a\tb\n1\t2\n\n"])
def test_a_table_that_is_not_whole_is_named(content: str | None, tmp_path: Path) -> None:
    table = tmp_path / "t.tsv"
    if content is not None:
        table.write_text(content)
    with pytest.raises(DamagedFileError, match=r"t\.tsv cannot be read as a table"):
        list(iter_rows(table, ("a", "b")))


def test_contigs_come_with_their_regions(tmp_path: Path) -> None:
    plain, first, second = many_contigs(3)[1], island("first"), island("second", 10, 20)
    folder, _ = write_run(tmp_path, [plain, first, second])
    contigs = list(iter_contigs(folder.contigs, folder.regions))
    assert [contig.name for contig in contigs] == ["contig_1", "first", "second"]
    assert [len(contig.regions) for contig in contigs] == [0, 1, 1]
    assert (contigs[1].regions[0].start, contigs[1].regions[0].end) == first.regions[0]
    assert contigs[2].viral_bases == 5000
    assert contigs[0].tier == plain.tier


def test_a_run_may_have_no_regions_and_no_tiers(tmp_path: Path) -> None:
    folder, _ = write_run(tmp_path, [island("one")], has_regions=False)
    lines = folder.contigs.read_text().splitlines()
    folder.contigs.write_text("".join(line.rsplit("\t", 2)[0] + "\n" for line in lines))
    [contig] = iter_contigs(folder.contigs, folder.regions)
    assert (contig.regions, contig.tier) == ((), "NA")


def test_regions_of_another_run_are_refused(tmp_path: Path) -> None:
    folder, _ = write_run(tmp_path, [island("one")])
    folder.regions.write_text(folder.regions.read_text().replace("one", "another"))
    with pytest.raises(DamagedFileError, match="'another' is no contig"):
        list(iter_contigs(folder.contigs, folder.regions))


@pytest.mark.parametrize("cell", ["nan", "inf", "much"])
def test_a_mean_that_is_no_number_is_refused(cell: str, tmp_path: Path) -> None:
    folder, _ = write_run(tmp_path, [many_contigs(2)[1]])
    cells = folder.contigs.read_text().splitlines()[1].split("\t")
    folder.contigs.write_text(folder.contigs.read_text().replace(cells[7], cell))
    with pytest.raises(DamagedFileError, match=r"contigs\.tsv"):
        list(iter_contigs(folder.contigs, folder.regions))
