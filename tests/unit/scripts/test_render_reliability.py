"""The tables of docs/reliability.md add up what the result files count."""

from typing import Any

from scripts.render_reliability import PAGE, TABLES

TEXT = "".join(f"<!-- {name} -->\nold\n<!-- /{name} -->\n" for name in TABLES)


def made_os_errors(cases: dict[str, int], resumed: int) -> dict[str, Any]:
    return {"cases": cases, "endings": {"exit code 6": 3, "completed": 1}, "resumed_identical": resumed}


def made_reader(**found: int) -> dict[str, Any]:
    none = dict.fromkeys(("traceback", "crash", "executed", "harmful_message", "hang"), 0)
    return {
        "inputs": 100,
        "accepted": 60,
        "refused": 30,
        **none,
        "slowest_seconds": 1.25,
        "peak_mb": 80,
        **found,
    }


def made_mates(model: str, *others: int) -> dict[str, Any]:
    ways = {str(number): {"sequences": 40, "other": other} for number, other in enumerate(others)}
    return {"cases": [{"device": "cpu", "model": model, "precision": "fp32", "ways": ways}]}


def made_results() -> dict[str, Any]:
    kills = {"kills_by_stage": {"embed": 5, "plan": 2}, "runs_by_way": {"lane": 3, "cli": 1}}
    large = {
        "chunks": 5000,
        "frames": 9000,
        "shards": 7,
        "seconds": 90,
        "before_bytes": 2e6,
        "peak_bytes": 3e6,
    }
    soak = {
        **{"runs": 10, "with_other_outputs": 1, "bytes_more_each_run": 2500, "open_files_more": 2},
        **{"threads_more": 3, "processes_left": 4, "files_left": ["a", "b"]},
    }
    cases = {"write ENOSPC": 4, "write EIO": 2, "fsync EIO": 1, "full disk": 3}
    return {
        "kills": {**kills, "kills": 7, "runs": 4, "identical": 3},
        "commit_points": {
            "kills": 9,
            "continued_identical": {"as it is": 9, "content lost": 8, "names lost": 7},
        },
        "flips": {"outcomes": {"shard": {"found": 6, "harmless": 4}}, "silent": 1},
        "os_errors": {way: made_os_errors(cases, 9) for way in ("inline", "lane", "cli")},
        "fuzz": {
            "readers": {"FASTA": made_reader(traceback=2, crash=3, executed=1, harmful_message=4, hang=1)}
        },
        "soak": {"soak": soak, "large": [large]},
        "batch_mates": made_mates("esm2:tiny", 0, 2),
        "batch_mates_h200": made_mates("esm2:random:650M", 1, 0),
        "batch_mates_3B": made_mates("esm2:random:3B", 0, 0),
    }


def rows(name: str) -> list[str]:
    return TABLES[name](made_results()).splitlines()[2:]


def test_every_table_has_its_place_and_is_made_again_the_same() -> None:
    page = PAGE.render(TEXT, made_results())
    assert "old" not in page
    assert PAGE.render(page, made_results()) == page


def test_runs_that_did_not_end_byte_identical_are_counted() -> None:
    assert rows("kills") == [
        "| embed | 5 |",
        "| plan | 2 |",
        "| all kills | **7** |",
        "| runs (3 with lane, 1 with cli) | 4 |",
        "| runs that ended byte-identical to an undisturbed one | **3** |",
    ]
    assert [row.split(" | ")[1:] for row in rows("commit-points")] == [
        ["9", "**9** |"],
        ["9", "**8** |"],
        ["9", "**7** |"],
    ]
    assert all(row.endswith("| 10 | completed: 1, exit code 6: 3 | **9** |") for row in rows("os-errors"))


def test_calls_that_fail_are_counted_by_call_and_error() -> None:
    assert rows("os-error-kinds") == [
        "| fsync | 0 | 1 | 0 |",
        "| write | 4 | 2 | 0 |",
        "| full from this call on | 3 |  |  |",
    ]


def test_what_is_wrong_is_not_hidden_in_a_sum() -> None:
    assert rows("flips") == [
        "| shard | 10 | 6 | 4 |",
        "| changed a value without an error |  |  | **1** |",
    ]
    assert rows("fuzz") == ["| FASTA | 100 | 60 | 30 | 10 | 1 | 1.25 s | 80 MB |"]
    assert [row.split(" | ")[1] for row in rows("soak")] == [
        *("10 |", "1 |", "2.5 kB |", "2 |", "3 |", "4 |", "2 |"),
    ]
    assert rows("batch-mates") == [
        "| cpu | esm2:tiny | fp32 | 80 | **2** |",
        "| cpu | 650M | fp32 | 80 | **1** |",
        "| cpu | 3B | fp32 | 80 | **0** |",
    ]


def test_the_page_in_the_repository_is_up_to_date() -> None:
    assert PAGE.main(["--check"]) == 0
