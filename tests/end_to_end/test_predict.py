"""`virnuc predict`: results, resuming, refusing, starting over, and how it ends."""

import json
import os
import re
import signal
from pathlib import Path

import h5py
import pytest

from tests.end_to_end.conftest import CommandLine, random_dna, rows, virnuc_process, wait_until
from tests.made_models import WIDTH, MadeModels
from virnuc_core import pipeline
from virnuc_core.env_config import reload
from virnuc_core.inference.events import LaneReport
from virnuc_core.inference.lanes import LocalLanes
from virnuc_core.inference.plan import read_plan
from virnuc_core.results import aggregate
from virnuc_core.results.run_opening import open_run_folder
from virnuc_core.run_folder import RunFolder
from virnuc_core.specs import CHUNKS_BY_RECORD

pytestmark = pytest.mark.usefixtures("prefect_server", "small_shards")

RESULTS = {
    *("virus_summary.tsv", "virus_summary.parquet", "virus.fa.gz", "virus.bed", "virus.gff3"),
    *("contigs.tsv", "contigs.parquet", "chunks.tsv", "chunks.parquet", "embeddings.h5"),
    *("prediction_results.txt", "prediction_results_highestscore.csv", "rejected.tsv", "report.html"),
    *("virnuc_mqc.json", "run.json", "plan.json", "frames", "shards"),
}
STAGES = [
    *("reading sequences", "planning the run", "computing embeddings"),
    *("collecting embeddings", "classifying sequences", "writing results"),
]


def visible_names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


def test_every_result_is_there_and_every_record_accounted_for(finished: Path) -> None:
    assert visible_names(finished) == RESULTS
    contigs = [row[0] for row in rows(finished / "contigs.tsv")[1:]]
    assert contigs == [*(f"contig_{i}" for i in range(5)), "closed"]
    assert [row[1] for row in rows(finished / "rejected.tsv")[1:]] == ["not_dna"]
    assert rows(finished / "chunks.tsv")[-1][-1] == "no_open_frame"
    with h5py.File(finished / "embeddings.h5") as file:
        num_frames = len(file["frame_ids"])
        assert file["dna"].shape == file["protein"].shape == (num_frames, WIDTH)
    assert len(rows(finished / "prediction_results.txt")) == num_frames + 1


def test_a_head_of_no_single_length_cuts_records_by_their_own(
    virnuc: CommandLine, models: MadeModels, tmp_path: Path
) -> None:
    lengths = (150, 1998, 2001, 4998, 5001, 30_000)
    fasta, out = tmp_path / "contigs.fa", tmp_path / "run"
    fasta.write_text("".join(f">r{length}\n{random_dna(length, length)}\n" for length in lengths))
    command = ("predict", fasta, "--out", out, *models.flags, "--head", models.longest_head)
    document = virnuc.done(*command, "--json").document
    assert document["chunk_length"] == CHUNKS_BY_RECORD
    table = rows(out / "chunks.tsv")
    contig, start, end = (table[0].index(name) for name in ("seq_name", "start", "end"))
    sizes = {row[contig]: int(row[end]) - int(row[start]) + 1 for row in table[:0:-1]}
    assert [sizes[f"r{length}"] for length in lengths] == [150, 500, 1000, 1000, 1000, 1000]
    assert virnuc.done(*command, "--json").document["shards"]["computed"] == 0
    assert "500 bp for sequences below 2,000 bp" in virnuc.done("inspect", out).out
    virnuc.refused(4, "now 700", *command, "--chunk-length", "700")
    table_of_scores = tmp_path / "scores.txt"
    virnuc.done("score", out / "embeddings.h5", "--head", models.longest_head, "--out", table_of_scores)
    assert table_of_scores.read_bytes() == (out / "prediction_results.txt").read_bytes()
    virnuc.done(*command[:2], "--out", tmp_path / "fixed", *command[4:], "--chunk-length", "700")


