"""Screenshots for the documentation, taken with headless Chromium.

    python -m scripts.screenshots --prefect http://127.0.0.1:4200 --mlflow http://127.0.0.1:5000 --out docs/images
    python -m scripts.screenshots --val ../shared/data/val.fa.gz --chromium /usr/bin/chromium --out docs/images
    python -m scripts.screenshots --multiqc .tools/multiqc/bin/multiqc --chromium /usr/bin/chromium --out docs/images

The first shows the newest finished pipeline run in Prefect, and in MLflow the newest runs and a comparison of two. With
--val the screenshots are of reports: `virnuc predict` with the bundled models runs on the example contigs, and on
bacterial windows, two of them with a phage genome pasted in. With --multiqc it is of MultiQC's report of three runs. Needs
`playwright` and a Chromium.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Literal
from urllib.parse import quote

import dnaio
import httpx
from playwright.sync_api import Browser, Page, sync_playwright

from virnuc_cli.main import main as virnuc

EXAMPLES: Final = Path(__file__).parents[1] / "examples"
# Contigs by name, with the validation records (first and last base) that they are composed of.
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
EXPERIMENT: Final = "virnuc"
FLOWS: Final = ("predict", "embed")
# Columns of MLflow's table of runs, with their widths in pixels.
COLUMNS: Final = {
    "attributes.`Run Name`": 290,
    "runDateAndNestInfo": 140,
    "duration": 80,
    "attributes.`Dataset`": 130,
    "metrics.`contigs_virus`": 110,
    "metrics.`sequences`": 90,
    "metrics.`sequences_per_second`": 170,
    "params.`chunk_length`": 110,
    "params.`mode`": 80,
}
SERVER_SIZE: Final = (1500, 940)
TALL: Final = 2000
REPORT_SIZE: Final = (1280, 985)
MULTIQC_SIZE: Final = (1280, 440)
NUM_SAMPLES: Final = 3
CLICK_MILLISECONDS: Final = 2500
# Both servers' pages poll forever, so the network never becomes idle.
LOAD_MILLISECONDS: Final = 7000
# No background network requests; a container needs no sandbox inside.
ARGUMENTS: Final = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Screenshot:
    """A picture: its name, the page, and what is done there first; afterwards the page may need time to settle."""

    name: str
    url: str
    act: Callable[[Page], None] = lambda page: None
    settle_milliseconds: int = LOAD_MILLISECONDS
    size: tuple[int, int] = SERVER_SIZE
    theme: Literal["light", "dark"] = "light"
    local_storage: Mapping[str, Any] = field(default_factory=dict)

    def take(self, browser: Browser, out: Path) -> None:
        """Writes NAME.png."""
        width, height = self.size
        page = browser.new_page(
            viewport={"width": width, "height": height},
            timezone_id="UTC",
            locale="en-GB",
            color_scheme=self.theme,
        )
        for key, value in self.local_storage.items():
            stored = json.dumps(json.dumps(value))
            page.add_init_script(f"localStorage.setItem({json.dumps(key)}, {stored});")
        page.goto(self.url)
        page.wait_for_timeout(self.settle_milliseconds)
        self.act(page)
        path = out / f"{self.name}.png"
        page.screenshot(path=path)
        print(path)
        page.close()


def prefect_screenshots(server: str) -> Iterator[Screenshot]:
    """The newest finished run with its lanes, its artifacts, and two of these: the calls and the throughput.

    Raises:
        SystemExit: there is no finished run.
    """
    newest = {
        "flows": {"name": {"any_": list(FLOWS)}},
        "flow_runs": {"state": {"type": {"any_": ["COMPLETED"]}}, "parent_task_run_id": {"is_null_": True}},
        "sort": "END_TIME_DESC",
        "limit": 1,
    }
    runs = _ask(f"{server}/api/flow_runs/filter", newest)
    if not runs:
        raise SystemExit(f"{server} has no finished run of {' or '.join(FLOWS)}: run one first.")
    run_id = runs[0]["id"]
    own = {"artifacts": {"flow_run_id": {"any_": [run_id]}}, "limit": 200}
    artifacts = {found["key"]: found["id"] for found in _ask(f"{server}/api/artifacts/filter", own)}

    def scroll_to_artifacts(page: Page) -> None:
        page.get_by_text("Artifacts", exact=True).last.click()
        page.mouse.wheel(0, TALL)
        page.wait_for_timeout(CLICK_MILLISECONDS)

    run = f"{server}/runs/flow-run/{run_id}"
    yield Screenshot(name="prefect-run", url=run)
    yield Screenshot(name="prefect-artifacts", url=run, act=scroll_to_artifacts)
    for key, name in (("virnuc-summary", "prefect-verdict"), ("virnuc-lanes", "prefect-throughput")):
        if key in artifacts:
            yield Screenshot(name=name, url=f"{server}/artifacts/artifact/{artifacts[key]}")


def mlflow_screenshots(server: str) -> Iterator[Screenshot]:
    """The table of runs, the metrics of the newest over time, and a comparison of the newest two.

    Raises:
        SystemExit: there is no finished run.
    """
    api = f"{server}/api/2.0/mlflow"
    named = _ask(f"{api}/experiments/get-by-name?experiment_name={EXPERIMENT}")
    experiment_id = named["experiment"]["experiment_id"]
    newest = {
        "experiment_ids": [experiment_id],
        "filter": "attributes.status = 'FINISHED'",
        "order_by": ["attributes.start_time DESC"],
    }
    run_ids = [
        run["info"]["run_id"]
        for run in _ask(f"{api}/runs/search", newest).get("runs", [])
        if "mlflow.parentRunId" not in {tag["key"] for tag in run["data"].get("tags", [])}
    ]
    if not run_ids:
        raise SystemExit(f"{server} has no finished run in experiment {EXPERIMENT}: run one first.")
    # Model pages, no assistant, these columns, lanes unfolded.
    table = {
        "selectedColumns": list(COLUMNS),
        "columnOrder": list(COLUMNS),
        "columnWidths": COLUMNS,
        "runsExpanded": dict.fromkeys(run_ids[:2], True),
        "orderByKey": "attributes.start_time",
        "orderByAsc": False,
    }
    storage = {
        "mlflow.workflowType_v1": "machine_learning",
        "mlflow.assistant.panelOpen_v1": False,
        "mlflow.assistant.fab.autoOpenedOnFirstLoad_v1": True,
        f'MLflowLocalStorage-1.1-ExperimentPage-["{experiment_id}"]-ReactComponentState': table,
    }

    def show_differences(page: Page) -> None:
        page.get_by_text("Show diff only").first.click()
        page.wait_for_timeout(CLICK_MILLISECONDS)

    screenshot = partial(Screenshot, local_storage=storage)
    runs = f"{server}/#/experiments/{experiment_id}/runs"
    yield screenshot(name="mlflow-runs", url=runs)
    yield screenshot(name="mlflow-progress", url=f"{runs}/{run_ids[0]}/model-metrics")
    if len(run_ids) > 1:
        chosen, experiments = quote(json.dumps(run_ids[:2])), quote(json.dumps([experiment_id]))
        url = f"{server}/#/compare-runs?runs={chosen}&experiments={experiments}"
        # Its parts scroll inside the page, so the page gets their height.
        size = (SERVER_SIZE[0], TALL)
        yield screenshot(name="mlflow-compare", url=url, act=show_differences, size=size)


def _ask(url: str, body: Mapping[str, Any] | None = None) -> Any:
    answer = httpx.get(url, timeout=30) if body is None else httpx.post(url, json=body, timeout=30)
    return answer.raise_for_status().json()


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


def predict(contigs: Path, out: Path) -> None:
    """Runs `virnuc predict` with the bundled models."""
    if code := virnuc(["predict", str(contigs), "--out", str(out), "--devices", "cpu", "--quiet"]):
        sys.exit(code)


def report_screenshots(val: Path, scratch: Path) -> Iterator[Screenshot]:
    """The calls of a mixed sample, phages in bacterial contigs, and the table with one contig expanded."""
    write_pasted(val, scratch / "bacteria.fa")
    inputs = {"mixed": EXAMPLES / "contigs.fa.gz", "bacteria": scratch / "bacteria.fa"}
    for name, contigs in inputs.items():
        predict(contigs, scratch / name)
    mixed, bacteria = ((scratch / name / "report.html").resolve().as_uri() for name in inputs)

    def show(page: Page, section: str = "") -> None:
        page.wait_for_selector("html[data-ready]", state="attached")
        if section:
            page.evaluate(f"document.getElementById('{section}').scrollIntoView({{ behavior: 'instant' }})")
        if section == "contigs":
            page.locator(".open").nth(1).click()
            page.mouse.move(0, 0)
            page.evaluate("document.activeElement.blur()")
        page.wait_for_timeout(600)

    screenshot = partial(Screenshot, size=REPORT_SIZE, settle_milliseconds=0)
    yield screenshot(name="report-mixed", url=mixed, act=show)
    yield screenshot(name="report-prophage", url=bacteria, act=partial(show, section="regions"))
    yield screenshot(name="report-dark", url=bacteria, act=partial(show, section="contigs"), theme="dark")


def multiqc_screenshots(multiqc: Path, scratch: Path) -> Iterator[Screenshot]:
    """MultiQC's section of runs on parts of the example contigs."""
    with dnaio.open(EXAMPLES / "contigs.fa.gz") as records:
        contigs = list(records)
    for number in range(NUM_SAMPLES):
        sample = scratch / f"sample_{number + 1}"
        with dnaio.open(sample.with_suffix(".fa"), mode="w") as file:
            for record in contigs[number::NUM_SAMPLES]:
                file.write(record)
        predict(sample.with_suffix(".fa"), sample)
    subprocess.run([multiqc, scratch, "--outdir", scratch, "--no-version-check", "--quiet"], check=True)

    def show(page: Page) -> None:
        page.evaluate("document.getElementById('mqc-module-section-virnuc').scrollIntoView()")
        page.wait_for_timeout(CLICK_MILLISECONDS)

    report = (scratch / "multiqc_report.html").resolve().as_uri()
    yield Screenshot(name="multiqc", url=report, act=show, size=MULTIQC_SIZE)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prefect", default="http://127.0.0.1:4200", help="address of the Prefect server")
    parser.add_argument("--mlflow", default="http://127.0.0.1:5000", help="address of the MLflow server")
    parser.add_argument("--val", type=Path, help="FASTA of the validation set: pictures of reports")
    parser.add_argument("--multiqc", type=Path, help="path of MultiQC: picture of its report")
    parser.add_argument("--out", type=Path, default=Path("docs/images"), help="folder of the pictures")
    parser.add_argument("--chromium", help="path of a Chromium; playwright's own by default")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="virnuc-") as scratch:
        if arguments.val:
            screenshots = [*report_screenshots(arguments.val, Path(scratch))]
        elif arguments.multiqc:
            screenshots = [*multiqc_screenshots(arguments.multiqc, Path(scratch))]
        else:
            screenshots = [*prefect_screenshots(arguments.prefect), *mlflow_screenshots(arguments.mlflow)]
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=arguments.chromium, args=list(ARGUMENTS))
            for screenshot in screenshots:
                screenshot.take(browser, arguments.out)


if __name__ == "__main__":
    main()
