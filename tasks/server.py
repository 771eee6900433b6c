"""Answers of Prefect's server: all pages of a list, and the time."""

from collections.abc import Callable
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

T = TypeVar("T")


def read_all(read: Callable[..., list[T]], *names: str, **filters: Any) -> list[T]:
    """All that a method of a client finds, page by page."""
    found: list[T] = []
    while page := read(*names, **filters, offset=len(found), limit=200):  # the server's limit
        found += page
    return found


def server_time(client: "SyncPrefectClient") -> datetime:
    """The server's clock."""
    return parsedate_to_datetime(client.request("GET", "/health").headers["Date"])