def test_continues_without_computing_again_and_starts_over_with_force(
    virnuc: CommandLine, models: MadeModels, contigs: Path, run: Path
) -> None:
    command = ("predict", contigs, "--out", run, *models.flags)
    shards = {path: path.stat().st_mtime_ns for path in (run / "shards").iterdir()}
    results = {name: (run / name).read_bytes() for name in RESULTS if (run / name).is_file()}
    (run / "notes.txt").write_text("of the user")

    document = virnuc.done(*command, "--json").document
    assert document["shards"] == {"total": 5, "computed": 0}
    assert document["counts"]["rejected"] == 1
    quiet = virnuc.done(*command, "--quiet")
    assert (quiet.out, quiet.err) == ("", "")
    assert {path: path.stat().st_mtime_ns for path in shards} == shards

    fresh = virnuc.done(*command, "--force")
    assert fresh.out.startswith("6 contigs: ")
    assert str(run) in fresh.out
    lines = [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in fresh.err.splitlines()]
    assert all(line.startswith("virnuc: ") for line in lines), "something else writes to the terminal"
    assert [stage for stage in STAGES if f"virnuc: {stage}" in lines] == STAGES
    assert all(path.stat().st_mtime_ns > before for path, before in shards.items())
    for name in results.keys() - {"run.json", "report.html", "virnuc_mqc.json"}:
        assert (run / name).read_bytes() == results[name], name
    assert visible_names(run) == {*RESULTS, "notes.txt"}


def test_another_rule_of_calls_reuses_the_shards(
    virnuc: CommandLine, models: MadeModels, contigs: Path, run: Path
) -> None:
    command = ("predict", contigs, "--out", run, *models.flags)
    chunks = (run / "chunks.tsv").read_bytes()
    numbers = []
    for threshold in (1e-6, 0.999999):
        document = virnuc.done(*command, "--json", "--threshold", threshold).document
        assert document["shards"] == {"total": 5, "computed": 0}
        assert json.loads((run / "run.json").read_text())["calls"] == document["calls"]
        assert document["calls"] == {"threshold": threshold, "fdr": None, "prior": None}
        numbers.append(document["counts"]["contigs_virus"])
        assert len(rows(run / "virus_summary.tsv")) == 1 + numbers[-1]
        virnuc.done("inspect", run)
    assert numbers == [5, 0]
    assert (run / "chunks.tsv").read_bytes() == chunks
    virnuc.refused(2, "head.safetensors is not one", *command, "--fdr", 0.05)


