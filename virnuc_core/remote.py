"""Files at object storage and web servers: inputs are copied to the staging folder, results are copied back.

Any URL that fsspec opens. Credentials come from the environment or the provider's own files only; messages show URLs
without passwords and query strings, which may hold signatures.
"""

import base64
import errno
import fcntl
import hashlib
import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from virnuc_core.env_config import env, home_folder
from virnuc_core.errors import (
    InputError,
    MismatchError,
    StorageError,
    StorageLostError,
    UsageError,
    VirnucError,
)
from virnuc_core.files import file_digest, open_lock, parse_object, sync_file, temporary_name, write_text
from virnuc_core.plain_text import without_secrets

_log = logging.getLogger(__name__)


def is_url(name: str) -> bool:
    """Whether an input or output is a URL and not a path."""
    return re.match(r"[a-z][a-z0-9+.-]*://", name) is not None


def file_name(url: str) -> str:
    """The last part of a URL's path, "" if that is no name of a file."""
    path = unquote(urlsplit(url).path) if url.startswith("http") else url.rpartition("://")[2]
    name = path.rstrip("/").rpartition("/")[2]
    return "" if name in (".", "..") else name


def output_path(out: str) -> Path:
    """Where a run works: `out` itself, or for a URL a path in the staging folder, always the same one.

    Raises:
        UsageError: nothing can be written to this kind of URL.
    """
    if not is_url(out):
        return Path(out)
    if out.startswith("http") or not file_name(out):
        raise UsageError(
            f"--out {out} cannot be written: give a path, or a URL such as s3://BUCKET/NAME or gs://BUCKET/NAME."
        )
    return _staged(out.rstrip("/"), "outputs") / file_name(out)


def staging_folder() -> Path:
    """Copies of what comes from elsewhere, and runs whose results go elsewhere."""
    return (env().staging or home_folder("staging")).absolute()


def require_shared_staging(what: str) -> None:
    """Raises UsageError where no staging folder is named that all hosts see."""
    if env().staging is None:
        raise UsageError(
            f"{what} needs a folder visible to all hosts of the pool: set VIRNUC_STAGING in the environment of this process, "
            "or choose mode local."
        )


