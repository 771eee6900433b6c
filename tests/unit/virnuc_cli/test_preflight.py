import subprocess
import sys
from pathlib import Path

import pytest

from virnuc_cli.main import main
from virnuc_cli.preflight import folder_of, readable
from virnuc_core.errors import InputError, UsageError


@pytest.fixture
def sequences(tmp_path: Path) -> str:
    path = tmp_path / "a.fa"
    path.write_text(">a\nACGT\n")
    return str(path)


def test_files_are_left_as_they_are(sequences: str) -> None:
    with readable([sequences, sequences]) as files:
        assert files == [sequences, sequences]


def test_standard_input_becomes_a_file_for_the_time_of_the_run(
    sequences: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "piped").write_bytes(b">a\nACGT\n")
    with (tmp_path / "piped").open() as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        with readable([sequences, "-"]) as files:
            assert files[0] == sequences
            assert Path(files[1]).read_bytes() == b">a\nACGT\n"
    assert not Path(files[1]).exists()


def test_message_names_standard_input_and_not_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "piped").touch()
    with (tmp_path / "piped").open() as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        with pytest.raises(InputError, match=r"^standard input: empty$"), readable(["-"]) as files:
            raise InputError(f"{files[0]}: empty")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--esm-model 4B", "no model 4B"),
        ("--dnabert-model 650M", "no model 650M"),
        ("--head absent.pth", "no classifier head absent.pth"),
        ("--chunk-length 400", "chunk length of 400"),
        ("--preset virnucpro-500", "no head is bundled for DNABERT-S and 3B"),
    ],
)
def test_a_model_or_head_that_is_not_there_is_said_before_the_inputs_are_read(
    flags: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", "absent.fa", "--out", str(tmp_path / "run"), *flags.split()]) in (2, 3, 4)
    assert message in capsys.readouterr().err
    assert main(["embed", "absent.fa", "--out", str(tmp_path / "a.h5"), "--model", "esm2:4B"]) == 4
    assert "no model 4B" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["absent", "folder"])
@pytest.mark.parametrize(
    "command",
    [
        ("predict", "{}", "--out", "run"),
        ("embed", "{}", "--out", "a.h5", "--model", "esm2:tiny"),
        ("train", "--viral", "{}", "--out", "head.safetensors"),
        ("evaluate", "--labels", "{}", "--out", "figures"),
        ("reprocess", "{}"),
        ("predict", "a.fa", "--out", "run", "--head", "./{}"),
        ("embed", "a.fa", "--out", "a.h5", "--model", "esm2:./{}/x"),
    ],
    ids=" ".join,
)
def test_a_wrong_path_is_said_before_prefect_is_imported(
    command: tuple[str, ...], path: str, sequences: str, tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    arguments = [argument.format(path) for argument in command]
    code = f"""if True:
        import sys
        from virnuc_cli.main import main
        code = main({arguments!r})
        print(code, 'prefect' in sys.modules, 'torch' in sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    exit_code, *imported = done.stdout.split()
    assert exit_code in ("3", "4"), done.stderr
    assert imported == ["False", "False"]
    assert path in done.stderr
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.fa", "folder"]


def test_output_needs_a_folder(tmp_path: Path) -> None:
    assert folder_of(tmp_path / "out.tsv") == tmp_path
    for out in (tmp_path / "no" / "out.tsv", tmp_path, Path("/proc/out.tsv")):
        with pytest.raises(UsageError, match="--out"):
            folder_of(out)
    assert not list(tmp_path.iterdir())
