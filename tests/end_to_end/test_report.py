"""The report of a run in a real browser."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright.sync_api")

from playwright.sync_api import Browser, Locator, Page, expect

from tests.made_browser import chromium
from tests.made_reports import MadeContig, island, many_contigs, write_run
from virnuc_core.results.report.page import write_report_page
from virnuc_core.specs import CHUNKS_BY_RECORD

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

    def open_report(
        contigs: Sequence[MadeContig],
        *,
        notes: Sequence[str] = (),
        **made: Any,
    ) -> Page:
        folder, document = write_run(tmp_path, contigs, **made)
        document["notes"] = [*document["notes"], *notes]
        write_report_page(folder, document)
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
    assert requests == [(tmp_path / "report.html").as_uri()]
    for context in browser.contexts:
        context.close()


def rows(page: Page) -> list[str]:
    """Names in the rows in the document, from the top."""
    names: list[str] = page.eval_on_selector_all(".open", "all => all.map(one => one.textContent)")
    return names


def row(page: Page, name: str) -> Locator:
    return page.get_by_role("button", name=name, exact=True)


def open_track(page: Page, name: str) -> Locator:
    """Opens a contig's row and waits until its track is drawn."""
    row(page, name).click()
    expect(page.locator(".detail .track svg")).to_be_visible()
    return page.locator(".detail .track")


def column(page: Page, name: str) -> Locator:
    return page.get_by_role("columnheader", name=name)


def has_status(page: Page, text: str) -> None:
    expect(page.locator("#shown")).to_have_text(text)


def test_says_what_was_found_with_what(show: Any) -> None:
    rejected = [("4", "bad", "in.fa", "0", "empty sequence")]
    links = {"mlflow_run_url": "https://mlflow.example/1", "other": "javascript:alert(1)"}
    notes = ["The head was calibrated on made chunks.", "The models are small."]
    page = show([island("prophage"), *many_contigs(3)], rejected=rejected, links=links, notes=notes)
    text = page.inner_text("body")
    assert page.inner_text("h1").endswith("1 other has a viral region; 1 has no score.")
    facts = (
        "in.fa",
        "head_500.pth",
        "1 record was not used",
        "empty sequence",
        "NVIDIA Made",
        "2 January 2026",
    )
    for part in facts:
        assert part in text, part
    assert "calibrated on made chunks" in page.inner_text("#confidence")
    assert "The models are small." in page.inner_text("#found")
    assert "open reading frames" in page.inner_text("#facts")
    assert "have no stop-free reading frame" in page.inner_text("#unscored")
    assert page.eval_on_selector_all(
        "a[href]", "all => all.map(a => a.href).filter(a => a.startsWith('http') || a.startsWith('java'))"
    ) == ["https://mlflow.example/1"]


def test_sorts_what_is_unknown_last(show: Any) -> None:
    made = many_contigs(40)
    page = show(made)
    for direction in ("ascending", "descending"):
        column(page, "Mean p_virus").get_by_role("button").click()
        assert column(page, "Mean p_virus").get_attribute("aria-sort") == direction
        assert sorted(rows(page)[-6:]) == sorted(c.name for c in made if not c.scored)


def test_filters_by_name_call_tier_and_length(show: Any) -> None:
    made = [*many_contigs(60), island("prophage")]
    page = show(made)

    def leaves(is_left: Callable[[MadeContig], bool]) -> None:
        left = {contig.name for contig in made if is_left(contig)}
        has_status(page, f"{len(left)} of 61 contigs")
        assert set() < set(rows(page)) <= left

    page.fill("[name=text]", "CONTIG_1")
    leaves(lambda c: c.name.startswith("contig_1"))
    page.fill("[name=text]", "phage")
    leaves(lambda c: c.name == "prophage")
    page.click("text=Reset")
    has_status(page, "61 contigs")
    page.uncheck("[name=call][value=other]")
    page.uncheck("[name=call][value=unscored]")
    leaves(lambda c: c.call == "virus")
    page.select_option("[name=tier]", label="confident")
    leaves(lambda c: c.call == "virus" and c.tier == "confident")
    page.click("text=Reset")
    page.fill("[name=min]", "2490")
    page.fill("[name=max]", "10000")
    leaves(lambda c: 2490 <= c.bases <= 10_000)
    page.click("text=Reset")
    page.select_option("[name=part]", label="viral in part")
    leaves(lambda c: c.name == "prophage")
    page.fill("[name=text]", "nothing")
    has_status(page, "0 of 61 contigs")
    expect(page.locator(".nothing")).to_be_visible()


def test_a_contig_opens_its_track_and_keys_read_it(show: Any) -> None:
    prophage = MadeContig(
        name="odd", p_virus=(0.9, None, 0.2, 0.81, *island("x").p_virus), regions=((1, 2000),), length=61_777
    )
    page = show([prophage, *many_contigs(2)])
    track = open_track(page, "odd")
    assert row(page, "odd").get_attribute("aria-expanded") == "true"
    assert track.locator("svg .shade").count() == 1
    assert track.locator(".readout").inner_text() == "1 – 61,777 bp"
    table = Path(page.url.removeprefix("file://")).with_name("predictions.tsv").read_text()
    track.locator(".plot").focus()
    for line in table.splitlines()[1:25]:
        _, number, start, end, _, p_virus, _, status = line.split("\t")
        page.keyboard.press("ArrowRight")
        said = track.locator(".readout").inner_text()
        value = "no score" if status != "scored" else f"p_virus {float(p_virus):.2f}"
        assert said == f"chunk {number}, {int(start):,} – {int(end):,} bp: {value}"
    track.locator(".region").click()
    assert track.locator(".readout").inner_text().startswith("1 – ")
    assert not track.locator(".readout").inner_text().endswith("61,777 bp")
    track.get_by_role("button", name="Show the whole contig").click()
    assert track.locator(".readout").inner_text() == "1 – 61,777 bp"
    row(page, "odd").click()
    assert page.locator(".detail").count() == 0