def stage_in(url: str) -> Path:
    """Copies a remote file to the staging folder, unless the copy that is there is of its present version.

    Raises:
        InputError: there is no such file.
        StorageError: it must not be read.
        StorageLostError: it cannot be reached, has changed meanwhile, or arrived damaged; a retry may succeed.
        UsageError: a package is missing for this kind of URL.
    """
    name = file_name(url) or "index"
    if "\0" in name or unquote(url).endswith(("/.", "/..")):
        raise UsageError(f"{without_secrets(url)} does not name a file: give the URL of one.")
    folder = _staged(url, "inputs")
    target = folder / name
    part, record = temporary_name(target), folder / ".version"
    folder.mkdir(parents=True, exist_ok=True)
    with open_lock(folder / ".lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with _errors_of(url):
            files, path = _open(url)
            info = files.info(path)
        if info.get("type") == "directory":
            raise InputError(f"{without_secrets(url)} is a folder. Give the URLs of the files in it.")
        if target.exists() and record.exists() and record.read_text() == _version(info):
            return target
        record.unlink(missing_ok=True)
        with _errors_of(url):
            files.get_file(path, str(part))
            files.invalidate_cache()
            after = files.info(path)
        md5 = info.get("md5Hash") or info.get("Content-MD5")
        if (
            _version(after) != _version(info)
            or info.get("size") not in (None, part.stat().st_size)
            or (md5 and base64.b64decode(md5).hex() != file_digest(part, "md5"))
        ):
            raise StorageLostError(
                f"{without_secrets(url)} changed while being copied, or its copy is damaged. Run the same command again."
            )
        sync_file(part)
        part.replace(target)
        write_text(record, _version(info))
    _log.info("%s was copied to %s", without_secrets(url), target)
    return target


def require_place(out: str, fingerprint: str, *, force: bool) -> None:
    """Checks the place of results before they are computed, by writing and deleting a small file there.

    Raises:
        MismatchError: it holds the results of a run with another plan, and `force` is not set.
        StorageError: it cannot be written (StorageLostError: for now).
        UsageError: a package is missing for this kind of URL.
    """
    with _errors_of(out, missing=StorageError):
        files, place = _open(out)
        probe = f"{place}/.virnuc-{fingerprint[:12]}"
        files.pipe_file(probe, b"")
        files.rm_file(probe)
        try:
            other = parse_object(files.cat_file(f"{place}/run.json")).get("plan_fingerprint")
        except FileNotFoundError:
            return
        except ValueError:
            other = None
    if other != fingerprint and not force:
        raise MismatchError(
            f"{without_secrets(out)} contains results of a run with other inputs, models or settings: choose another --out, or "
            "replace them with --force."
        )


def stage_out(files: Mapping[Path, str], report: Path, report_url: str) -> None:
    """Uploads result files, verifies each by reading it back, and uploads `report` last; skips what is there already.

    Until then a reader finds no report, or the same one as now.

    Raises:
        StorageError: the place cannot be written.
        StorageLostError: it cannot be reached, or a file arrived damaged; a retry may succeed.
    """
    sha256 = file_digest(report)
    with _errors_of(report_url, missing=StorageError):
        remote, place = _open(report_url)
        if _sha256(remote, place) == sha256:
            return
        with suppress(FileNotFoundError):
            remote.rm_file(place)
    for path, url in {**files, report: report_url}.items():
        _upload(path, url)


def _upload(path: Path, url: str) -> None:
    sha256 = file_digest(path)
    with _errors_of(url, missing=StorageError):
        files, place = _open(url)
        if _sha256(files, place) == sha256:
            return
        files.put_file(str(path), place)
        arrived = _sha256(files, place)
    if arrived != sha256:
        raise StorageLostError(
            f"{without_secrets(url)} is a copy of {path} but differs from it. Run the same command again."
        )
    _log.info("%s was copied to %s", path, without_secrets(url))


def _open(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path in it."""
    import fsspec  # when there is a URL at all

    # A compressed file is copied as it is.
    options = {"client_kwargs": {"auto_decompress": False}, "headers": {"Accept-Encoding": "identity"}}
    try:
        files, path = fsspec.url_to_fs(url, **(options if url.startswith("http") else {}))
    except ImportError as error:
        extra = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}.get(url.partition(":")[0])
        advice = f"pip install 'virnuc[{extra}]'" if extra else f"install the package it names: {error}"
        raise UsageError(
            f"{without_secrets(url)} needs a package that is not installed: {advice}."
        ) from error
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        reason = without_secrets(str(error))
        raise UsageError(
            f"{without_secrets(url)} is not supported ({reason}): give a path, or a URL with s3://, gs:// or https://."
        ) from error
    files.invalidate_cache()
    return files, path


def _sha256(files: Any, path: str) -> str | None:
    try:
        with files.open(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return None


def _version(info: Mapping[str, Any]) -> str:
    """What changes when a file does, by its server's account."""
    keys = ("size", "ETag", "etag", "md5Hash", "generation", "Last-Modified", "LastModified", "mtime")
    return json.dumps([str(info[key]) for key in keys if info.get(key) is not None])


def _staged(url: str, kind: str) -> Path:
    """The folder of a URL in the staging folder."""
    return staging_folder() / kind / hashlib.sha256(url.encode()).hexdigest()[:12]


@contextmanager
def _errors_of(url: str, missing: type[InputError | StorageError] = InputError) -> Iterator[None]:
    """Raises failures of a server as virnuc's errors."""
    try:
        yield
    except VirnucError:
        raise
    except Exception as raised:  # each kind of storage raises the errors of its own libraries
        error, shown = raised, without_secrets(url)
        if isinstance(error, FileNotFoundError):
            # To fsspec, every failure of a web server is one.
            cause = error.__cause__ if url.startswith("http") else None
            if cause is None or getattr(cause, "status", None) in (404, 410):
                raise missing(f"{shown} does not exist. Check the URL.") from error
            error = cause if isinstance(cause, Exception) else error
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise  # this machine's disk
        name, status = type(error).__name__, getattr(error, "status", None)
        reason = without_secrets(f"{name}: {error}")
        is_refused = isinstance(error, PermissionError | ValueError | TypeError | LookupError)
        is_refused |= name.endswith("CredentialsError") or name in ("ParamValidationError", "ProfileNotFound")
        is_refused |= status is not None and 400 <= status < 500 and status not in (408, 425, 429)
        if is_refused:
            raise StorageError(
                f"{shown} is refused ({reason}): check the URL and the credentials (from the environment or the provider's "
                "files), and run the same command again."
            ) from error
        raise StorageLostError(
            f"{shown} cannot be reached ({reason}). Run the same command again: finished work is kept."
        ) from error
