"""What other programs are given: FASTA, BED and GFF3 of viral contigs and regions, read as strictly as they read it."""

import gzip
import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import unquote

import dnaio
import pytest

from tests.workflows.conftest import Tool
from tests.workflows.test_multiqc import predict
from virnuc_core.run_folder import RunFolder

pytestmark = pytest.mark.slow

# As assemblers and GenBank name records.
PLAIN = ("NODE_1_length_16000_cov_12.3", "k141_7", "scaffold_1_2", "contig-3", "NC_001422.1", "s0.ctg000001l")
# As the formats do not allow in all places, or give a meaning.
ODD = ("#1", "track", "~tilde", "gi|9626372|ref|NC_001422.1|", "a;b=c&d,e", "50%_ä/b")
# Prints each feature as JSON.
GFFUTILS = """
import json, sys
import gffutils
db = gffutils.create_db(sys.argv[1], ":memory:", merge_strategy="error", keep_order=True)
for f in db.all_features(order_by=("seqid", "start")):
    print(json.dumps([f.id, f.seqid, f.featuretype, f.start, f.end, f.strand, dict(f.attributes)]))
"""

Region = tuple[str, int, int]


class Handover:
    """A run over a prophage in its host and the viral example contigs; `contigs` has the bases by name."""

    def __init__(self, folder: RunFolder, contigs: Mapping[str, str]) -> None:
        self.folder = folder
        self.contigs = contigs

    @property
    def regions(self) -> list[Region]:
        """Contig, first and last base (from 1) of each row of regions.tsv."""
        rows = [line.split("\t") for line in self.folder.regions.read_text().splitlines()[1:]]
        return [(contig, int(start), int(end)) for contig, start, end, *_ in rows]


@pytest.fixture(scope="module", params=[PLAIN, ODD], ids=["plain", "odd"])
def run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, examples_dir: Path
) -> Handover:
    root = tmp_path_factory.mktemp("handover")
    labels = dict(line.split("\t")[:2] for line in (examples_dir / "labels.tsv").read_text().splitlines())
    with dnaio.open(examples_dir / "contigs.fa.gz") as records:
        sequences = {record.id: record.sequence for record in records}
    viral = [sequence for name, sequence in sequences.items() if labels[name] == "virus"]
    prophage = sequences["contig_01"] + viral[0] + sequences["contig_02"]
    contigs = dict(zip(request.param, [prophage, *viral], strict=True))
    text = "".join(f">{name} flag=1 multi=2.0\n{bases}\n" for name, bases in contigs.items())
    (root / "contigs.fa").write_text(text)
    predict(root / "contigs.fa", root / "run")
    found = Handover(RunFolder(root / "run"), contigs)
    assert [contig for contig, _, _ in found.regions] == list(contigs)
    assert 1 < found.regions[0][1] < found.regions[0][2] < len(prophage)
    return found


def read_fasta(path: Path) -> Iterator[tuple[str, str]]:
    """Records by their whole headers, which is what anvi'o takes for the name; no blank lines, nothing but bases."""
    text = gzip.decompress(path.read_bytes()).decode()
    assert re.fullmatch(r"(>[^\n]+\n(?:[ACGTRYSWKMBDHVN]{80}\n)*(?:[ACGTRYSWKMBDHVN]{1,80}\n))+", text)
    for record in text[1:].split("\n>"):
        header, *lines = record.splitlines()
        yield header, "".join(lines)


def test_fasta_records_have_the_names_that_programs_take(run: Handover) -> None:
    contigs, regions = map(list, map(read_fasta, (run.folder.viral_contigs, run.folder.regions_fasta)))
    calls = dict(line.split("\t")[:9:8] for line in run.folder.contigs.read_text().splitlines()[1:])
    assert dict(contigs) == {name: bases for name, bases in run.contigs.items() if calls[name] == "virus"}
    assert len(contigs) >= 5
    named = {
        f"{contig}_{start}_{end}": run.contigs[contig][start - 1 : end] for contig, start, end in run.regions
    }
    assert dict(regions) == named
    for records in (contigs, regions):
        names = [name for name, _ in records]
        assert len(set(names)) == len(names)
        assert not any(re.search(r"\s", name) for name in names)
        if set(run.contigs) == set(PLAIN):
            assert all(re.fullmatch(r"[A-Za-z0-9_.-]+", name) for name in names)  # as anvi'o wants it


def test_bed_has_the_regions(run: Handover) -> None:
    rows = [line.split("\t") for line in run.folder.regions_bed.read_text().splitlines()]
    assert not any(row[0].startswith(("#", "track", "browser")) for row in rows)
    for (name, begin, end, _, score, strand), (contig, start, last) in zip(rows, run.regions, strict=True):
        assert unquote(name) == unquote(contig)
        assert (int(begin), int(end)) == (start - 1, last)
        assert 0 <= int(begin) < int(end) <= len(run.contigs[contig])
        assert 0 <= int(score) <= 1000
        assert strand == "."
    assert len({tuple(row[:4]) for row in rows}) == len(rows)


def test_gffutils_reads_the_regions(run: Handover, tool: Tool) -> None:
    command = [tool("gff") / "python", "-W", "error", "-c", GFFUTILS, run.folder.regions_gff3]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    features = [json.loads(line) for line in done.stdout.splitlines()]
    assert sorted((unquote(f[1]), f[3], f[4]) for f in features) == sorted(run.regions)
    assert {(f[2], f[5]) for f in features} == {("viral_sequence", ".")}
    assert len({f[0] for f in features}) == len(features)
    assert all(f[6].keys() == {"ID", "chunks", "mean_p", "tier"} for f in features)


def test_genometools_finds_the_gff3_valid(run: Handover) -> None:
    if (gt := shutil.which("gt")) is None:
        pytest.skip("genometools (gt) is not on PATH")
    command = [gt, "gff3validator", "-typecheck", "so", run.folder.regions_gff3]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "input is valid GFF3\n"), done.stderr
