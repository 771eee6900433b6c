"""Pictures of reports for the documentation, taken with a headless Chromium.

    python -m scripts.report_screenshots --val ../shared/data/val.fa.gz --chromium /usr/bin/chromium --out docs/images

Runs `virnuc predict` with the bundled models on the example contigs, and on bacterial windows, two of them with the
genome of a phage pasted in. Needs `playwright` and a Chromium.
"""

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, Literal

import dnaio
from playwright.sync_api import Browser, Page, sync_playwright

from virnuc_cli.main import main as virnuc

EXAMPLES: Final = Path(__file__).parents[1] / "examples"
# Names of contigs, and the records of the validation set, with first and last base, that they are put together from.
PASTED: Final = {
    "P_distasonis_with_crAss-like_phage": (
        ("NC_009615.1_1520001-1560000", 1, 40_000),
        ("phage_comp_69_cycle_1", 1, 36_492),
        ("NC_009615.1_2400001-2440000", 1, 40_000),
    ),
    "A_johnsonii_with_crAss-like_phage": (
        ("NZ_RHXE01000003.1_1-40000", 1, 25_000),
        ("k149_27590", 3_001, 28_000),
        ("NZ_RHXE01000003.1_1-40000", 25_001, 40_000),
    ),
    "P_distasonis": (("NC_009615.1_1520001-1560000", 1, 40_000),),
    "A_johnsonii": (("NZ_RHXE01000003.1_1-40000", 1, 40_000),),
    "O_oeni": (("NZ_ACSE01000016.1_40001-80000", 1, 40_000),),
    "crAss-like_phage": (("k149_60461", 1, 64_434),),
}
WIDTH: Final = 1280
HEIGHT: Final = 985
SETTLE_MILLISECONDS: Final = 600


def write_pasted(val: Path, out: Path) -> None:
    """Writes the contigs of `PASTED`.

    Raises:
        SystemExit: a record is not in the validation set.
    """
    needed = {name for parts in PASTED.values() for name, _, _ in parts}
    with dnaio.open(val) as records:
        found = {record.id: record.sequence for record in records if record.id in needed}
    if missing := needed - found.keys():
        raise SystemExit(f"{val} has no record {', '.join(sorted(missing))}.")
    with out.open("w") as file:
        for contig, parts in PASTED.items():
            sequence = "".join(found[name][first - 1 : last] for name, first, last in parts)
            file.write(f">{contig}\n{sequence}\n")


def predict(contigs: Path, out: Path) -> Path:
    """A finished run of the bundled models; gives its report."""
    if code := virnuc(["predict", str(contigs), "--out", str(out), "--devices", "cpu", "--quiet"]):
        sys.exit(code)
    return out / "report.html"


def picture_mixed(page: Page, out: Path) -> None:
    """The verdict, and how sure it is."""
    _save(page, out / "report-mixed.png")


def picture_prophage(page: Page, out: Path) -> None:
    """Bacterial contigs with a phage in them, as islands."""
    _scroll_to(page, "regions")
    _save(page, out / "report-prophage.png")


def picture_dark(page: Page, out: Path) -> None:
    """The table of contigs with one of them opened."""
    _scroll_to(page, "contigs")
    page.locator(".open").nth(1).click()
    page.mouse.move(0, 0)
    page.evaluate("document.activeElement.blur()")
    _save(page, out / "report-dark.png")


def _scroll_to(page: Page, section: str) -> None:
    page.evaluate(f"document.getElementById('{section}').scrollIntoView({{ behavior: 'instant' }})")


def _save(page: Page, path: Path) -> None:
    page.wait_for_timeout(SETTLE_MILLISECONDS)
    page.screenshot(path=path)
    print(path)


def _open(browser: Browser, report: Path, theme: Literal["light", "dark"]) -> Page:
    page = browser.new_page(
        viewport={"width": WIDTH, "height": HEIGHT}, timezone_id="UTC", locale="en-GB", color_scheme=theme
    )
    page.goto(report.resolve().as_uri())
    page.wait_for_selector("html[data-ready]", state="attached")
    return page


def main() -> None:
    """Takes all pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--val", type=Path, required=True, help="FASTA of the validation set")
    parser.add_argument("--out", type=Path, default=Path("docs/images"), help="folder of the pictures")
    parser.add_argument("--chromium", help="path of a Chromium; playwright's own by default")
    arguments = parser.parse_args()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="virnuc-") as scratch:
        pasted = Path(scratch) / "bacteria.fa"
        write_pasted(arguments.val, pasted)
        mixed = predict(EXAMPLES / "contigs.fa.gz", Path(scratch) / "examples")
        bacteria = predict(pasted, Path(scratch) / "bacteria")
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=arguments.chromium, args=["--no-sandbox", "--disable-gpu"]
            )
            picture_mixed(_open(browser, mixed, "light"), out)
            picture_prophage(_open(browser, bacteria, "light"), out)
            picture_dark(_open(browser, bacteria, "dark"), out)
            browser.close()


if __name__ == "__main__":
    main()
