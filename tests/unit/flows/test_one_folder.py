import sys
from pathlib import Path

import pytest

from flows.one_folder import require_one_folder
from virnuc_core.errors import UsageError


def test_packages_lie_side_by_side() -> None:
    require_one_folder()


def test_foreign_package_of_the_same_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "__init__.py").touch()
    for name in [name for name in sys.modules if name.partition(".")[0] == "tasks"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UsageError, match="environment of its own"):
        require_one_folder()
