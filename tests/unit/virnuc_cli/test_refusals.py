"""What the command line refuses, with its exit code and its one message, before anything slow is imported."""

import subprocess
import sys
from pathlib import Path

import pytest

from virnuc_cli.main import main
from virnuc_core.env_config import env

# Arguments, after variables as a shell has them; exit code; text. a.fa, folder/ and other/ exist.
REFUSALS = [
    ("nonsense", 2, "nonsense"),
    ("predict", 2, "INPUT"),
    ("predict a.fa", 2, "--out"),
    ("predict a.fa -o x --nonsense", 2, "--nonsense"),
    ("score a.h5", 2, "--head"),
    ("worker", 2, "worker"),
    (
        "predict a.fa -o x --engine fast",
        2,
        "--engine: Input should be 'packed' or 'reference' (given 'fast')",
    ),
    ("predict a.fa -o x --chunk-length some", 2, "--chunk-length: Input should be a valid integer"),
    ("predict a.fa -o x --devices 0,gpu", 2, "--devices"),
    ("predict a.fa -o x -t 0", 2, "--threads: Input should be greater than 0"),
    ("predict a.fa -o x --threshold 0.9 --fdr 0.05", 2, "--threshold and --fdr cannot be combined"),
    (
        "VIRNUC_TOKEN_BUDGET=many predict a.fa -o x",
        2,
        "environment variable VIRNUC_TOKEN_BUDGET: Input should",
    ),
    ("VIRNUC_THREADS=0 predict a.fa -o x", 2, "environment variable VIRNUC_THREADS: Input should"),
    ("VIRNUC_LANE_TIMEOUT=much predict a.fa -o x", 2, "environment variable VIRNUC_LANE_TIMEOUT is 'much'"),
    ("frames a.fa -o a.tsv", 2, "--chunk-length: Field required"),
    ("frames a.fa -o a.tsv --chunk-length 2", 2, "--chunk-length"),
    ("frames a.fa -o a.tsv --chunk-length 1000000000000", 2, "--chunk-length"),
    ("frames a.fa -o no/a.tsv --chunk-length 500", 2, "--out no/a.tsv"),
    ("frames a.fa -o folder --chunk-length 500", 2, "--out folder"),
    ("frames a.fa -o /proc/a.tsv --chunk-length 500", 2, "--out /proc/a.tsv"),
    ("frames - - -o a.tsv --chunk-length 500", 2, "once"),
    ("frames a.fa -o a.fa --chunk-length 500", 2, "is the input"),
    ("train --viral a.fa -o no/head.safetensors", 2, "--out no/head.safetensors"),
    # Models and heads come before inputs.
    ("predict absent.fa -o run --esm-model 4B", 4, "unknown model 4B"),
    ("predict absent.fa -o run --dnabert-model 650M", 4, "unknown model 650M"),
    ("predict absent.fa -o run --head absent.pth", 4, "unknown classifier head absent.pth"),
    (
        "predict absent.fa -o run --preset virnucpro-500",
        2,
        "no classifier head is bundled for DNABERT-S and 3B",
    ),
    ("embed absent.fa -o a.h5 --model esm2:4B", 4, "unknown model 4B"),
    ("embed a.fa -o a.h5 --model esm2:./absent/x", 4, "./absent/x"),
    *(
        (command.format(path), 3, path)
        for path in ("absent", "folder")
        for command in (
            "predict {} -o run",
            "embed {} -o a.h5 --model esm2:tiny",
            "train --viral {} -o head.safetensors",
            "evaluate --labels {} -o figures",
        )
    ),
]

# Content of virnuc.toml, and text of the message.
FILES = [
    (b"precison = 'fp16'", "virnuc.toml: unknown setting precison; did you mean precision?"),
    (b"json = true", "virnuc.toml: unknown setting json"),
    (b"switches = []", "virnuc.toml: unknown setting switches"),
    (b"[predict]\nhead = 'a'", "virnuc.toml: unknown setting predict"),
    (b"token-budget = 'many'", "virnuc.toml: token-budget: Input should be a valid integer"),
    (b"token_budget = 1.5", "virnuc.toml: token-budget: Input should be a valid integer"),
    (b"token_budget = 1\ntoken-budget = 2", "virnuc.toml: a setting is given twice"),
    (b"devices = 0", "virnuc.toml: devices: Input should be a valid tuple"),
    (b"threads = 0", "virnuc.toml: threads: Input should be greater than 0"),
    (b"precision = 'fp12'", "virnuc.toml: precision: Input should be 'auto', 'fp32'"),
    (b'head = "a\\u0000b"', "NUL"),
    (b"[predict\na = 1", "virnuc.toml is not valid TOML in UTF-8"),
    (b"a = " + b"[" * 100_000, "virnuc.toml is not valid TOML in UTF-8"),
    (b"head = '\xff'", "virnuc.toml is not valid TOML in UTF-8"),
]


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.fa").write_text(">a\nACGTACGTAAACCC\n")
    Path("folder").mkdir()


def refusal(arguments: list[str], code: int, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(Path.cwd().iterdir())
    assert main(arguments) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("virnuc: error: ")
    assert err.count("\n") <= 2
    assert text in err
    assert sorted(Path.cwd().iterdir()) == before


@pytest.mark.parametrize(("line", "code", "text"), REFUSALS, ids=[line for line, _, _ in REFUSALS])
def test_arguments_and_variables(
    line: str,
    code: int,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = line.split()
    while "=" in words[0]:
        monkeypatch.setenv(*words.pop(0).split("="))
    env.cache_clear()
    refusal(words, code, text, capsys)


@pytest.mark.parametrize(("content", "text"), FILES, ids=[text for _, text in FILES])
def test_virnuc_toml(content: bytes, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("virnuc.toml").write_bytes(content)
    refusal(["predict", "a.fa", "-o", "run"], 2, text, capsys)


def test_an_unreadable_virnuc_toml(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("virnuc.toml").symlink_to("/proc/self/mem")  # a file, to which even root gets an error of the disk
    refusal(["predict", "a.fa", "-o", "run"], 2, "virnuc.toml cannot be read", capsys)


def test_nothing_slow_is_imported_before() -> None:
    lines = [
        line.split()
        for line, _, _ in REFUSALS
        if line.split()[0] in ("predict", "embed", "train", "evaluate")
    ]
    code = f"""if True:
        import sys
        from virnuc_cli.main import main
        for words in {lines!r}:
            main(words)
        print(*{{"prefect", "torch", "mlflow"}} & {{*sys.modules}})
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n", done.stdout
