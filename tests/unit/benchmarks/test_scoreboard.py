"""The scoreboard's pieces, what it reads of each program, its figures with refused sequences, and its page."""

import gzip
import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import scoreboard
from benchmarks.kmers import (
    KmerModel,
    blocks,
    canonical_kmers,
    frequencies,
    load_training_genomes,
    shares_found,
)
from benchmarks.kmers import main as kmers_main
from benchmarks.scoreboard import (
    Answers,
    Program,
    SequenceSet,
    figures,
    read_contigs,
    read_jaeger,
    run,
    run_measured,
    score_set,
    tiers,
    virnuc,
)
from scripts.render import scoreboard as page
from tests.made_models import NO_OPEN_FRAME, MadeModels
from virnuc_core.columns import ByteColumn

JAEGER = Path(__file__).parents[2] / "data" / "jaeger"
COMPLEMENT = str.maketrans("ACGT", "TGCA")


def genome(length: int, seed: int, letters: str = "ACGT") -> str:
    return "".join(random.Random(seed).choices(letters, k=length))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Files of genomes as the scoreboard takes them; viruses have more of A."""
    folder = tmp_path / "data"
    folder.mkdir()
    rows = [
        "id\tclass\tfamily\torganism",
        "phage\tviral\tMicroviridae\tX phage",
        "herpes\tviral\tHerpesviridae\tY virus",
    ]
    (folder / "genomes.tsv").write_text("\n".join(rows) + "\n")
    with gzip.open(folder / "val.fa.gz", "wt") as file:
        for number, (name, kind, length) in enumerate(
            (("phage", "viral", 1050), ("herpes", "viral", 700), ("b", "bacteria", 999), ("p", "plant", 299))
        ):
            file.write(f">{name} class={kind}\n{genome(length, number)}\n")
    for place, name in enumerate(("train.fa.gz", "extra.fa.gz")):
        with gzip.open(folder / name, "wt") as file:
            for number in range(4):
                for kind, letters in (("viral", "AAACGT"), ("bacteria", "ACGT")):
                    sequence = genome(12_000, 10 * place + number, letters)
                    file.write(f'>{kind}{place}{number} class={kind} organism="G{number} s"\n{sequence}\n')
    return folder


def test_genomes_are_cut_into_pieces_without_a_shorter_rest(data: Path) -> None:
    of_300, of_500, of_1000 = scoreboard.val_sets(data, (300, 500, 1000), most=7)
    assert of_300.kinds == ("prokaryotic virus",) * 3 + ("eukaryotic virus",) * 2 + ("bacteria",) * 2
    whole = [genome(1050, 0), genome(700, 1), genome(999, 2)]
    expected = [s[begin : begin + 300] for s in whole for begin in range(0, len(s) - 299, 300)]
    chosen = [0, 1, 2, 3, 4, 5, 7]
    assert of_300.bases.to_strings() == [expected[row] for row in chosen]
    assert of_500.is_viral.tolist() == [True, True, True, False]
    assert of_500.subsets["without eukaryotic viruses"].tolist() == [True, True, False, True]
    assert of_1000.bases.to_strings() == [genome(1050, 0)[:1000]]


def test_canonical_kmers_are_those_of_both_strands() -> None:
    sequences = [genome(40, seed) for seed in range(3)]
    sequences[1] = sequences[1][:20] + "N" + sequences[1][21:]
    reverse = [sequence.translate(COMPLEMENT)[::-1] for sequence in sequences]
    codes, row = canonical_kmers(ByteColumn.from_strings(sequences), 21)
    assert np.bincount(row, minlength=3).tolist() == [20, 0, 20]
    codes_of_reverse, _ = canonical_kmers(ByteColumn.from_strings(reverse), 21)
    assert sorted(codes.tolist()) == sorted(codes_of_reverse.tolist())
    assert canonical_kmers(ByteColumn.from_strings(["ACG", ""]), 6)[0].tolist() == []
    # AAAAAA and TTTTTT are one of 2,080.
    found = frequencies(ByteColumn.from_strings(["A" * 9 + "T" * 9, "NNN"]))
    assert found.shape == (2, 2080)
    assert found[0].max() == pytest.approx(8 / 13)
    assert found[1].sum() == 0


def test_blocks_hold_every_sequence_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.kmers._BLOCK_BASES", 10)
    sequences = ["ACG", "", "ACGTACGTACGTACGT", "AC", "GGG", "TTTTTTT"]
    parts = [
        block.to_strings() for block in blocks(ByteColumn.from_strings(["skipped", *sequences]).rows(1, 7))
    ]
    assert [sequence for part in parts for sequence in part] == sequences
    assert len(parts) > 2


def test_overlap_is_the_share_of_21_mers_on_either_strand() -> None:
    known = [genome(2000, 0), genome(2000, 1)]
    # The last one has 21-mers only across the two known sequences.
    asked = [
        known[0][100:400],
        known[1][100:400].translate(COMPLEMENT)[::-1].lower(),
        known[0][500:620] + genome(300, 5),
        genome(400, 6),
        "ACGT",
        known[0][-15:] + known[1][:15],
    ]
    shares = shares_found(ByteColumn.from_strings(asked), ByteColumn.from_strings(known))
    assert shares.tolist() == [1, 1, 0.25, 0, 0, 0]


def test_the_baseline_learns_from_6_mers_at_its_own_length(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = KmerModel.train(load_training_genomes(data), (300, 1000), 200)
    model.save(tmp_path / "m.npz")
    sequences = [genome(1500, 1, "AAACGT"), genome(1500, 2), genome(310, 3, "AAACGT"), "NNNN"]
    fasta = tmp_path / "in.fa"
    fasta.write_text("".join(f">s{number} x\n{each}\n" for number, each in enumerate(sequences)))
    paths = ["--model", tmp_path / "m.npz", "--fasta", fasta, "--out", tmp_path / "out.tsv"]
    monkeypatch.setattr(sys, "argv", ["kmers", "predict", *map(str, paths)])
    kmers_main()
    answers = scoreboard.read_kmers(tmp_path / "out.tsv", 5)
    assert answers.is_called.tolist() == [True, False, True, False, False]
    assert np.isnan(answers.p_virus).tolist() == [False, False, False, True, True]
    by_hand = frequencies(ByteColumn.from_strings(sequences[:3])) @ model.weights.T + model.bias
    margins = [by_hand[0, 1], by_hand[1, 1], by_hand[2, 0]]
    assert answers.p_virus[:3] == pytest.approx(1 / (1 + np.exp(-np.array(margins))), abs=1e-3)


def test_tables_of_jaeger_are_read() -> None:
    """Those of jaeger-bio 1.26.5 for examples/contigs.fa.gz; two more sequences were too short for it."""
    by_prediction, filtered = read_jaeger(JAEGER, 20)
    assert np.isnan(by_prediction.p_virus).nonzero()[0].tolist() == [18, 19]
    assert by_prediction.is_called.nonzero()[0].tolist() == [2]
    assert filtered.is_called.nonzero()[0].tolist() == [2]
    assert by_prediction.p_virus[2] > 0.99
    s1 = np.exp([2.611, 1.730, -3.842])
    assert by_prediction.p_virus[1] == pytest.approx(s1[1] / s1.sum(), abs=0.01)


def test_a_sequence_without_a_score_counts_as_not_called_and_ranks_last() -> None:
    is_viral = np.array([True, True, True, False, False, False])
    answers = Answers(
        p_virus=np.array([0.9, 0.2, np.nan, 0.6, 0.1, np.nan]),
        is_called=np.array([True, False, False, True, False, False]),
        tiers=("confident", "unsure", "NA", "confident", "confident", "NA"),
    )
    kinds = ["viral", "viral", "viral", "a", "a", "b"]
    found = figures(answers, is_viral, kinds, np.ones(6, np.bool_))
    # Of 9 pairs: 0.9 wins 3, 0.2 wins 2, and the one without a score ties with one.
    assert found["auroc"] == round(5.5 / 9, 4)
    assert (found["sequences"], found["viral"], found["scored"]) == (6, 3, round(4 / 6, 4))
    assert (found["precision"], found["recall"]) == (0.5, pytest.approx(1 / 3, abs=1e-6))
    assert found["called_virus"] == {"viral": round(1 / 3, 4), "a": 0.5, "b": 0}
    assert found["mcc"] == 0
    assert found["ece_balanced"] == pytest.approx((0.05 + 0.4 + 0.3 + 0.05) / 2, abs=0.01)
    only = figures(answers, is_viral, kinds, is_viral)
    assert (only["auroc"], only["mcc"], only["recall"]) == (None, None, pytest.approx(1 / 3, abs=1e-6))
    assert tiers(answers, is_viral) == {
        "confident": {"sequences": 3, "right": round(2 / 3, 4), "called_virus": 2, "precision": 0.5},
        "likely": {"sequences": 0, "right": None, "called_virus": 0, "precision": None},
        "unsure": {"sequences": 1, "right": 0, "called_virus": 0, "precision": None},
    }


def script(folder: Path, text: str) -> list[str]:
    path = folder / "program.py"
    path.write_text(text)
    return [sys.executable, str(path)]


def test_memory_is_that_of_the_program_alone(tmp_path: Path) -> None:
    ballast = bytearray(300_000_000)
    ballast[::4096] = b"x" * len(ballast[::4096])
    small = run_measured(script(tmp_path, "print('nothing')"), tmp_path)
    assert not small["refused"]
    assert small["peak_mb"] < 100
    large = run_measured(script(tmp_path, "b = b'x' * 200_000_000"), tmp_path)
    assert 200 < large["peak_mb"] < 300
    assert large["seconds"] > 0


def test_a_refusal_is_no_failure(tmp_path: Path) -> None:
    said = "import sys; sys.exit('ERROR all records in\\n   input.fa are < 2000bp')"
    program = Program(
        name="J",
        rows=("J", "J, filtered"),
        version="1",
        command=lambda fasta, out: script(tmp_path, said),
        read=lambda out, count: (),
        refusal=r"all records in .* are < \d+bp",
    )
    used, answers = run(program, ByteColumn.from_strings(["ACGT"]), tmp_path)
    assert used["refused"]
    assert scoreboard.speeds(used, 4, 0.0)["mbp_per_minute"] is None
    assert [np.isnan(each.p_virus).all() for each in answers.values()] == [True, True]
    with pytest.raises(SystemExit, match=r"exit code 1:\nERROR"):
        run_measured(script(tmp_path, said), tmp_path)


def test_virnuc_is_read_from_its_table_of_contigs(made_models: MadeModels, tmp_path: Path) -> None:
    options = [*made_models.flags, "--head", str(made_models.longest_head), "--chunk-length", "60"]
    bases = ByteColumn.from_strings([genome(400, 1), "N" * 90, NO_OPEN_FRAME, genome(150, 2)])
    used, answers = run(virnuc(options), bases, tmp_path)
    assert used["peak_mb"] > 100
    found = answers["virnuc"]
    assert np.isnan(found.p_virus).tolist()[:2] == [False, True]
    assert ((found.p_virus >= 0.5) == found.is_called).all()
    assert found.tiers is not None
    assert found.tiers[1] == "NA"
    table = tmp_path / "contigs.tsv"
    table.write_text("contig\tmean_p\tcall\ttier\ns0\t0.5\tvirus\tunsure\n")
    with pytest.raises(SystemExit, match="no column p_virus"):
        read_contigs(table, 1)


def measured_sets(folder: Path) -> list[dict[str, object]]:
    """A set of pieces and one of contigs, scored by a program that counts A."""
    count = """
