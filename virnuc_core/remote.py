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
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import unquote, urlsplit

from virnuc_core.env_config import env, home_folder
from virnuc_core.errors import InputError, MismatchError, StorageError, StorageLostError, UsageError
from virnuc_core.files import (
    file_digest,
    from_json,
    open_lock,
    parse_object,
    sync_file,
    temporary_name,
    write_text,
)
from virnuc_core.plain_text import without_secrets

_SCHEME: Final = re.compile(r"([a-z][a-z0-9+.-]*)://", re.ASCII)
_EXTRAS: Final = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
_MD5: Final = re.compile(r'"?([0-9a-f]{32})"?')
_VERSION_KEYS: Final = ("ETag", "etag", "md5Hash", "generation", "Last-Modified", "LastModified", "mtime")
_RANGE_BYTES: Final = 8 << 20
_BATCH_BYTES: Final = 8 * _RANGE_BYTES
_MISSING: Final = (404, 410)
_PERMANENT: Final = frozenset(range(400, 500)) - {408, 425, 429}

Value = TypeVar("Value")

_log = logging.getLogger(__name__)


def is_url(name: str) -> bool:
    """Whether an input or output is a URL and not a path."""
    return _SCHEME.match(name) is not None


def file_name(url: str) -> str:
    """The last part of a URL's path."""
    path = unquote(urlsplit(url).path) if url.startswith("http") else url
    return path.rstrip("/").rpartition("/")[2]


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
    return (env().staging or home_folder() / "staging").absolute()


