"""Pages of docs/ match result files, commands and code, and no table rounds a number in virnuc's favour."""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from scripts.render import accuracy, performance, regions, reliability, tutorial
from scripts.render.__main__ import PAGES, main
from scripts.render.tables import FORMATS, NOT_MEASURED, MakeTable, fill, load_results, table


def rows_of(make: MakeTable, results: Any) -> list[str]:
    return make(results).splitlines()[2:]


@pytest.mark.parametrize("name", [name for name in PAGES if name != "tutorial"])
def test_the_page_in_the_repository_is_up_to_date(name: str) -> None:
    assert main(["--check", name]) == 0, f"run python -m scripts.render {name}"


def test_a_stale_page_is_told_and_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, render = PAGES["settings"]
    page = tmp_path / "page.md"
    stale = path.read_text().replace("VIRNUC_PREDICT_TOKEN_BUDGET`", "VIRNUC_PREDICT_TOKENS`")
    page.write_text(stale)
    monkeypatch.setitem(PAGES, "settings", (page, render))
    assert main(["--check", "settings"]) == 1
    assert "page.md is not what it is made from: run" in capsys.readouterr().out
    assert page.read_text() == stale
    assert main(["settings"]) == 0
    assert page.read_text() == path.read_text()
    with pytest.raises(SystemExit, match="2"):
        main(["setings"])


def test_tables_have_their_places() -> None:
    tables = {"a": table("x|y", "{x:.1f}|{y}", lambda results: results["rows"])}
    results: dict[str, Any] = {"rows": [{"x": 1, "y": None}, {"x": 2.26, "y": "b"}]}
    page = fill("# T\n<!-- a -->\nold\n<!-- /a -->\nend\n", tables, results)
    assert page == "# T\n<!-- a -->\n\n| x | y |\n|---|---|\n| 1.0 |  |\n| 2.3 | b |\n\n<!-- /a -->\nend\n"
    assert fill(page, tables, results) == page
    assert NOT_MEASURED in fill(page, tables, {"rows": []})
    with pytest.raises(ValueError, match="no place for the table 'a'"):
        fill("# T\n", tables, results)


def test_a_cosine_is_not_rounded_up() -> None:
    assert FORMATS["cosine"](0.99999998) == "0.9999999"


def test_speed_is_compared_within_one_run() -> None:
    def case(precision: str, lengths: str, rate: float) -> dict[str, Any]:
        forward = {"tokens_per_second": rate, "letters_per_second": rate}
        return {"model": "random:650M", "precision": precision, "lengths": lengths, "forward": forward}

    cases = [case("bf16", "fixed:166", 4e5), case("fp8", "fixed:166", 6e5), case("bf16", "lognormal", 3.8e5)]
    assert rows_of(performance.TABLES["precision"], {"a": {"kind": "bench", "cases": cases}}) == [
        "| 650M | fp8 | fixed:166 | 1.500 |  | a |",
        "| 650M | bf16 | lognormal |  | 0.950 | a |",
    ]
    peers = [
        {"peer": "fair-esm fp32", "model": "650M", "lengths": "fixed:166", "residues_per_second": 20_000.0},
        {"peer": "esm-efficient bf16", "model": "650M", "skipped": "esme is not installed"},
    ]
    document = {"kind": "peers", "peers": peers, "cases": cases[:2]}
    rows = rows_of(performance.TABLES["peers"], {"peers": document})
    assert rows[0] == "| 650M |  | esm-efficient bf16 | esme is not installed |  |  |"
    assert rows[1] == "| 650M | fixed:166 | fair-esm fp32 | 20,000 | bf16 20.00, fp8 30.00 | peers |"