def test_islands_are_drawn_when_they_come_into_sight(show: Any) -> None:
    page = show([island(f"host_{i}", 40 - i, 60) for i in range(15)])
    assert page.locator(".card").count() == 12
    drawn = page.locator(".card svg").count()
    assert drawn < 12
    page.locator(".card").last.scroll_into_view_if_needed()
    page.wait_for_selector(".card:last-child svg")
    assert page.locator(".card svg").count() > drawn


def test_hostile_names_are_text(show: Any) -> None:
    made = [MadeContig(name=name, p_virus=(0.9,) * 5, regions=((1, 2500),)) for name in HOSTILE]
    rejected = [("9", name, name, "0", name) for name in HOSTILE]
    page = show(made, rejected=rejected, links={HOSTILE[0]: 'https://x.example/"><b>'})
    assert sorted(rows(page)) == sorted(HOSTILE)
    page.locator(".open").first.click()
    assert page.evaluate("window.hacked === undefined")
    assert page.evaluate("document.querySelectorAll('script, img, iframe, body b b').length") == 2


def test_the_longest_stretches_are_named(show: Any) -> None:
    made = MadeContig(name="mixed", p_virus=(0.9, 0.2, None))
    other = MadeContig(name="other", p_virus=(0.1, 0.3, 0.2, 0.1, 0.1), regions=((1, 500),))
    page = show([made, other], frames="longest")
    assert "longest stop-free stretches" in page.inner_text("#facts")
    assert "1 of 8 chunks (13\u2009%) has no stop-free stretch of 10 codons" in page.inner_text("#unscored")
    assert page.locator("td.c-predicted").all_inner_texts() == ["prokaryotic virus", "bacterium"]
    assert [text.strip() for text in page.locator("td.c-p_virus").all_inner_texts()] == ["0.550", "0.160"]
    classes = page.locator("#found table").inner_text()
    assert "prokaryotic virus\t1\t1,500 bp" in classes
    assert "bacterium\t1\t2,500 bp" in classes
    assert "bacterium · 20\u2009% in regions · novelty 0.250" in page.inner_text("#regions .card")
    row(page, "mixed").click()
    detail = page.locator(".detail")
    assert "4 chunks or more; this one has 3." in detail.inner_text()
    assert "Novelty 0.250" in detail.inner_text()


def test_chunks_of_records_cut_by_their_own_length_are_where_the_table_has_them(show: Any) -> None:
    made = [
        MadeContig(name=f"of_{length}", p_virus=(0.9,) * chunks, length=length)
        for length, chunks in ((1999, 4), (4999, 5), (7000, 7), (9000, 9))
    ]
    page = show(made, frames="longest", chunk_length=CHUNKS_BY_RECORD)
    assert "500 bp below 2,000 bp, 1,000 bp" in page.inner_text("#facts")
    table = Path(page.url.removeprefix("file://")).with_name("predictions.tsv").read_text()
    lines = [line.split("\t") for line in table.splitlines()[1:]]
    for contig in made:
        track = open_track(page, contig.name)
        track.locator(".plot").focus()
        for _, number, start, end, *_ in (line for line in lines if line[0] == contig.name):
            page.keyboard.press("ArrowRight")
            place = f"chunk {number}, {int(start):,} – {int(end):,} bp: "
            assert track.locator(".readout").inner_text().startswith(place)
        row(page, contig.name).click()


def test_of_ten_thousand_contigs_the_first_rows_are_shown_and_keys_go_through_them(show: Any) -> None:
    made = [*many_contigs(10_000, chunks=4), island("prophage")]
    page = show(made)
    has_status(page, "10,001 contigs")
    scored = sorted((c for c in made if c.scored), key=lambda c: -sum(c.scored) / len(c.scored))
    names = rows(page)
    assert names == [contig.name for contig in scored[:250]]
    rest = page.locator(".rest")
    assert rest.inner_text().startswith("The first 250 of 10,001 rows.")
    assert rest.locator("a").get_attribute("href") == "contigs.tsv"
    row(page, names[0]).focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.ariaExpanded") == "true"
    for key, position in (("PageDown", 13), ("ArrowUp", 12), ("End", -1), ("Home", 0)):
        page.keyboard.press(key)
        assert page.evaluate("document.activeElement.textContent") == names[position]
    heading = column(page, "Contig").get_by_role("button")
    heading.click()
    assert rows(page)[:3] == ["contig_0", "contig_1", "contig_2"]
    heading.click()
    assert rows(page)[:2] == ["prophage", "contig_9999"]
    page.fill("[name=text]", "prophage")
    has_status(page, "1 of 10,001 contigs")
    assert rows(page) == ["prophage"]
    expect(rest).to_be_empty()
