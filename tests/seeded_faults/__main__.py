"""Whether the tests find the seeded faults: python -m tests.seeded_faults [ID...] [--jobs N]."""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.seeded_faults import ROOT, Fault, read_faults


def main() -> int:
    """Names the faults without a home, and tests each other one on a copy of the tree; returns 0 when all are detected."""
    faults = {fault.id: fault for fault in read_faults()}
    parser = argparse.ArgumentParser(prog="python -m tests.seeded_faults", description=__doc__)
    parser.add_argument("ids", nargs="*", metavar="ID", help="faults to seed; all when none is given")
    parser.add_argument("--jobs", type=int, default=1, help="faults at a time")
    parser.add_argument("--minutes", type=float, default=3.0, help="most for the tests of one fault")
    options = parser.parse_args()
    if unknown := set(options.ids) - faults.keys():
        parser.error(f"no such fault: {', '.join(sorted(unknown))}")
    chosen = [faults[name] for name in options.ids or faults]
    homeless = [fault for fault in chosen if fault.missing]
    for fault in homeless:
        print(f"{'NO HOME':<14}  {fault.id:<28}  {fault.missing}: {fault.what}", flush=True)
    chosen = [fault for fault in chosen if not fault.missing]
    tests = tuple(dict.fromkeys(test for fault in chosen for test in fault.tests))
    with TemporaryDirectory(prefix="virnuc-unchanged-") as folder:
        _copy_tree(Path(folder))
        result = _run_tests(Path(folder), tests, options.minutes * len(chosen))
    if result.returncode:
        print(f"{result.stdout}\nThe tests do not pass on the unchanged tree.", file=sys.stderr)
        return 1
    print(f"{len(tests)} selections of tests pass on the unchanged tree", flush=True)
    num_found = 0
    with ThreadPoolExecutor(options.jobs) as threads:
        verdicts = threads.map(partial(_try, minutes=options.minutes), chosen)
        for fault, (verdict, detail) in zip(chosen, verdicts, strict=True):
            print(f"{verdict:<14}  {fault.id:<28}  {detail}", flush=True)
            num_found += verdict == "found"
    print(f"{num_found} of {len(chosen)} faults found; {len(homeless)} have no home")
    return 0 if num_found == len(chosen) and not homeless else 1


def _try(fault: Fault, minutes: float) -> tuple[str, str]:
    """The verdict, and the failing test or the reason."""
    with TemporaryDirectory(prefix="virnuc-fault-") as folder:
        _copy_tree(Path(folder))
        path = Path(folder) / fault.file
        path.write_text(fault.applied(path.read_text(encoding="utf-8")), encoding="utf-8")
        try:
            result = _run_tests(Path(folder), fault.tests, minutes)
        except subprocess.TimeoutExpired:
            return "no test result", f"after {minutes:g} minutes"
    failed = [
        line for line in result.stdout.splitlines() if line.startswith(("FAILED tests/", "ERROR tests/"))
    ]
    if result.returncode == 1:  # tests failed
        return "found", failed[0].split()[1] if failed else ""
    if result.returncode == 0:
        return "NOT FOUND", fault.what
    return "no test result", f"exit code {result.returncode} of pytest: {' '.join(failed)}"


def _copy_tree(folder: Path) -> None:
    """Copies the working tree as far as Git tracks or would track it."""
    command = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def _run_tests(folder: Path, tests: Sequence[str], minutes: float) -> subprocess.CompletedProcess[str]:
    """Runs tests in a copy of the tree, against that copy's product, up to the first failure."""
    environment = {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        (sys.executable, "-m", "pytest", "-q", "-x", "--tb=short", "-p", "no:cacheprovider", *tests),
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60 * minutes,
    )


if __name__ == "__main__":
    sys.exit(main())