def test_figures_of_the_bundled_models_are_of_everything() -> None:
    everything = {"recall": 0.8, "false_positive_rate": 0.05, "precision": None, "auroc": 0.91}
    group = {
        "share_scored": 0.991,
        "auroc": 0.95,
        "ece_balanced": 0.021,
        "by_class": {"plant": {"called_virus": 0.12}},
        "everything": everything,
    }
    rates = [
        {"promised": 0.05, "share": share, "size": size, "fdr": rate}
        for share, size, rate in ((0.1, 50, 0.01), (0.1, 500, 0.06), (0.5, 50, 0.02))
    ]
    contigs = {
        "contigs": 1200,
        "class_right": 0.7,
        "novelty": {"errors": 0.1, "errors_least_novel_over_all": None},
        "by_tier": {
            "likely": {"tier": "likely", "contigs": 4, "right": 3, "called_virus": 0, "precision": None}
        },
        "fdr": rates,
        "by_class": {"plant": {"called_virus": 0.1}, "viral": {"called_virus": 0.9}},
    }
    results: dict[str, Any] = {
        "val_auroc": {"chunk_length": {"500": {"chunks": 20, **group}}},
        "contig_calls": {"length": {"1000": {**group, **contigs}}},
    }
    tables = accuracy.MODEL_CARD
    assert rows_of(tables["summary"], results) == [
        "| chunks of 500 bp | 20 | 99.1% | 0.910 | 80.0% | 5.0% |  | 0.021 |",
        "| contigs of 1,000 bp | 1,200 | 99.1% | 0.910 | 80.0% | 5.0% |  | 0.021 |",
    ]
    assert tables["classes"](results).splitlines()[0] == "| class | chunks of 500 bp | contigs of 1,000 bp |"
    assert rows_of(tables["classes"], results) == ["| plant | 12.0% | 10.0% |", "| viral |  | 90.0% |"]
    assert rows_of(tables["contigs"], results) == ["| contigs of 1,000 bp | 70.0% | 10.0% |  |"]
    assert rows_of(tables["contig-tiers"], results) == [
        "| contigs of 1,000 bp | `likely` | 4 | 75.0% | 0 |  |"
    ]
    assert rows_of(tables["promises"], results) == ["| contigs of 1,000 bp | 5% | 6.0% | 2.0% |"]
    assert all("benchmarks.contig_calls" in make({}) for make in tables.values())


def test_what_is_wrong_is_not_hidden_in_a_sum() -> None:
    wrong = {"traceback": 2, "crash": 3, "executed": 1, "harmful_message": 4}
    counts = {"inputs": 100, "accepted": 60, "refused": 30, "hang": 1}
    reader = {**wrong, **counts, "slowest_seconds": 1.25, "peak_mb": 80}
    ways = {"a": {"sequences": 40, "other": 0}, "b": {"sequences": 40, "other": 2}}
    case = {"device": "cpu", "model": "esm2:random:3B", "precision": "fp32", "ways": ways}
    results: dict[str, Any] = {
        "reliability/fuzz": {"readers": {"FASTA": reader}},
        "reliability/flips": {"outcomes": {"shard": {"found": 6, "harmless": 4, "silent": 1}}, "silent": 1},
        **{f"reliability/batch_mates{name}": {"cases": [case]} for name in ("", "_h200", "_3B")},
    }
    assert rows_of(reliability.TABLES["fuzz"], results) == [
        "| FASTA | 100 | 60 | 30 | 10 | 1 | 1.25 s | 80 MB |"
    ]
    assert rows_of(reliability.TABLES["flips"], results) == [
        "| shard | 11 | 6 | 4 |",
        "| changed a value without an error |  |  | **1** |",
    ]
    assert rows_of(reliability.TABLES["batch-mates"], results)[2] == "| cpu | 3B | fp32 | 80 | **2** |"


def test_the_picture_of_regions_is_drawn(tmp_path: Path) -> None:
    regions.draw(load_results()["regions"], tmp_path / "regions.png")
    with Image.open(tmp_path / "regions.png") as picture:
        assert picture.width > 800
        assert len(picture.convert("RGB").getcolors(1 << 24)) > 50


TUTORIAL = """
```sh
not run
```

```bash
echo one
cat <<END
two
END
```

Words.

```text
old
```

```python
x = 3
```

```python
print(x + 1)
```

```text
4
```
"""


def test_blocks_of_the_tutorial_are_run_in_order() -> None:
    found = list(tutorial.steps(TUTORIAL))
    assert [step.mark for step in found] == ["bash", "python", "python"]
    assert [step.shown for step in found] == ["old\n", None, "4\n"]
    assert tutorial.render(TUTORIAL) == TUTORIAL.replace("old", "one\ntwo")
    line = "12 sequences/s, 1,234.5 residues/s, " + "0af9" * 16
    assert tutorial.stable(line) == "N sequences/s, N residues/s, HASH"
