"""The contigs of the pictures: bacterial windows with a phage in them, put together from the validation set."""

from pathlib import Path

import pytest

pytest.importorskip("playwright")

from scripts.report_screenshots import PASTED, write_pasted


def write_records(path: Path, names: set[str]) -> None:
    path.write_text(
        "".join(
            f">{name} made\n{letter * 70_000}\n"
            for name, letter in zip(sorted(names), "ACGT" * 9, strict=False)
        )
    )


def test_parts_follow_one_another(tmp_path: Path) -> None:
    names = {name for parts in PASTED.values() for name, _, _ in parts}
    write_records(tmp_path / "val.fa", names)
    write_pasted(tmp_path / "val.fa", tmp_path / "out.fa")
    lines = (tmp_path / "out.fa").read_text().splitlines()
    made = dict(zip((line[1:] for line in lines[::2]), lines[1::2], strict=True))
    assert list(made) == list(PASTED)
    assert len(made["A_johnsonii_with_crAss-like_phage"]) == 65_000
    for contig, parts in PASTED.items():
        assert len(made[contig]) == sum(last - first + 1 for _, first, last in parts)


def test_a_missing_record_is_named(tmp_path: Path) -> None:
    write_records(tmp_path / "val.fa", {"k149_60461"})
    with pytest.raises(SystemExit, match=r"has no record .*k149_27590"):
        write_pasted(tmp_path / "val.fa", tmp_path / "out.fa")
