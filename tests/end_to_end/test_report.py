"""The report of a run in a real browser."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright.sync_api")

from playwright.sync_api import Browser, Locator, Page, expect

from tests.made_browser import chromium
from tests.made_reports import MadeContig, lysogen, many_contigs, sequence_of, write_run
from virnuc_core.results.report.page import write_report_page

HOSTILE = (
    "</script><script>window.hacked=1</script>",
    '"><img src=x onerror="window.hacked=1">',
    "=HYPERLINK(1)",
    "\u202egnp.exe",
    "\x1b[31mred\x07",
    "{{data}}&lt;b&gt;",
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def show(browser: Browser, tmp_path: Path) -> Iterator[Any]:
    """Opens the report of a run made of contigs; the page must neither complain nor fetch anything."""
    complaints: list[str] = []
    requests: list[str] = []

    def open_report(contigs: Sequence[MadeContig], **made: Any) -> Page:
        folder, document = write_run(tmp_path, contigs, **made)
        write_report_page(folder, document, sequence_of)
        page = browser.new_page(viewport={"width": 1200, "height": 900}, color_scheme="light")
        page.set_default_timeout(20_000)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(folder.page.as_uri())
        page.wait_for_selector("html[data-ready]", state="attached")
        return page

    yield open_report
    assert complaints == []
    assert {url for url in requests if not url.startswith("blob:")} == {(tmp_path / "report.html").as_uri()}
    for context in browser.contexts:
        context.close()


def rows(page: Page) -> list[str]:
    """Names in the rows in the document, from the top."""
    names: list[str] = page.eval_on_selector_all("td .name", "all => all.map(one => one.textContent)")
    return names


def column(page: Page, name: str) -> Locator:
    return page.get_by_role("columnheader", name=name)


def has_status(page: Page, text: str) -> None:
    expect(page.locator("#shown")).to_have_text(text)


def by_score(contig: MadeContig) -> float:
    return -1.0 if contig.score is None else contig.score


@pytest.mark.parametrize("width", [390, 820, 1440])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_table_comes_first_and_nothing_is_wider_than_the_page(width: int, theme: str, show: Any) -> None:
    page = show([lysogen("host"), *many_contigs(30)], rejected=[("4", "bad", "in.fa", "0", "empty sequence")])
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=theme)
    page.locator(".card summary").click()
    page.locator("#details summary").click()
    expect(page.locator(".track svg")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    table = page.locator(".scroller").bounding_box()
    assert table["y"] < page.locator(".card").bounding_box()["y"]
    assert page.locator("header a").all_inner_texts() == [
        "virus_summary.tsv",
        "virus.fa.gz",
        "virus.bed",
        "virus.gff3",
        "contigs.tsv",
    ]
    for part in ("1 provirus in 31 contigs", "expected false positives: 1.5 (25.0%)", "1 sequence skipped"):
        assert part in page.inner_text("header")
    assert "NVIDIA Made" in page.inner_text("#details")


def test_sorts_what_is_unknown_last(show: Any) -> None:
    made = many_contigs(40)
    page = show(made)
    order = ["virus", "nonviral", "unscored"]
    expected = sorted(made, key=lambda contig: (order.index(contig.call), -by_score(contig)))
    assert rows(page) == [contig.name for contig in expected]
    for direction in ("descending", "ascending"):
        column(page, "Virus score").get_by_role("button").click()
        assert column(page, "Virus score").get_attribute("aria-sort") == direction
        assert rows(page)[-6:] == [contig.name for contig in made if not contig.scored]
    heading = column(page, "Contig").get_by_role("button")
    heading.click()
    assert rows(page)[:3] == ["contig_0", "contig_1", "contig_2"]
    heading.click()
    assert rows(page)[0] == "contig_39"


def test_filters_and_downloads_what_is_left(show: Any) -> None:
    made = [*many_contigs(60), lysogen("prophage")]
    page = show(made)

    def leaves(is_left: Callable[[MadeContig], bool]) -> None:
        left = {contig.name for contig in made if is_left(contig)}
        has_status(page, f"{len(left)} of 61 contigs")
        assert set() < set(rows(page)) <= left

    page.fill("[name=text]", "CONTIG_1")
    leaves(lambda c: c.name.startswith("contig_1"))
    page.click("text=Reset")
    has_status(page, "61 contigs")
    page.select_option("[name=call]", label="virus")
    leaves(lambda c: c.call == "virus")
    page.select_option("[name=confidence]", label="confident")
    leaves(lambda c: c.call == "virus" and c.confidence == "confident")
    page.fill("[name=score]", "0.6")
    leaves(lambda c: by_score(c) >= 0.6 and c.confidence == "confident")
    with page.expect_download() as download:
        page.click("#export")
    assert download.value.suggested_filename == "contigs_filtered.tsv"
    header, *lines = Path(download.value.path()).read_text().splitlines()
    table = Path(page.url.removeprefix("file://")).with_name("contigs.tsv").read_text().splitlines()
    assert header == table[0]
    assert [line.partition("\t")[0] for line in lines] == rows(page)
    assert set(lines) <= set(table)
    page.click("text=Reset")
    has_status(page, "61 contigs")
    page.select_option("[name=class]", label="bacterium")
    page.fill("[name=min]", "2490")
    leaves(lambda c: c.bases >= 2490 and c.call in ("nonviral", "provirus"))
    page.fill("[name=text]", "nothing")
    has_status(page, "0 of 61 contigs")
    assert page.locator("#export").is_disabled()


def test_a_provirus_has_a_card_with_the_scores_along_its_contig(show: Any) -> None:
    page = show([MadeContig(name="plain", scores=(0.9,) * 5), lysogen("host", 40, 60, 120)])
    assert page.locator(".card").count() == 1
    assert page.locator(".card svg").count() == 0
    page.get_by_role("link", name="host").click()
    card = page.locator(".card")
    expect(card.locator("svg .shade")).to_be_visible()
    for part in ("20,001–30,000", "10.0 kb · score 0.970 · FDR 2.0% · likely"):
        assert part in card.inner_text()
    assert card.locator("svg rect.viral").count() == 13
    assert card.locator("svg rect.other").count() == 67
    title = card.locator("svg rect.viral title").first
    assert title.text_content() == "20,001–20,500: 0.900"
    card.get_by_role("button", name="Zoom in").click()
    assert card.locator("svg rect.viral").count() == 13
    assert card.locator("svg rect.other").count() == 14
    card.get_by_role("button", name="Show the whole contig").click()
    assert card.locator("svg rect.other").count() == 67


def test_a_class_has_the_same_colour_whatever_else_there_is(show: Any) -> None:
    def colours(made: Sequence[MadeContig]) -> dict[str, str]:
        page = show(made)
        read = (
            "all => all.map(one => [one.textContent, getComputedStyle(one.previousSibling).backgroundColor])"
        )
        return dict(page.eval_on_selector_all(".legend bdi", read))

    many = colours([MadeContig(name="a", scores=(0.9,)), MadeContig(name="b", scores=(0.1,))])
    alone = colours([MadeContig(name="b", scores=(0.1,))])
    assert set(many) == {"prokaryotic virus", "bacterium"}
    assert len(set(many.values())) == 2
    assert alone == {"bacterium": many["bacterium"]}


def test_without_classes_points_are_coloured_by_call(show: Any) -> None:
    page = show([MadeContig(name="a", scores=(0.9,)), MadeContig(name="b", scores=(0.1,))], frames="open")
    assert page.locator(".legend bdi").all_inner_texts() == ["virus", "nonviral"]
    assert page.locator(".scatter").count() == 2
    assert column(page, "Class").count() == 0


def test_hostile_names_are_text(show: Any) -> None:
    made = [MadeContig(name=name, scores=(0.1,) * 5, proviruses=((1, 1000),)) for name in HOSTILE]
    rejected = [("9", name, name, "0", name) for name in HOSTILE]
    page = show(made, rejected=rejected, links={HOSTILE[0]: 'https://x.example/"><b>'})
    assert sorted(rows(page)) == sorted(HOSTILE)
    assert sorted(page.locator("summary .name").all_text_contents()) == sorted(HOSTILE)
    page.locator(".card summary").first.click()
    assert page.evaluate("window.hacked === undefined")
    assert page.evaluate("document.querySelectorAll('script, img, iframe, dd b, h1 b').length") == 2


def test_of_ten_thousand_contigs_the_first_rows_are_shown(show: Any) -> None:
    made = [*many_contigs(10_000, chunks=4), lysogen("prophage")]
    page = show(made)
    has_status(page, "10,001 contigs")
    viral = sorted((contig for contig in made if contig.call == "virus"), key=lambda c: -by_score(c))
    assert rows(page) == [contig.name for contig in viral[:250]]
    assert page.locator("#rest").inner_text().startswith("Showing 250 of 10,001 rows")
    page.fill("[name=text]", "prophage")
    has_status(page, "1 of 10,001 contigs")
    assert rows(page) == ["prophage"]
    expect(page.locator("#rest")).to_be_empty()
