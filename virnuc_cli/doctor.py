"""`virnuc doctor`: finds problems of this machine or installation, and how to fix them; imports torch."""

import difflib
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from virnuc_cli.config import (
    find_settings_files,
    iter_commands,
    read_settings_files,
    settings_of,
    variable_of,
)
from virnuc_cli.local_prefect import prepare_local_prefect
from virnuc_core.doctor import checks, host
from virnuc_core.doctor.host import Finding
from virnuc_core.env_config import VARIABLES, env, names_with_prefix
from virnuc_core.errors import UsageError, VirnucError
from virnuc_core.plain_text import without_secrets

if TYPE_CHECKING:
    from deployments.server import Quarantine

_ANSWER_WITHIN_S = 5.0
_PREFECT_SERVER = "see whether the server runs (virnuc up), or unset PREFECT_API_URL for a temporary one"

_PREFECT_AUTH = "set PREFECT_API_AUTH_STRING (or PREFECT_API_KEY) to what the server expects"
_QUARANTINE = "it takes no jobs until its check passes, within a minute, or the worker is started again"


def all_findings(root: click.Group, config: str | None, *, quick: bool) -> Iterator[Finding]:
    """All findings, dependencies first; `quick` skips the run on each device."""
    parts: dict[str, Callable[[], Iterable[Finding]]] = {
        "versions": checks.version_findings,
        "cuda": checks.cuda_findings,
        "devices": checks.device_findings,
        "host": host.host_findings,
        "settings": lambda: settings_findings(root, config),
        "prefect": prefect_findings,
        "mlflow": store_findings,
        "caches": checks.cache_findings,
        "bundled": checks.bundled_findings,
        "self test": checks.self_test_findings,
    }
    if quick:
        del parts["self test"]
    with _only_in_findings():
        for topic, part in parts.items():
            try:
                yield from part()
            except VirnucError as error:
                yield Finding(topic, "all of it", "problem", str(error))


def settings_findings(root: click.Group, config: str | None) -> Iterator[Finding]:
    """Findings on settings files, and on misspelled variables."""
    try:
        files = read_settings_files(find_settings_files(config), root).files
        yield Finding("settings", "files", "ok", ", ".join(map(str, files)) or "no settings file")
    except UsageError as error:
        yield Finding("settings", "files", "problem", str(error), "fix or remove the file")
    known = {"VIRNUC_CONFIG", *(variable.name for variable in VARIABLES)}
    for path, command in iter_commands(root):
        known |= {variable_of(path, option) for option in settings_of(command).values()}
    for name in names_with_prefix("VIRNUC_"):
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            advice = f"did you mean {close[0]}?" if close else "virnuc config show lists those that there are"
            yield Finding("settings", name, "warning", "nothing reads this variable", advice)


def prefect_findings() -> Iterator[Finding]:
    """Whether Prefect can be imported, and its server is reachable and of the same version."""
    import httpx  # slow, and --help needs none of it

    try:
        prepare_local_prefect()
        import prefect
        from prefect.settings import PREFECT_API_URL
    except (UsageError, ImportError, AttributeError, TypeError) as error:
        advice = "install with -c constraints.txt" if not isinstance(error, UsageError) else ""
        yield Finding("prefect", "import", "problem", f"it cannot be used: {error}", advice)
        return
    url = PREFECT_API_URL.value()
    if not url:
        found = "none is set: a temporary one runs for the length of each command"
        yield Finding("prefect", "server", "ok", found)
        return
    shown = without_secrets(url)
    try:
        version, quarantined = _ask_server()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, RuntimeError) as error:
        is_refusal = isinstance(error, httpx.HTTPStatusError) and error.response.status_code in (401, 403)
        if is_refusal:
            found, advice = f"{shown} refuses this client: not authorized", _PREFECT_AUTH
        else:
            found, advice = f"{shown} does not answer ({without_secrets(str(error))})", _PREFECT_SERVER
        yield Finding("prefect", "server", "problem", found, advice)
        return
    found = f"{shown} answers, version {version}"
    if _is_same(version):
        yield Finding("prefect", "server", "ok", found)
    else:
        advice = f"it and Prefect {prefect.__version__} here should be of one version"
        yield Finding("prefect", "server", "warning", found, advice)
    for each in quarantined:
        found = f"in quarantine since {each.since:%Y-%m-%d %H:%M} UTC: {each.reason}"
        yield Finding("workers", each.name, "warning", found, _QUARANTINE)


def _ask_server() -> "tuple[str, list[Quarantine]]":
    """Version of the server, and which slots and hosts take no jobs; asks with the user's password or API key."""
    from prefect.settings import PREFECT_API_REQUEST_TIMEOUT, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

    from deployments.server import connect, quarantines

    with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0, PREFECT_API_REQUEST_TIMEOUT: _ANSWER_WITHIN_S}):
        with connect() as client:
            version = str(client.api_version())
        return version, quarantines() if _is_same(version) else []


def _is_same(version: str) -> bool:
    import prefect

    return version.split(".")[:2] == prefect.__version__.split(".")[:2]


def store_findings() -> Iterator[Finding]:
    """Whether MLflow's store is reachable and writable."""
    from tasks.mlflow_store import check_store  # imports httpx

    where = without_secrets(env().tracking_uri or f"SQLite in {env().home}")
    if reason := check_store():
        found = f"{where} cannot be written ({reason})"
        advice = "results are whole without it, but not recorded: see MLFLOW_TRACKING_URI and VIRNUC_HOME"
        yield Finding("mlflow", "store", "problem", found, advice)
    else:
        yield Finding("mlflow", "store", "ok", f"{where} can be written")


@contextmanager
def _only_in_findings() -> Iterator[None]:
    """Silences log lines whose content the findings repeat."""
    handler = logging.NullHandler()
    loggers = [logging.getLogger(name) for name in ("virnuc_core", "tasks", "flows")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
