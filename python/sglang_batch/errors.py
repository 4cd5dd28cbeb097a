"""Everything this package raises on purpose.

::

    SGLangBatchError
    ├── ConfigError           a setting that cannot be used
    ├── InputError            an input file or a request that cannot be used
    ├── StoreError            state on disk that cannot be used
    │   └── StoreWriteError   it could be used if there were room, or permission
    ├── EngineError           SGLang did not do what we rely on
    │   └── UnsupportedSGLang another SGLang release than the supported one
    ├── ServerError           a server, asked from a shell, refuses or is not there
    └── ApiError              an HTTP answer: status and OpenAI error body

A bad *line* of a batch is not an exception: it is data, see
:class:`sglang_batch.request.RequestOutput` and
:class:`sglang_batch.batch_api.jsonl.LineError`.
"""

from __future__ import annotations


class SGLangBatchError(Exception):
    """Base of all errors raised by this package."""


class ConfigError(SGLangBatchError, ValueError):
    """A setting that cannot be used; the message says which and what would do."""


class InputError(SGLangBatchError, ValueError):
    """An input that cannot be used; the message names file, line and reason."""


class StoreError(SGLangBatchError):
    """State on disk that cannot be used; the message names the path."""


class StoreWriteError(StoreError):
    """Something could not be written; it may be tried again once there is room."""


class EngineError(SGLangBatchError, RuntimeError):
    """SGLang did not do what this package relies on."""


class UnsupportedSGLang(EngineError):
    """The installed SGLang is not the release this package extends."""


class ApiError(SGLangBatchError):
    """An HTTP error answer in OpenAI's shape.

    ``retry=False`` becomes the header ``x-should-retry: false``, which keeps the
    official clients from repeating a call that cannot succeed.
    """

    def __init__(
        self,
        status_code: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.status_code = status_code
        self.message = message
        self.param = param
        self.code = code
        self.retry = retry