def test_contigs_are_called_by_the_sample_with_a_calibrated_head(
    virnuc: CommandLine, models: MadeModels, contigs: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    command = ("predict", contigs, "--out", run, *models.flags, "--head", models.longest_head)
    plain = virnuc.done(*command, "--json").document
    relaxed = virnuc.done(*command, "--json", "--relaxed").document
    assert relaxed["sample"]["threshold"] == 0.5
    assert relaxed["sample"]["share"] == plain["sample"]["share"]
    given = virnuc.done(*command, "--json", "--prior", 0.9, "--fdr", 1e-6).document
    assert (given["sample"]["share"], given["sample"]["threshold"]) == (0.9, None)
    assert given["counts"]["contigs_virus"] == 0
    assert given["shards"] == {"total": plain["shards"]["total"], "computed": 0}
    assert "expected false positives: 0.0 (0.0%)" in given["summary"]
    assert virnuc.done(*command, "--json").document["sample"] == plain["sample"]


def test_refuses_to_mix_runs_and_names_both_values(
    virnuc: CommandLine, models: MadeModels, other_head: Path, contigs: Path, run: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.fa"
    other.write_text(f">one\n{random_dna(600, seed=9)}\n>short\nACGTACGT\n")
    chunks = (run / "chunks.tsv").read_bytes()
    for source, changes, values in (
        (contigs, ("--chunk-length", 300), ("500", "300")),
        (contigs, ("--min-length", 1000), ("1000",)),
        (contigs, ("--head", other_head), ("head.safetensors", "other_head.safetensors")),
        (other, (), ("contigs.fa", "other.fa")),
    ):
        error = virnuc.refused(4, "--force", "predict", source, "--out", run, *models.flags, *changes)
        assert all(value in error for value in values)
    with open_run_folder(run, force=False):
        virnuc.refused(2, "another run", "predict", contigs, "--out", run, *models.flags)
    assert (run / "chunks.tsv").read_bytes() == chunks
    virnuc.done("predict", other, "--out", run, "--force", "--min-length", 100, *models.flags)
    assert [row[0] for row in rows(run / "contigs.tsv")[1:]] == ["one"]
    assert rows(run / "rejected.tsv")[1][4].startswith("shorter than 100")


def test_missing_and_damaged_shards_are_computed(
    virnuc: CommandLine, models: MadeModels, contigs: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.suffix in (".tsv", ".h5")}
    _, damaged, *others = sorted((run / "shards").iterdir())
    damaged.write_bytes(damaged.read_bytes()[:-100])
    for path in (*others, run / "run.json", run / "embeddings.h5"):
        path.unlink()
    command = ("predict", contigs, "--out", run, *models.flags)
    monkeypatch.setenv("VIRNUC_DISABLE_PACKING", "1")
    monkeypatch.setenv("VIRNUCPRO_DISABLE_FP16", "1")
    reload()
    budget = read_plan(run / "plan.json").models[1].token_budget
    error = virnuc.refused(4, f"esm2.token_budget: was {budget}, now 1\n", *command)
    assert "switches: was none, now VIRNUC_DISABLE_PACKING" in error
    assert "VIRNUCPRO_DISABLE_FP16 is a variable of VirNucPro" in error
    assert "set VIRNUC_DISABLE_FP16 instead" in error
    monkeypatch.delenv("VIRNUC_DISABLE_PACKING")
    reload()
    result = virnuc.done(*command, "--json")
    assert "Moved to" in result.err
    assert result.document["shards"] == {"total": 5, "computed": 4}
    assert {path: path.read_bytes() for path in before} == before
    virnuc.done("inspect", run)


def test_what_no_plan_can_be_made_of(
    virnuc: CommandLine, models: MadeModels, contigs: Path, tmp_path: Path
) -> None:
    command = ("predict", contigs, "--out", tmp_path / "run", *models.flags)
    virnuc.refused(2, "layer 7", *command, "--repr-layer", 7)
    virnuc.refused(5, "fp16", *command, "--precision", "fp16")
    unusable = tmp_path / "unusable.fa"
    unusable.write_text(">a\nEFILPQEFILPQ\n")
    rejected = virnuc("predict", unusable, "--out", tmp_path / "run", *models.flags, "--force", "--json")
    assert (rejected.code, rejected.document["exit_code"]) == (3, 3)
    assert rows(tmp_path / "run" / "rejected.tsv")[1][1] == "a"


@pytest.mark.slow
def test_interrupt_ends_every_process_and_says_so(models: MadeModels, tmp_path: Path) -> None:
    large = tmp_path / "large.fa"
    large.write_text("".join(f">c{i}\n{random_dna(30_000, seed=i)}\n" for i in range(60)))
    out = tmp_path / "run"
    with virnuc_process("predict", large, "--out", out, *models.flags, "--engine", "reference") as process:
        wait_until((out / "shards").exists)
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert err.splitlines()[-1].startswith("virnuc: error: interrupted")


class Damaging(LocalLanes):
    """Local lanes on a disk that damages one shard, and swaps two others, after they are computed."""

    is_done = False

    def compute(self, folder: RunFolder) -> list[LaneReport]:
        reports = super().compute(folder)
        if not self.is_done:
            self.is_done = True
            folder.shard(0).write_bytes(b"garbage")
            folder.shard(1).write_bytes(folder.shard(2).read_bytes())
        return reports


def test_shards_that_are_damaged_or_swapped_are_computed_again(
    finished: Path,
    models: MadeModels,
    contigs: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "run"
    # Nothing is merged before the damage.
    monkeypatch.setattr(aggregate, "is_committed", lambda folder, index: False)
    config = models.config(chunk_length=500, devices=("cpu",))
    with Damaging(("cpu",)) as lanes:
        report = pipeline.predict([str(contigs)], str(out), config, lanes)
    assert [[shard.shard for shard in lane.shards] for lane in report.lanes] == [[0, 1, 2, 3, 4], [0, 1]]
    assert sorted(path.name for path in (out / "shards").glob("*.damaged-*")) == [
        "shard_00000.h5.damaged-1",
        "shard_00001.h5.damaged-1",
    ]
    for name in ("embeddings.h5", "chunks.tsv", "contigs.tsv"):
        assert (out / name).read_bytes() == (finished / name).read_bytes()
    assert "shard_00000.h5 is corrupt" in caplog.text
    assert "shard_00001.h5 belongs to another run" in caplog.text
