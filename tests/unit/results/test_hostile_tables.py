"""Names that could do harm go through a whole run: every table has the rows and cells that it must have."""

import csv
from pathlib import Path

import pytest

from benchmarks.reliability.crafted import HOSTILE_NAMES
from tests.made_models import MadeModels, plan_run
from virnuc_core.results.aggregate import aggregate
from virnuc_core.results.embeddings import Embeddings
from virnuc_core.results.tables import write_tables


@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_NONE])
def test_every_table(quoting: int, made_models: MadeModels, tmp_path: Path) -> None:
    fasta = tmp_path / "in.fa"
    fasta.write_bytes(b"".join(b">%b\n%b\n" % (name.encode(), b"ACG" * 30) for name in HOSTILE_NAMES * 2))
    run = plan_run(tmp_path / "run", fasta, made_models.config(), shard_seconds=10.0)
    run.compute()
    aggregate(run.folder, run.plan, run.store)
    counts = write_tables(run.folder, run.store)
    rows = {
        run.folder.predictions: counts.chunks,
        run.folder.contigs: counts.records,
        run.folder.prediction_results: counts.frames,
        run.folder.highest_score: counts.scored_chunks,
    }
    for path, number in rows.items():
        with path.open(encoding="utf-8", newline="") as file:
            table = list(csv.reader(file, delimiter="\t", quoting=quoting))
        assert len(table) == number + 1
        assert {len(row) for row in table} == {len(table[0])}
        assert all(cell.isprintable() and cell[:1] not in set("=+-@\"'") for row in table for cell in row)
    with Embeddings(run.folder.embeddings, own=True) as embeddings:
        ids = embeddings.read_ids(0, len(embeddings))
    with run.folder.prediction_results.open(encoding="utf-8") as file:
        assert [line.split("\t")[0] for line in file][1:] == ids
    assert len(set(ids)) == len(ids)
    assert {path.name for path in tmp_path.iterdir()} == {"in.fa", "run"}
