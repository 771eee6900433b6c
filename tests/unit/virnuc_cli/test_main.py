"""Behaviour of the command line; tests/unit/interfaces holds its content."""

import subprocess
import sys
from pathlib import Path

import click
import pytest

from virnuc_cli.main import PACKAGES, cli, main, require_one_folder
from virnuc_cli.options import Command, iter_commands
from virnuc_core import __version__
from virnuc_core.errors import UsageError

COMMANDS = [name.split() for name, _ in iter_commands(cli)]


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], *([*name, "--help"] for name in COMMANDS)])
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    assert "Usage: virnuc" in capsys.readouterr().out


@pytest.mark.parametrize("group", [[], ["models"], ["server"]])
def test_a_group_without_a_command_shows_its_help(
    group: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(group) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"Usage: {' '.join(['virnuc', *group])} [OPTIONS] COMMAND")
    assert "error" not in err


@pytest.mark.parametrize("group", [cli, cli.commands["server"]], ids=lambda g: g.name)
def test_the_list_of_commands_has_whole_sentences(group: click.Group) -> None:
    with click.Context(group, info_name="virnuc") as ctx:
        shown = " ".join(group.get_help(ctx).split())
    for name, command in group.commands.items():
        first = " ".join((command.help or "").partition("\n\n")[0].split())
        assert f" {name} {first}" in shown


@pytest.mark.parametrize(
    ("line", "shown", "unwanted"),
    [
        ("--version", __version__, {"pydantic", "numpy", "rich"}),
        ("--help", "predict", {"pydantic", "numpy", "rich"}),
        ("predict --help", "--esm-model", {"pydantic_settings", "numpy", "rich"}),
    ],
)
def test_help_imports_no_more_than_it_needs(line: str, shown: str, unwanted: set[str]) -> None:
    code = f"import sys, virnuc_cli.main as m; m.main({line.split()!r}); print('MODULES', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    text, _, modules = done.stdout.partition("MODULES")
    assert shown in text
    assert not ({"torch", "prefect", "mlflow", "h5py"} | unwanted) & {*modules.split()}


SPAWNING = """
from multiprocessing import get_context
from virnuc_cli.main import main

if __name__ == "__main__":
    main(["--version"])
    child = get_context("spawn").Process(target=print)
    child.start()
    child.join()
    raise SystemExit(child.exitcode)
"""


def test_children_take_no_module_from_the_working_folder(tmp_path: Path) -> None:
    program, data = tmp_path / "program.py", tmp_path / "data"
    program.write_text(SPAWNING)
    data.mkdir()
    (data / "pickle.py").write_text("open('ran', 'w')\n")
    done = subprocess.run([sys.executable, program], cwd=data, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not (data / "ran").exists()


def test_usage_error_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["score", "a.h5", "--json"]) == 2
    out, err = capsys.readouterr()
    assert '"exit_code": 2' in out
    assert "--head" in err


@pytest.mark.parametrize("package", PACKAGES)
def test_foreign_package_of_the_same_name_is_refused(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_one_folder()
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").touch()
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UsageError, match=f"{package} in {tmp_path}.* separate environment"):
        require_one_folder()


CASES = {
    "--viral a b --other c": (("a", "b"), ("c",), ()),
    "x --viral a": (("a",), (), ("x",)),
    "--viral a --viral b c": (("a", "b", "c"), (), ()),
    "--viral=a x": (("a",), (), ("x",)),
    "--labels t x y": ((), (), ("x", "y")),
    "--viral a -- x y": (("a",), (), ("x", "y")),
    "--viral a - --other c": (("a", "-"), ("c",), ()),
}


@pytest.mark.parametrize("line", CASES)
def test_files_after_a_flag_belong_to_it(line: str) -> None:
    params = [
        click.Argument(["labelled"], nargs=-1),
        *(click.Option([flag], multiple=True) for flag in ("--viral", "--other")),
        click.Option(["--labels"]),
    ]
    given = Command(lambda: [*params], name="train").make_context("train", line.split()).params
    assert (given["viral"], given["other"], given["labelled"]) == CASES[line]
