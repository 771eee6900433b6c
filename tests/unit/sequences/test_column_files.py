from pathlib import Path

import numpy as np
import pytest

from virnuc_core.columns import ByteColumn
from virnuc_core.errors import DamagedFileError
from virnuc_core.sequences.column_files import ColumnWriter, map_column, map_strings


def test_appended_parts_come_back_as_one_column(tmp_path: Path) -> None:
    with ColumnWriter(tmp_path) as columns:
        for part in ([1, 2], [], [3]):
            columns.append("numbers", np.array(part, np.int64))
    assert map_column(tmp_path, "numbers", np.int64, 3).tolist() == [1, 2, 3]


def test_strings_come_back_and_views_are_stored_without_their_surroundings(tmp_path: Path) -> None:
    column = ByteColumn.from_strings(["left", "a", "", "bc", "right"])
    with ColumnWriter(tmp_path) as columns:
        columns.append_strings("names", column.rows(1, 4))
        columns.append_strings("names", column.rows(0, 1))
    mapped = map_strings(tmp_path, "names", 4)
    assert mapped.to_strings() == ["a", "", "bc", "left"]
    assert mapped.rows(2, 4).to_strings() == ["bc", "left"]
    assert not mapped.data.flags.writeable


def test_empty_columns_can_be_mapped(tmp_path: Path) -> None:
    with ColumnWriter(tmp_path) as columns:
        columns.append("numbers", np.empty(0, np.uint8))
        columns.append_strings("names", ByteColumn.from_strings([]))
    assert len(map_column(tmp_path, "numbers", np.uint8, 0)) == 0
    assert len(map_strings(tmp_path, "names", 0)) == 0


@pytest.mark.parametrize("keep", [0, 7, 23])
def test_a_short_or_missing_file_is_damage(tmp_path: Path, keep: int) -> None:
    with ColumnWriter(tmp_path) as columns:
        columns.append("numbers", np.arange(3))
    path = tmp_path / "numbers.bin"
    if keep:
        path.write_bytes(path.read_bytes()[:keep])
    else:
        path.unlink()
    with pytest.raises(DamagedFileError, match=f"{keep} bytes instead of 24"):
        map_column(tmp_path, "numbers", np.int64, 3)


def test_an_error_leaves_the_files_closed(tmp_path: Path) -> None:
    columns = ColumnWriter(tmp_path)
    columns.append("numbers", np.arange(3))
    columns.__exit__(KeyError, KeyError(), None)
    with pytest.raises(ValueError, match="closed"):
        columns.append("numbers", np.arange(3))
