"""When a run without a heartbeat counts as lost; tests/production pauses a real server."""

from uuid import UUID, uuid4

import pytest

from deployments.lost_runs import SteadyServer

SILENT = [uuid4()]


@pytest.mark.parametrize(
    ("found", "is_lost"),
    [
        ([SILENT] * 5, [False] * 4 + [True]),
        ([*[SILENT] * 3, None, *[SILENT] * 5], [False] * 8 + [True]),  # the server was away in between
        ([[]] * 5, [False] * 5),
    ],
)
def test_only_while_the_server_answers_for_as_long(
    found: list[list[UUID] | None], is_lost: list[bool]
) -> None:
    server = SteadyServer(window=45.0, now=0.0)
    lost = [server.confirm(silent, now=10.0 * number) for number, silent in enumerate(found, start=1)]
    assert [silent == SILENT for silent in lost] == is_lost
