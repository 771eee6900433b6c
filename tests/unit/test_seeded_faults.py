"""The seeded faults apply to the current code; `make faults` checks that tests detect them."""

from pathlib import Path

import pytest

from tests.seeded_faults import ROOT, Fault, read_faults

FAULTS = read_faults()


def test_each_fault_has_its_own_id() -> None:
    assert len(FAULTS) >= 40
    assert len({fault.id for fault in FAULTS}) == len(FAULTS)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.id)
def test_it_applies_and_compiles(fault: Fault) -> None:
    compile(fault.applied((ROOT / fault.file).read_text(encoding="utf-8")), fault.file, "exec")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.id)
def test_its_tests_are_there(fault: Fault) -> None:
    assert fault.tests
    for node in fault.tests:
        file, _, name = node.partition("::")
        function = name.partition("[")[0]
        assert Path(ROOT / file).is_file()
        assert f"def {function}(" in (ROOT / file).read_text(encoding="utf-8") or not name


@pytest.mark.parametrize("source", ["", "twice twice"])
def test_text_that_is_not_there_once_is_refused(source: str) -> None:
    fault = Fault(id="a", what="", file="b.py", old="twice", new="once", tests=())
    with pytest.raises(ValueError, match=r"in b\.py, not once"):
        fault.applied(source)
