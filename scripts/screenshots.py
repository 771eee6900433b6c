"""Screenshots for the documentation, taken with headless Chromium.

    python -m scripts.screenshots --prefect http://127.0.0.1:4200 --mlflow http://127.0.0.1:5000 --out docs/images
    python -m scripts.screenshots --val ../shared/data/val.fa.gz --chromium /usr/bin/chromium --out docs/images

The first shows the newest finished pipeline run in Prefect, and in MLflow the newest runs and a comparison of two. With
--val the screenshots are of reports: `virnuc predict` with the bundled models runs on the example contigs, and on
bacterial windows, two of them with a phage genome pasted in. Needs `playwright` and a Chromium.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
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
WIDTH: Final = 1500
HEIGHT: Final = 940
TALL: Final = 2000
SETTLE_MILLISECONDS: Final = 2500
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
REPORT_SIZE: Final = (1280, 985)
REPORT_MILLISECONDS: Final = 600


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefectRun:
    """A flow run, and the ids of its artifacts by key."""

    id: str
    artifacts: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class MlflowRuns:
    """The experiment, and its newest finished top-level runs, newest first."""

    experiment_id: str
    run_ids: tuple[str, ...]


def find_prefect_run(server: str) -> PrefectRun:
    """The newest finished top-level run of a pipeline.

    Raises:
        SystemExit: there is none.
    """
    wanted = {
        "flows": {"name": {"any_": list(FLOWS)}},
        "flow_runs": {"state": {"type": {"any_": ["COMPLETED"]}}, "parent_task_run_id": {"is_null_": True}},
        "sort": "END_TIME_DESC",
        "limit": 1,
    }
    runs = _ask(f"{server}/api/flow_runs/filter", wanted)
    if not runs:
        raise SystemExit(f"{server} has no finished run of {' or '.join(FLOWS)}: run one first.")
    run_id = runs[0]["id"]
    artifacts = _ask(
        f"{server}/api/artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [run_id]}}, "limit": 200}
    )
    return PrefectRun(
        id=run_id,
        artifacts={artifact["key"]: artifact["id"] for artifact in artifacts},
    )


def find_mlflow_runs(server: str) -> MlflowRuns:
    """The experiment of virnuc and its finished runs.

    Raises:
        SystemExit: there are none.
    """
    interface = f"{server}/api/2.0/mlflow"
    named = _ask(f"{interface}/experiments/get-by-name?experiment_name={EXPERIMENT}")
    experiment_id = named["experiment"]["experiment_id"]
    found = _ask(
        f"{interface}/runs/search",
        {
            "experiment_ids": [experiment_id],
            "filter": "attributes.status = 'FINISHED'",
            "order_by": ["attributes.start_time DESC"],
        },
    )
    whole = [
        run["info"]["run_id"]
        for run in found.get("runs", [])
        if "mlflow.parentRunId" not in {tag["key"] for tag in run["data"].get("tags", [])}
    ]
    if not whole:
        raise SystemExit(f"{server} has no finished run in experiment {EXPERIMENT}: run one first.")
    return MlflowRuns(experiment_id=experiment_id, run_ids=tuple(whole))


def picture_prefect(page: Page, server: str, run: PrefectRun, out: Path) -> None:
    """The run with its lanes, its artifacts, and two of these: the verdict and the throughput."""
    _open(page, f"{server}/runs/flow-run/{run.id}")
    _save(page, out, "prefect-run")
    page.get_by_text("Artifacts", exact=True).last.click()
    page.mouse.wheel(0, TALL)
    page.wait_for_timeout(SETTLE_MILLISECONDS)
    _save(page, out, "prefect-artifacts")
    for key, name in (("virnuc-summary", "prefect-verdict"), ("virnuc-lanes", "prefect-throughput")):
        if key in run.artifacts:
            _open(page, f"{server}/artifacts/artifact/{run.artifacts[key]}")
            _save(page, out, name)


def picture_mlflow(page: Page, server: str, runs: MlflowRuns, out: Path) -> None:
    """The table of runs, the metrics of one over time, and a comparison of two."""
    _prepare_mlflow(page, runs)
    experiment = f"{server}/#/experiments/{runs.experiment_id}"
    _open(page, f"{experiment}/runs")
    _save(page, out, "mlflow-runs")
    _open(page, f"{experiment}/runs/{runs.run_ids[0]}/model-metrics")
    _save(page, out, "mlflow-progress")
    if len(runs.run_ids) > 1:
        # Its parts scroll inside the page, so the page gets their height.
        page.set_viewport_size({"width": WIDTH, "height": TALL})
        chosen = quote(json.dumps(runs.run_ids[:2]))
        experiments = quote(json.dumps([runs.experiment_id]))
        _open(page, f"{server}/#/compare-runs?runs={chosen}&experiments={experiments}")
        # Only the settings that differ.
        page.get_by_text("Show diff only").first.click()
        page.wait_for_timeout(SETTLE_MILLISECONDS)
        _save(page, out, "mlflow-compare")


def _prepare_mlflow(page: Page, runs: MlflowRuns) -> None:
    """Configures the UI: model pages, no assistant, these columns, lanes unfolded."""
    state = {
        "selectedColumns": list(COLUMNS),
        "columnOrder": list(COLUMNS),
        "columnWidths": COLUMNS,
        "runsExpanded": dict.fromkeys(runs.run_ids[:2], True),
        "orderByKey": "attributes.start_time",
        "orderByAsc": False,
    }
    settings = {
        "mlflow.workflowType_v1": "machine_learning",
        "mlflow.assistant.panelOpen_v1": False,
        "mlflow.assistant.fab.autoOpenedOnFirstLoad_v1": True,
        f'MLflowLocalStorage-1.1-ExperimentPage-["{runs.experiment_id}"]-ReactComponentState': state,
    }
    for key, value in settings.items():
        page.add_init_script(f"localStorage.setItem({json.dumps(key)}, {json.dumps(json.dumps(value))});")


def _open(page: Page, url: str) -> None:
    page.goto(url)
    # Both servers' pages poll forever, so the network never becomes idle.
    page.wait_for_timeout(LOAD_MILLISECONDS)


def _save(page: Page, out: Path, name: str) -> None:
    path = out / f"{name}.png"
    page.screenshot(path=path)
    print(path)


def _new_page(browser: Browser, width: int, height: int, theme: Literal["light", "dark"] = "light") -> Page:
    return browser.new_page(
        viewport={"width": width, "height": height}, timezone_id="UTC", locale="en-GB", color_scheme=theme
    )


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


def picture_reports(browser: Browser, val: Path, out: Path) -> None:
    """The verdict of a mixed sample, phages in bacterial contigs as islands, and the table with one contig expanded."""
    with TemporaryDirectory(prefix="virnuc-") as scratch:
        write_pasted(val, Path(scratch) / "bacteria.fa")
        mixed = _report(EXAMPLES / "contigs.fa.gz", Path(scratch) / "examples")
        bacteria = _report(Path(scratch) / "bacteria.fa", Path(scratch) / "bacteria")
        _picture_report(_new_page(browser, *REPORT_SIZE), mixed, out, "report-mixed")
        _picture_report(_new_page(browser, *REPORT_SIZE), bacteria, out, "report-prophage", "regions")
        page = _new_page(browser, *REPORT_SIZE, theme="dark")
        _picture_report(page, bacteria, out, "report-dark", "contigs")


def _report(contigs: Path, out: Path) -> Path:
    """Runs the bundled models; returns the report."""
    if code := virnuc(["predict", str(contigs), "--out", str(out), "--devices", "cpu", "--quiet"]):
        sys.exit(code)
    return out / "report.html"


def _picture_report(page: Page, report: Path, out: Path, name: str, section: str = "") -> None:
    """The report from a section on, with one contig expanded."""
    page.goto(report.resolve().as_uri())
    page.wait_for_selector("html[data-ready]", state="attached")
    if section:
        page.evaluate(f"document.getElementById('{section}').scrollIntoView({{ behavior: 'instant' }})")
    if section == "contigs":
        page.locator(".open").nth(1).click()
        page.mouse.move(0, 0)
        page.evaluate("document.activeElement.blur()")
    page.wait_for_timeout(REPORT_MILLISECONDS)
    _save(page, out, name)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prefect", default="http://127.0.0.1:4200", help="address of the Prefect server")
    parser.add_argument("--mlflow", default="http://127.0.0.1:5000", help="address of the MLflow server")
    parser.add_argument("--val", type=Path, help="FASTA of the validation set: pictures of reports")
    parser.add_argument("--out", type=Path, default=Path("docs/images"), help="folder of the pictures")
    parser.add_argument("--chromium", help="path of a Chromium; playwright's own by default")
    arguments = parser.parse_args()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=arguments.chromium, args=list(ARGUMENTS))
        if arguments.val:
            picture_reports(browser, arguments.val, out)
        else:
            run, runs = find_prefect_run(arguments.prefect), find_mlflow_runs(arguments.mlflow)
            picture_prefect(_new_page(browser, WIDTH, HEIGHT), arguments.prefect, run, out)
            picture_mlflow(_new_page(browser, WIDTH, HEIGHT), arguments.mlflow, runs, out)
        browser.close()


if __name__ == "__main__":
    main()
