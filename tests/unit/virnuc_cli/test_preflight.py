import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from virnuc_cli.main import main
from virnuc_cli.preflight import readable, require_writable
from virnuc_core.errors import InputError, UsageError
from virnuc_core.sequences.reader import input_digest, iter_records

WRONG_PATHS = [
    ["predict", "{}", "--out", "run"],
    ["embed", "{}", "--out", "a.h5", "--model", "esm2:tiny"],
    ["train", "--viral", "{}", "--out", "head.safetensors"],
    ["evaluate", "--labels", "{}", "--out", "figures"],
    ["predict", "a.fa", "--out", "run", "--head", "./{}"],
    ["embed", "a.fa", "--out", "a.h5", "--model", "esm2:./{}/x"],
]


@pytest.fixture
def sequences(tmp_path: Path) -> str:
    path = tmp_path / "a.fa"
    path.write_text(">a\nACGT\n")
    return str(path)


def test_standard_input_can_be_read_again_for_the_time_of_the_run(
    sequences: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Path(sequences).open() as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        with readable([sequences, sequences, "-"]):
            assert input_digest("-") == replace(input_digest(sequences), name="-")
            for _ in range(2):
                assert [(record.path, record.sequence) for record in iter_records(["-"], "dna")] == [
                    ("-", b"ACGT")
                ]
        with pytest.raises(InputError, match=r"^- can be read only once"):
            input_digest("-")


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        ("predict absent.fa --out run --esm-model 4B", 4, "no model 4B"),
        ("predict absent.fa --out run --dnabert-model 650M", 4, "no model 650M"),
        ("predict absent.fa --out run --head absent.pth", 4, "no classifier head absent.pth"),
        ("predict absent.fa --out run --preset virnucpro-500", 2, "no head is bundled for DNABERT-S and 3B"),
        ("embed absent.fa --out a.h5 --model esm2:4B", 4, "no model 4B"),
    ],
)
def test_a_model_or_head_that_is_not_there_is_said_before_the_inputs_are_read(
    command: str,
    code: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(command.split()) == code
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["absent", "folder"])
def test_a_wrong_path_is_said_before_prefect_is_imported(path: str, sequences: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    commands = [[argument.format(path) for argument in command] for command in WRONG_PATHS]
    code = f"""if True:
        import sys
        from virnuc_cli.main import main
        for arguments in {commands!r}:
            code = main(arguments)
            print(code, 'prefect' in sys.modules, 'torch' in sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    endings, errors = done.stdout.splitlines(), done.stderr.splitlines()
    assert [ending.partition(" ")[2] for ending in endings] == ["False False"] * len(commands)
    assert {ending.partition(" ")[0] for ending in endings} == {"3", "4"}
    assert len(errors) == len(commands)
    assert all(path in error for error in errors)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.fa", "folder"]


def test_output_needs_a_folder(tmp_path: Path) -> None:
    require_writable(tmp_path / "out.tsv")
    require_writable(Path("/dev/null"))
    for out in (tmp_path / "no" / "out.tsv", tmp_path, Path("/proc/out.tsv")):
        with pytest.raises(UsageError, match="--out"):
            require_writable(out)
    assert not list(tmp_path.iterdir())