def require_shared_staging(what: str) -> None:
    """Raises UsageError where no staging folder is named that all hosts see."""
    if env().staging is None:
        raise UsageError(
            f"{what} needs a folder that all hosts of the pool see: set VIRNUC_STAGING to one, in the environment of "
            "the process that runs this, or choose mode local."
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Source:
    """A staged file as recorded beside it: the state of the remote file, and hashes of what was copied.

    Attributes:
        version: what changes when the file does, by the server's account.
        md5: by the server's account, if it tells; for some encrypted objects it is something else.
        other_sha256: of a copy that had another MD5.
        sha256: of the complete copy.
    """

    url: str
    size: int | None
    version: str
    md5: str | None = None
    other_sha256: str | None = None
    sha256: str | None = None


def stage_in(url: str) -> Path:
    """Copies a remote file to the staging folder, unless it is there already; continues an interrupted copy.

    Raises:
        InputError: there is no such file.
        StorageError: it must not be read.
        StorageLostError: it cannot be reached, has changed meanwhile, or arrived damaged; a retry may succeed.
        UsageError: a package is missing for this kind of URL.
    """
    name = file_name(url) or "index"
    if name in (".", "..") or "\0" in name:
        raise UsageError(f"{without_secrets(url)} names no file: give the address of one.")
    folder = _staged(url, "inputs")
    folder.mkdir(parents=True, exist_ok=True)
    target, record = folder / name, folder / ".source.json"
    with open_lock(folder / ".lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        remote = _Remote.open(url)
        source, known = remote.source(), _read_source(record)
        if known is not None and (known.size, known.version) != (source.size, source.version):
            _log.warning("%s has changed since it was copied: it is copied again", remote.shown)
            known = None
        if known is None:
            for stale in (target, temporary_name(target)):
                stale.unlink(missing_ok=True)
            known = source
            _write(record, known)
        if known.sha256 is None or not target.exists() or known.size not in (None, target.stat().st_size):
            _copy(remote, known, target, record)
    return target


def _copy(remote: "_Remote", source: _Source, target: Path, record: Path) -> None:
    part = temporary_name(target)
    remote.read_into(part, source.size)
    if remote.source() != replace(source, other_sha256=None, sha256=None):
        raise StorageLostError(f"{remote.shown} changed while it was copied. Run the same command again.")
    sha256 = file_digest(part)
    md5 = source.md5 and file_digest(part, "md5")
    if md5 != source.md5 and source.other_sha256 != sha256:
        part.unlink()
        _write(record, replace(source, other_sha256=sha256))
        raise StorageLostError(
            f"the copy of {remote.shown} has the MD5 {md5}, and the server says {source.md5}: it is copied again. If the "
            "second copy is the same, that is no MD5 (of an encrypted object), and the copy is used."
        )
    sync_file(part)
    part.replace(target)
    _write(record, replace(source, sha256=sha256))
    _log.info("%s was copied to %s", remote.shown, target)


def require_place(out: str, fingerprint: str, *, force: bool) -> None:
    """Checks the place of results before they are computed, by writing and deleting a small file there.

    Raises:
        MismatchError: it holds the results of a run with another plan, and `force` is not set.
        StorageError: it cannot be written (StorageLostError: for now).
        UsageError: a package is missing for this kind of URL.
    """
    probe = _Remote.open(f"{out}/.virnuc-{fingerprint[:12]}")
    probe.write(b"")
    probe.delete()
    report = _Remote.open(f"{out}/run.json").read()
    if report is None or force:
        return
    try:
        other = parse_object(report).get("plan_fingerprint")
    except ValueError:
        other = None
    if other != fingerprint:
        raise MismatchError(
            f"{without_secrets(out)} holds the results of a run with other inputs, models or settings: choose another "
            "--out, or give --force to replace them."
        )


def stage_out(files: Mapping[Path, str], report: Path, report_url: str) -> None:
    """Uploads result files, verifies each by reading it back, and uploads `report` last; skips what is there already.

    Until then a reader finds no report, or the same one as now.

    Raises:
        StorageError: the place cannot be written.
        StorageLostError: it cannot be reached, or a file arrived damaged; a retry may succeed.
    """
    remote_report = _Remote.open(report_url)
    if remote_report.read() == report.read_bytes():
        return
    remote_report.delete()
    for path, url in files.items():
        _upload(path, _Remote.open(url))
    _upload(report, remote_report)


def _upload(path: Path, remote: "_Remote") -> None:
    size, sha256 = path.stat().st_size, file_digest(path)
    if remote.sha256(size) == sha256:
        return
    remote.put(path)
    if remote.sha256(size) != sha256:
        raise StorageLostError(
            f"{remote.shown} is not as {path}, of which it is a copy. Run the same command again."
        )
    _log.info("%s was copied to %s", path, remote.shown)


@dataclass(frozen=True, slots=True)
class _Remote:
    """A remote file; failures of its server are raised as virnuc's errors."""

    shown: str
    files: Any  # fsspec's AbstractFileSystem, which has no types
    path: str

    @classmethod
    def open(cls, url: str) -> "_Remote":
        import fsspec  # when there is a URL at all

        try:
            files, path = fsspec.url_to_fs(url)
        except ImportError as error:
            extra = _EXTRAS.get(url.partition(":")[0])
            advice = f"pip install 'virnuc[{extra}]'" if extra else f"install what it names: {error}"
            raise UsageError(
                f"{without_secrets(url)} needs a package that is not installed: {advice}."
            ) from error
        except Exception as error:
            raise UsageError(
                f"{without_secrets(url)} cannot be used as an address: give a path, or a URL with s3://, gs:// or https://."
            ) from error
        return cls(without_secrets(url), files, path)

    def source(self) -> _Source:
        """The present state of the file."""
        self.files.invalidate_cache()
        info = self._call(self.files.info, self.path)
        version = json.dumps([str(info[key]) for key in _VERSION_KEYS if info.get(key) is not None])
        return _Source(url=self.shown, size=info.get("size"), version=version, md5=_md5_of(info))

    def read_into(self, part: Path, size: int | None) -> None:
        """Reads the whole file; with its size known, goes on where `part` ends."""
        if size is None or not self._has_ranges():
            self._call(self.files.get_file, self.path, str(part))
            return
        with part.open("ab") as file:
            # What was read last may not have reached the disk.
            file.truncate(file.tell() // _BATCH_BYTES * _BATCH_BYTES)
            for text in self._blocks(file.seek(0, os.SEEK_END), size):
                file.write(text)
                if file.tell() % _BATCH_BYTES == 0:
                    file.flush()
                    os.fsync(file.fileno())

    def read(self) -> bytes | None:
        """The content of a small file; None if there is none."""
        try:
            return bytes(self._call(self.files.cat_file, self.path))
        except InputError:
            return None

    def sha256(self, size: int) -> str | None:
        """The digest of the content, read back; None if there is no file of that size."""
        try:
            if self.source().size != size:
                return None
        except InputError:
            return None
        digest = hashlib.sha256()
        for text in self._blocks(0, size):
            digest.update(text)
        return digest.hexdigest()

    def put(self, path: Path) -> None:
        """Uploads a file; whoever reads meanwhile finds the old one or none."""
        self._call(self.files.put_file, str(path), self.path, missing=StorageError)

    def write(self, content: bytes) -> None:
        """Uploads a small file."""
        self._call(self.files.pipe_file, self.path, content, missing=StorageError)

    def delete(self) -> None:
        """Deletes the file, if there is one."""
        with suppress(InputError):
            self._call(self.files.rm_file, self.path)

    def _blocks(self, begin: int, end: int) -> Iterator[bytes]:
        """The bytes from `begin` to `end`, several ranges at a time."""
        for first in range(begin, end, _BATCH_BYTES):
            begins = range(first, min(first + _BATCH_BYTES, end), _RANGE_BYTES)
            ends = [min(begin + _RANGE_BYTES, end) for begin in begins]
            blocks = self._call(
                self.files.cat_ranges, [self.path] * len(ends), list(begins), ends, on_error="raise"
            )
            if [len(block) for block in blocks] != [b - a for a, b in zip(begins, ends, strict=True)]:
                raise StorageLostError(
                    f"{self.shown} was cut off while it was read. Run the same command again."
                )
            yield from blocks

    def _has_ranges(self) -> bool:
        """Whether parts can be read; a web server may answer with the whole file, which may not fit into memory."""
        if "http" not in self.files.protocol:
            return True

        def probe() -> bool:
            with self.files.open(self.path, block_size=1, cache_type="none") as file:
                try:
                    return file.seek(1) == 1 and file.read(1) is not None
                except ValueError:
                    return False

        return self._call(probe)

    def _call(
        self,
        function: Callable[..., Value],
        *arguments: Any,
        missing: type[InputError | StorageError] = InputError,
        **options: Any,
    ) -> Value:
        try:
            return function(*arguments, **options)
        except Exception as raised:  # each kind of storage raises the errors of its own libraries
            error = raised
            if isinstance(error, FileNotFoundError):
                cause = error.__cause__
                if "http" not in self.files.protocol or getattr(cause, "status", None) in _MISSING:
                    raise missing(f"{self.shown} does not exist. Check the address.") from error
                error = cause if isinstance(cause, Exception) else error  # every failure is one to fsspec
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise  # this machine's disk
            reason = without_secrets(f"{type(error).__name__}: {error}")
            if _is_refused(error):
                raise StorageError(
                    f"{self.shown} is refused ({reason}): see to the credentials, which virnuc takes from the environment "
                    "or the provider's files, and run the same command again."
                ) from error
            raise StorageLostError(
                f"{self.shown} cannot be reached ({reason}). Run the same command again: what is finished is kept."
            ) from error


def _is_refused(error: Exception) -> bool:
    """Whether a retry is of no use."""
    name = type(error).__name__
    return (
        isinstance(error, PermissionError | ValueError | TypeError)
        or name.endswith("CredentialsError")
        or name in ("ParamValidationError", "ProfileNotFound")
        or getattr(error, "status", None) in _PERMANENT
    )


def _staged(url: str, kind: str) -> Path:
    """The folder of a URL in the staging folder."""
    return staging_folder() / kind / hashlib.sha256(url.encode()).hexdigest()[:12]


def _md5_of(info: Mapping[str, Any]) -> str | None:
    """The MD5 of a file's content in hex; the ETag of what was uploaded in parts to S3 is another hash."""
    if encoded := info.get("md5Hash") or info.get("Content-MD5"):
        return base64.b64decode(encoded).hex()
    is_s3 = "StorageClass" in info
    found = _MD5.fullmatch(str(info.get("ETag"))) if is_s3 else None
    return found[1] if found else None


def _read_source(path: Path) -> _Source | None:
    try:
        return from_json(_Source, parse_object(path.read_bytes()))
    except (FileNotFoundError, ValueError):
        return None


def _write(path: Path, source: _Source) -> None:
    write_text(path, json.dumps(asdict(source)) + "\n")
