import sys
from pathlib import Path

import pytest

from virnuc_cli.one_folder import PACKAGES, require_one_folder
from virnuc_core.errors import UsageError


@pytest.mark.parametrize("package", PACKAGES)
def test_foreign_package_of_the_same_name_is_refused(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_one_folder()
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").touch()
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UsageError, match=f"{package} in {tmp_path}.* environment of its own"):
        require_one_folder()
