"""`virnuc` as a process: what lies in the working folder, a reader that goes away, a kill, and accounts without a home."""

import json
import os
import stat
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.end_to_end.conftest import virnuc_process, wait_until
from tests.made_models import MadeModels

SCRIPT = (str(Path(sys.executable).with_name("virnuc")),)
MODULE = (sys.executable, "-m", "virnuc_cli")
LOGGING = "version: 1\nhandlers:\n  evil:\n    (): subprocess.Popen\n    args: [touch, {}]\n"
SERVER = "http://127.0.0.1:9/api"


def environment(home: Path, **variables: str) -> dict[str, str]:
    """Of a user who has set nothing of virnuc and Prefect."""
    own = ("VIRNUC_", "PREFECT_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    return {**kept, "VIRNUC_HOME": str(home), "HOME": str(home), **variables}


def computed(
    command: Sequence[str], arguments: Sequence[object], out: Path, folder: Path, variables: Mapping[str, str]
) -> dict[str, bytes]:
    """Runs `virnuc predict` in a folder; its result files without those that have times."""
    words = [*command, "predict", *map(str, arguments), "--out", str(out)]
    done = subprocess.run(
        words, cwd=folder, env=variables, umask=0, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "MLflow" not in done.stderr  # which has taken it
    timed = {"run.json", "report.html", "virnuc_mqc.json"}
    return {
        path.name: path.read_bytes() for path in out.iterdir() if path.is_file() and path.name not in timed
    }


def plant(folder: Path) -> Path:
    """Modules and settings that leave a mark when they are used; returns the place of the mark."""
    mark, config = folder / "mark", folder / "logging.yml"
    config.write_text(LOGGING.format(mark))
    for name in (
        "mlflow",
        "random",
        "prefect",
        "torch",
        "tasks",
        "flows",
        "virnuc_core",
        "sitecustomize",
        "pickle",
    ):
        (folder / f"{name}.py").write_text(f"open({str(mark)!r}, 'a').write({name!r})\n")
    (folder / "prefect.toml").write_text(f'[api]\nurl = "{SERVER}"\n[logging]\nconfig_path = "{config}"\n')
    (folder / ".env").write_text(f"PREFECT_API_URL={SERVER}\nPREFECT_LOGGING_SETTINGS_PATH={config}\n")
    (folder / "pyproject.toml").write_text(
        f'[tool.prefect.api]\nurl = "{SERVER}"\n[tool.prefect.logging]\nconfig_path = "{config}"\n'
    )
    return mark


@pytest.mark.slow
def test_nothing_in_the_working_folder_is_run_or_changes_a_run(
    models: MadeModels, contigs: Path, tmp_path: Path
) -> None:
    clean, planted, home = tmp_path / "clean", tmp_path / "planted", tmp_path / "home"
    for folder in (clean, planted):
        folder.mkdir()
    mark = plant(planted)
    variables = environment(home)
    arguments = (contigs, *models.flags)
    expected = computed(SCRIPT, arguments, tmp_path / "expected", clean, variables)
    assert len(expected) > 10
    dead = {**variables, "PREFECT_API_URL": SERVER}
    assert computed(SCRIPT, arguments, tmp_path / "script", planted, variables) == expected
    assert computed(MODULE, arguments, tmp_path / "module", planted, dead) == expected
    assert not mark.exists()
    assert not (home / "prefect").exists()
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert stat.S_IMODE((home / "mlflow.db").stat().st_mode) == 0o600
    assert json.loads((tmp_path / "module" / "run.json").read_bytes())["run_as"] == "process"


@pytest.mark.slow
def test_a_reader_that_goes_away_does_not_end_the_run(
    models: MadeModels, contigs: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    command = [*SCRIPT, "predict", str(contigs), "--out", str(out), *map(str, models.flags)]
    with subprocess.Popen(
        [*command, "--shard-seconds", "0.001"],
        env=environment(tmp_path / "home"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(300) == 0
    assert (out / "run.json").exists()


@pytest.mark.parametrize("given", [{}, {"VIRNUC_HOME": ""}])
def test_an_account_without_a_home(given: dict[str, str], contigs: Path, tmp_path: Path) -> None:
    """As in a container that is run with any user id; frames need no home."""
    variables = {name: value for name, value in environment(tmp_path).items() if "HOME" not in name}

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "-c", NO_HOME, *map(str, arguments)]
        return subprocess.run(
            command, cwd=tmp_path, env={**variables, **given}, capture_output=True, text=True, check=False
        )

    done = run("frames", contigs, "--chunk-length", 300, "--out", tmp_path / "frames.tsv")
    assert done.returncode == 0, done.stderr
    done = run("predict", "https://127.0.0.1:9/a.fa", "--out", tmp_path / "run")
    assert done.returncode == 2
    assert "this account has no home folder: set VIRNUC_HOME" in done.stderr
    assert not (tmp_path / "~").exists()


# A user id without an entry in the list of accounts.
NO_HOME = "import pwd, sys; pwd.getpwuid = {}.__getitem__; from virnuc_cli.main import main; sys.exit(main())"


@pytest.mark.slow
def test_a_killed_run_goes_on(models: MadeModels, contigs: Path, tmp_path: Path) -> None:
    arguments = ("predict", contigs, *models.flags, "--engine", "reference", "--shard-seconds", "0.0001")
    out = tmp_path / "run"
    with virnuc_process(*arguments, "--out", out) as process:
        wait_until(lambda: any((out / "shards").glob("shard_*.h5")))
        process.kill()
    left = {path: path.stat().st_mtime_ns for path in (out / "shards").glob("shard_*.h5")}
    with virnuc_process(*arguments, "--out", out) as process:
        assert process.wait(120) == 0
    shards = json.loads((out / "run.json").read_bytes())["shards"]
    assert shards["computed"] == shards["total"] - len(left)
    assert {path: path.stat().st_mtime_ns for path in left} == left
    assert not (out / "lanes").exists()
