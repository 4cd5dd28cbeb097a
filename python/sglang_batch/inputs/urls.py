"""Files at URLs: downloads before a job, uploads after it.

``http(s)://`` uses plain GET and PUT, which presigned URLs need. Every other scheme
(``s3://``, ``gs://``, ``hf://``, ...) uses fsspec.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qsl, unquote_to_bytes, urlencode

from tqdm import tqdm

from ..errors import ConfigError, InputError, SGLangBatchError, StoreError
from ..store.files import atomic_write
from .compression import plain_name

if TYPE_CHECKING:
    import httpx

MAX_ATTEMPTS = 5
FIRST_PAUSE_S = 1.0
# Of each network operation, in seconds.
_TIMEOUT_S = 60.0
_CONNECT_S = 5.0
_PACKAGES = {
    "s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs",
    "hf": "huggingface_hub", "abfs": "adlfs", "az": "adlfs",
}  # fmt: skip
# Query parameters of presigned URLs: AWS, Google, CloudFront, Azure (two letters).
_SIGNATURE = re.compile(
    r"(?i)x-amz-|x-goog-|(signature|expires|awsaccesskeyid|googleaccessid|policy|"
    r"key-pair-id|sig|s[a-z]|sk[a-z]+)$"
)
_TEMPORARY = {408, 425, 429, 500, 502, 503, 504}


NO_REPOSITORY = "it cannot be the name of a Hugging Face repository (owner/name)"

# As RFC 3986 has them. ``urlsplit`` refuses names of directories that have brackets.
_PARTS = re.compile(r"([^:/?#]*)://([^/?#]*)([^?#]*)(?:\?([^#]*))?", re.DOTALL)


class _Parts(NamedTuple):
    scheme: str
    netloc: str
    path: str
    query: str


class _Refused(Exception):
    """An HTTP error that another attempt will not change."""


def is_url(name: str) -> bool:
    return "://" in name


def as_path(name: str) -> str:
    """The path that a ``file://`` URL names; any other name as it is."""
    path = re.sub("^file://(localhost(?=/))?", "", name, flags=re.IGNORECASE)
    return name if path == name else os.fsdecode(unquote_to_bytes(path))


def location(name: str) -> str:
    """Equal for all names of one file: a URL as it is, a path made absolute."""
    return name if is_url(name) else str(Path(name).resolve())


def scheme_of(url: str) -> str:
    """The scheme of a URL in lower case, empty for a path."""
    return _parts(url).scheme


def _parts(url: str) -> _Parts:
    found = _PARTS.match(url)
    if found is None:
        return _Parts("", "", url, "")
    scheme, netloc, path, query = found.groups("")
    return _Parts(scheme.lower(), netloc, path, query)


def shown(url: str) -> str:
    """A URL without its secrets: without query, user and password."""
    parts = _parts(url)
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}"


def named(name: str) -> str:
    """A path, or a URL without its secrets."""
    return shown(name) if is_url(name) else name


def fingerprint(url: str) -> str:
    """16 hexadecimal digits that stay the same when a URL is signed again."""
    parts = _parts(url)
    query = [
        (key, value)
        for key, value in parse_qsl(parts.query, keep_blank_values=True)
        if not _SIGNATURE.match(key)
    ]
    kept = f"{shown(url)}?{urlencode(sorted(query))}"
    return hashlib.sha256(os.fsencode(kept)).hexdigest()[:16]


def file_suffix(url: str) -> str:
    """Suffix of the file, with that of its compression: ``.jsonl.gz``, or empty."""
    tail = shown(url).rsplit("/", 1)[-1]
    plain = plain_name(tail)
    return Path(plain).suffix + tail[len(plain) :]


def fetch(url: str, path: Path) -> None:
    """Download a file, with a progress bar.

    Raises InputError if that fails, over HTTP after up to ``MAX_ATTEMPTS``, of which two
    may be to connect, ConfigError if the package for the scheme is missing.
    """
    with _bar("Fetching", url) as bar:
        try:
            if _is_http(url):
                _with_attempts(lambda: _get(url, path, bar), connecting=2)
            else:
                files, remote_path = filesystem(url)
                files.get_file(remote_path, str(path), callback=_callback(bar))
        except ConfigError:
            raise
        except Exception as error:  # each scheme has errors of its own
            path.unlink(missing_ok=True)
            raise InputError(f"cannot fetch {shown(url)}: {_reason(error)}") from None


def upload(path: Path, url: str) -> None:
    """Upload a file by HTTP PUT or fsspec.

    Raises StoreError if ``MAX_ATTEMPTS`` fail, ConfigError if the package for the
    scheme is missing.
    """
    with _bar("Uploading", url) as bar:
        try:
            if _is_http(url):
                _with_attempts(lambda: _put(path, url, bar))
            else:
                files, remote_path = filesystem(url)
                _with_attempts(
                    lambda: files.put_file(
                        str(path), remote_path, callback=_callback(bar)
                    )
                )
        except ConfigError:
            raise
        except Exception as error:
            raise StoreError(
                f"cannot upload to {shown(url)}: {_reason(error)}. The results are "
                f"safe in {path}; the same command uploads them again."
            ) from None


