"""The Prefect server of the user's settings: its address, its clock, and all pages of what it lists."""

from collections.abc import Callable
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, TypeVar

from virnuc_core.errors import UsageError

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

T = TypeVar("T")


def server_url() -> str:
    """The address of the server in Prefect's settings; UsageError if none is set (a temporary one ends with the command)."""
    from prefect.settings import PREFECT_API_URL

    url: str | None = PREFECT_API_URL.value()
    if not url:
        raise UsageError(
            "no Prefect server is set: set PREFECT_API_URL, for example to http://127.0.0.1:4200/api, or start a server with "
            "`virnuc server up`."
        )
    return url


def connect() -> "SyncPrefectClient":
    from prefect.client.orchestration import get_client

    return get_client(sync_client=True)


def server_failure() -> Exception | None:
    """Why the server does not answer; None when it does."""
    with connect() as client:
        return client.api_healthcheck()


def read_all(read: Callable[..., list[T]], *names: str, **filters: Any) -> list[T]:
    """All that a method of a client finds, page by page."""
    found: list[T] = []
    while page := read(*names, **filters, offset=len(found), limit=200):  # the server's limit
        found += page
    return found


def server_time(client: "SyncPrefectClient") -> datetime:
    return parsedate_to_datetime(client.request("GET", "/health").headers["Date"])
