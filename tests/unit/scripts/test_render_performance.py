"""docs/performance.md is what the result files give."""

import json
from pathlib import Path
from typing import Any

import pytest

from scripts import render_performance
from scripts.render_performance import TABLES, Result, read_results

TEXT = "# Title\n\n" + "".join(f"text\n\n<!-- {name} -->\nold\n<!-- /{name} -->\n" for name in TABLES)


def made_speed(rate: float) -> dict[str, Any]:
    return {
        "tokens_per_second": rate,
        "repeats": [rate * 0.99, rate, rate * 1.01],
        "sequences_per_second": rate / 168,
        "letters_per_second": rate * 166 / 168,
        "packing_efficiency": 0.9998,
    }


def made_case(precision: str, lengths: str, rate: float) -> dict[str, Any]:
    run = {
        "devices": ["cuda:0", "cuda:1"],
        "speed": made_speed(1.9 * rate),
        "load_seconds": 12.34,
        "over_gpu_only": 0.95,
        "over_linear": 0.987,
        "work_seconds": [10.0, 10.1],
    }
    return {
        "model": "random:650M",
        "precision": precision,
        "lengths": lengths,
        "forward": made_speed(rate),
        "floor_tokens_per_second": 2 * rate,
        "over_floor": 0.5,
        "peak_memory_bytes": 3_210_000_000,
        "end_to_end": [run],
    }


def made_attention() -> dict[str, Any]:
    case = {"model": "650M", "precision": "bf16", "lengths": "fixed:166"}
    figure = {"ms": 0.4, "repeats": [0.4, 0.4, 0.41], "spread": 0.025}
    measured = {**case, "relative_error": 0.0025, "as_called": figure}
    rates = [
        (name, {**case, "tokens_per_second": rate, "repeats": [rate]})
        for name, rate in (("a", 4e5), ("b", 3e5))
    ]
    return {
        "attention": [
            {**measured, "candidate": "a"},
            {**measured, "candidate": "b", "without_rotation": {"ms": 0.3, "repeats": [0.3]}},
            {**case, "candidate": "c", "failed": "RuntimeError: no fp16"},
        ],
        "forward": [{"candidate": name, **row} for name, row in rates]
        + [{**case, "candidate": "c", "failed": "UsageError: not there"}],
    }


def made_results() -> list[Result]:
    machine = {
        "device": "NVIDIA H200",
        "driver_version": "580",
        "torch": "2.11",
        "cuda": "13.0",
        "triton": None,
    }
    cases = [
        made_case("fp16", "fixed:166", 400_000.0),
        made_case("fp8", "fixed:166", 600_000.0),
        made_case("fp16", "lognormal", 380_000.0),
    ]
    peers = [
        {"peer": "fair-esm fp32", "model": "650M", "lengths": "fixed:166", "residues_per_second": 20_000.0},
        {"peer": "esm-efficient bf16", "model": "650M", "skipped": "esme is not installed"},
    ]
    found = {"worst_cosine": 0.99991}
    agreement = {"frame_calls_agree": 0.9999, "chunk_calls_agree": 1.0}
    accuracy = {
        "models": {"esm_model": "tiny", "dnabert_model": "tiny", "chunk_length": 500},
        "frames": 12_345,
        "against_fp32": {"fp16": {"dna": found, "protein": found, **agreement}},
    }
    common = {"command": "python -m something", "machine": machine}
    return [
        Result("accuracy", {"kind": "accuracy", **common, **accuracy}),
        Result("flash_attention", {"kind": "flash-attention", **common, **made_attention()}),
        Result("forward_650M", {"kind": "bench", **common, "cases": cases}),
        Result("peers", {"kind": "peers", **common, "peers": peers, "cases": cases[:2]}),
    ]


def rows_of(page: str, name: str) -> list[str]:
    table = page.partition(f"<!-- {name} -->")[2].partition(f"<!-- /{name} -->")[0]
    return table.strip().splitlines()[2:]


def test_every_table_is_filled() -> None:
    page = render_performance.PAGE.render(TEXT, made_results())
    assert "old" not in page
    assert rows_of(page, "forward")[0] == (
        "| 650M | fp16 | fixed:166 | 400,000 | 395,200 | 2,381 | 800,000 | 0.500 | 2.0 % | 3.2 | 1.000 | forward_650M |"
    )
    assert rows_of(page, "precision") == [
        "| 650M | fp8 | fixed:166 | 1.500 |  | forward_650M |",
        "| 650M | fp16 | lognormal |  | 0.950 | forward_650M |",
    ]
    assert (
        "| 2 | 4,524 | 760,000 | 0.950 | 0.987 | 10.0 10.1 | 12.3 | forward_650M |"
        in rows_of(page, "end-to-end")[0]
    )
    assert rows_of(page, "flash-attention") == [
        "| 650M | bf16 | fixed:166 | a | 0.400 |  | 2.5 % | 2.5e-03 | flash_attention |",
        "| 650M | bf16 | fixed:166 | b | 0.400 | 0.300 | 2.5 % | 2.5e-03 | flash_attention |",
    ]
    assert rows_of(page, "flash-forward") == [
        "| 650M | bf16 | fixed:166 | a | 400,000 | 1.000 | 0.0 % | flash_attention |",
        "| 650M | bf16 | fixed:166 | b | 300,000 | 0.750 | 0.0 % | flash_attention |",
    ]
    assert rows_of(page, "flash-failures") == [
        "| c | 650M bf16 | RuntimeError: no fp16 | flash_attention |",
        "| c | 650M bf16 | UsageError: not there | flash_attention |",
    ]
    peers = rows_of(page, "peers")
    assert any("fair-esm fp32 | 20,000 | fp16 19.76, fp8 29.64 | peers |" in row for row in peers)
    assert any("esme is not installed" in row for row in peers)
    assert rows_of(page, "accuracy") == [
        "| tiny | fp16 | 12,345 | 0.9999100 | 0.9999100 | 99.990 % | 100.000 % | accuracy |"
    ]
    assert "driver 580; torch 2.11, cuda 13.0" in rows_of(page, "runs")[0]


def test_rendering_twice_changes_nothing() -> None:
    page = render_performance.PAGE.render(TEXT, made_results())
    assert render_performance.PAGE.render(page, made_results()) == page


def test_without_results_the_page_says_so() -> None:
    page = render_performance.PAGE.render(TEXT, [])
    assert page.count(render_performance.NOT_MEASURED) == len(TABLES)


def test_a_page_without_a_table_is_refused() -> None:
    with pytest.raises(ValueError, match="no place for the table 'forward'"):
        render_performance.PAGE.render("# Title\n", [])


def test_results_of_other_benchmarks_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"speed": 1}))
    (tmp_path / "b.json").write_text(json.dumps({"kind": "bench", "cases": []}))
    assert [result.name for result in read_results(tmp_path)] == ["b"]


def test_the_page_in_the_repository_is_up_to_date() -> None:
    assert render_performance.PAGE.main(["--check"]) == 0