@contextmanager
def opened(name: str, mode: str) -> Iterator[Any]:
    """A stream of bytes, ``rb`` or ``wb``, at a path or URL, or ``-``.

    A file that is written appears only if the block ends without an error. Raises
    ConfigError if there is no such file or directory, StoreError if it fails.
    """
    try:
        if name == "-":
            yield (sys.stdin if mode == "rb" else sys.stdout).buffer
        elif (mode == "wb" and _is_http(name)) or Path(name).is_dir():
            what = "a directory" if Path(name).is_dir() else "not a place to write to"
            raise ConfigError(f"{named(name)!r} is {what}; name a file.")
        elif not is_url(name):
            with open(name, mode) if mode == "rb" else atomic_write(Path(name)) as file:
                yield file
        else:
            files, remote = filesystem(name)
            with files.transaction, files.open(remote, mode) as file:
                yield file
    except SGLangBatchError:
        raise
    except Exception as error:  # each scheme has errors of its own
        kind = ConfigError if isinstance(error, FileNotFoundError) else StoreError
        raise kind(f"cannot open {named(name)}: {_reason(error)}.") from None


def check_scheme(url: str) -> None:
    """Raises ConfigError if the scheme is unknown or its package is missing."""
    if not _is_http(url):
        filesystem(url)


def filesystem(url: str) -> tuple[Any, str]:
    """The fsspec file system of a URL, and its path. ConfigError: it has none here."""
    import fsspec

    scheme = scheme_of(url)
    try:
        filesystem, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        how = f"pip install {_PACKAGES[scheme]}" if scheme in _PACKAGES else str(error)
        raise ConfigError(f"{shown(url)} needs a package: {how}") from None
    except Exception as error:  # each scheme has errors of its own
        reason = str(error) if type(error) is ValueError else _reason(error)
        raise ConfigError(f"{shown(url)} cannot be used: {reason}") from None
    return filesystem, path


def why_not_on_hub(ask: Callable[[], object]) -> str | None:
    """Why the Hugging Face hub does not show a repository that ``ask`` asks for.

    None: it does, or answers so slowly that it may.
    """
    import httpx
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        ask()
    except HFValidationError:
        return NO_REPOSITORY
    except HfHubHTTPError as error:
        status = error.response.status_code
        if 400 <= status < 500 and status != 429:
            return (
                f"the Hugging Face hub refuses it (status {status}): check the name, or "
                "set HF_TOKEN if it is private or gated"
            )
    except httpx.ConnectError as error:
        return f"the Hugging Face hub cannot be reached ({error})"
    except httpx.HTTPError:
        pass  # what reads it tries longer
    return None


def _is_http(url: str) -> bool:
    return scheme_of(url) in ("http", "https")


def _with_attempts(attempt: Callable[[], None], connecting: int = MAX_ATTEMPTS) -> None:
    import httpx  # takes a tenth of a second, and most inputs are files here

    pause_s = FIRST_PAUSE_S
    for number in range(1, MAX_ATTEMPTS + 1):
        try:
            attempt()
            return
        except (httpx.TransportError, OSError) as error:
            # A missing file or permission will not appear by waiting.
            most = MAX_ATTEMPTS
            if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
                most = connecting
            if number == most or isinstance(error, FileNotFoundError | PermissionError):
                raise
        time.sleep(pause_s)
        pause_s *= 2


def _get(url: str, path: Path, bar: tqdm[Any]) -> None:
    import httpx

    # Not decompressed here: compression is detected in the file's first bytes.
    headers = {"Accept-Encoding": "gzip, identity"}
    timeout = httpx.Timeout(_TIMEOUT_S, connect=_CONNECT_S)
    with (
        httpx.stream(
            "GET", url, headers=headers, timeout=timeout, follow_redirects=True
        ) as answer,
        open(path, "wb") as file,
    ):
        _check(answer)
        bar.reset(int(answer.headers.get("Content-Length", 0)) or None)
        for chunk in answer.iter_raw():
            file.write(chunk)
            bar.update(len(chunk))


def _put(path: Path, url: str, bar: tqdm[Any]) -> None:
    import httpx

    headers = {"Content-Type": "application/octet-stream"}
    size = path.stat().st_size
    bar.reset(size)
    with open(path, "rb") as file:
        answer = httpx.put(url, content=file, headers=headers, timeout=_TIMEOUT_S)
    _check(answer)
    bar.update(size)


def _check(answer: httpx.Response) -> None:
    if answer.is_success:
        return
    said = f"HTTP {answer.status_code} {answer.reason_phrase}"
    if answer.status_code in _TEMPORARY:
        raise OSError(said)
    raise _Refused(said)


def _reason(error: Exception) -> str:
    if isinstance(error, _Refused) or type(error) is OSError:
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _bar(what: str, url: str) -> tqdm[Any]:
    return tqdm(
        desc=f"{what} {shown(url)}",
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        dynamic_ncols=True,
    )


def _callback(bar: tqdm[Any]) -> Any:
    from fsspec.callbacks import TqdmCallback

    callback = TqdmCallback()
    callback.tqdm = bar
    return callback
