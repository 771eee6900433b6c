"""`virnuc doctor`: finds problems of this machine or installation, and how to fix them; imports torch."""

import difflib
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import click

from virnuc_cli.config import (
    find_settings_files,
    iter_commands,
    read_settings_files,
    settings_of,
    variable_of,
)
from virnuc_core.doctor import checks, host
from virnuc_core.doctor.host import Finding
from virnuc_core.env_config import VARIABLES, env, names_with_prefix, value_of
from virnuc_core.errors import UsageError, VirnucError
from virnuc_core.plain_text import without_secrets
from virnuc_core.versions import installed_version

_ANSWER_WITHIN_S = 5.0
_PREFECT_SERVER = "see whether the server runs (virnuc up), or unset PREFECT_API_URL"
_PREFECT_AUTH = "set PREFECT_API_AUTH_STRING (or PREFECT_API_KEY) to what the server expects"


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
            advice = (
                f"did you mean {close[0]}?" if close else "docs/configuration.md lists those that there are"
            )
            yield Finding("settings", name, "warning", "nothing reads this variable", advice)


def prefect_findings() -> Iterator[Finding]:
    """Whether the Prefect server answers, and is of the version here; Prefect itself, which runs what its settings say, is not imported."""
    import httpx  # slow, and --help needs none of it

    url, own = value_of("PREFECT_API_URL"), installed_version("prefect")
    if not url:
        yield Finding(
            "prefect", "server", "ok", "PREFECT_API_URL is not set: only deployed runs need a server"
        )
        return
    shown, password, key = (
        without_secrets(url),
        value_of("PREFECT_API_AUTH_STRING"),
        value_of("PREFECT_API_KEY"),
    )
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    auth = httpx.BasicAuth(*password.split(":", 1)) if password and ":" in password else None
    try:
        answer = httpx.get(
            f"{url.rstrip('/')}/admin/version", headers=headers, auth=auth, timeout=_ANSWER_WITHIN_S
        )
        if answer.status_code in (401, 403):
            found = f"{shown} refuses this client: not authorized"
            yield Finding("prefect", "server", "problem", found, _PREFECT_AUTH)
            return
        version = str(answer.raise_for_status().json())
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        found = f"{shown} does not answer ({without_secrets(str(error))})"
        yield Finding("prefect", "server", "problem", found, _PREFECT_SERVER)
        return
    found = f"{shown} answers, version {version}"
    if version.split(".")[:2] == own.split(".")[:2]:
        yield Finding("prefect", "server", "ok", found)
    else:
        advice = f"it and Prefect {own} here should be of one version"
        yield Finding("prefect", "server", "warning", found, advice)


def store_findings() -> Iterator[Finding]:
    """Whether MLflow's store is reachable and writable."""
    from tasks.tracking import Store

    if env().tracking == "off":
        yield Finding("mlflow", "store", "ok", "VIRNUC_TRACKING is off: runs are not logged")
        return
    where = without_secrets(env().tracking_uri or f"SQLite in {env().home}")
    try:
        Store().connection()
    except VirnucError as error:
        advice = "results are complete without it, but not logged: see MLFLOW_TRACKING_URI and VIRNUC_HOME"
        yield Finding("mlflow", "store", "problem", f"{where}: {error}", advice)
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