import sys
rows = open(sys.argv[1]).read().split()
scores = [each.count('A') / len(each) for each in rows[1::2]]
open(sys.argv[2], 'w').write('\\n'.join(f'{a[1:]}\\t{b}' for a, b in zip(rows[::2], scores, strict=True)))
"""

    def read(out: Path, number: int) -> tuple[Answers, ...]:
        scores = np.array([float(line.split()[1]) for line in out.read_text().splitlines()])
        return (Answers(p_virus=scores, is_called=scores > 0.5, tiers=("likely",) * number),)

    program = Program(
        name="virnuc",
        rows=("virnuc",),
        version="1",
        command=lambda fasta, out: [*script(folder, count), str(fasta), str(out)],
        read=read,
    )
    made = []
    for name, length, subset in (
        ("val", 500, "without eukaryotic viruses"),
        ("gut", None, "without overlap"),
    ):
        own = SequenceSet(
            name=name,
            length=length,
            bases=ByteColumn.from_strings(["AAAC", "AAAA", "CCGA", "AAAT"]),
            is_viral=np.array([True, True, False, False]),
            kinds=("viral", "viral", "bacteria", "plant"),
            subsets={"all": np.ones(4, np.bool_), subset: np.array([True, False, True, False])},
        )
        made.append(score_set(own, [program], {"virnuc": 0.0}, folder))
    overlap = {"overlapping": 2, "overlapping_viral": 1, "mean_share_viral": 0.25, "mean_share_other": 0.0}
    return [made[0], {**made[1], "overlap": overlap}]


def test_the_page_has_what_was_measured_and_no_other_row(tmp_path: Path) -> None:
    for make in page.TABLES.values():
        assert make({}) == page.NOT_MEASURED
    usage = {"seconds": 2.0, "cpu_seconds": 3.0, "peak_mb": 1234, "refused": False}
    report = {
        "kind": "scoreboard",
        "command": "python -m benchmarks.scoreboard --data data",
        "machine": {"cpu": "made up", "threads": 2, "python": "3", "torch": "2"},
        "programs": {"virnuc": "1"},
        "start_up": {"virnuc": usage},
        "kmer_training": usage,
        "sets": json.loads(json.dumps(measured_sets(tmp_path))),
    }
    tables = {name: make({"scoreboard": report}).splitlines()[2:] for name, make in page.TABLES.items()}
    assert tables["val"] == [
        "| 500 bp | virnuc | 4 | 2 | 100.0 % | 0.875 | 0.833 | 0.577 | 0.667 | 1.000 | 0.188 |"
    ]
    assert tables["prokaryotic"] == ["| 500 bp | virnuc | 2 | 1 | 1.000 | 1.000 | 1.000 | 1.000 | 1.000 |"]
    assert tables["classes"] == [
        "| 500 bp | bacteria | 1 | 0.0 % |",
        "| 500 bp | plant | 1 | 100.0 % |",
        "| 500 bp | viral | 2 | 100.0 % |",
    ]
    assert [row[:33] for row in tables["compare"]] == [
        "| gut | all | virnuc | 4 | 2 | 10",
        "| gut | without overlap | virnuc ",
    ]
    assert tables["overlap"] == ["| gut | 4 | 2 | 2 | 1 | 25.0 % | 0.0 % |"]
    without_compare = {"scoreboard": {**report, "sets": report["sets"][:1]}}
    assert page.TABLES["compare"](without_compare) == page.NOT_MEASURED
    assert tables["tiers"][1] == "| 500 bp | `likely` | 4 | 75.0 % | 3 | 66.7 % |"
    assert tables["speed"][0] == "| start-up | virnuc |  | 2.0 | 3.0 |  |  | 1,234 |"
    assert "python -m benchmarks.scoreboard --data data" in page.TABLES["conditions"]({"scoreboard": report})
