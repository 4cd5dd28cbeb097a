"""Streams of rows on one engine: a running server, or one that is started for them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..batch_api.protocol import MAX_PRIORITY
from ..errors import ConfigError
from .own_server import OwnServer
from .stream_rows import RowLines, StreamAnswer, StreamWindows

WINDOW = 8192
CHAT = "/v1/chat/completions"


class Streamer:
    """Answers streams of rows, one after the other or at the same time.

    ::

        with Streamer(model_path="meta-llama/Llama-3.1-8B-Instruct") as streamer:
            for answer in streamer.stream(rows):
                print(answer.text)

    Args:
        model_path: of a model that is loaded in processes of its own, when the first stream
            starts, and unloaded by :meth:`close`.
        server: instead, the URL of a server that ``sglang-batch serve`` started.
        key: of the server.
        verify: file with the certificate authority of the server's certificate.
        priority: of the windows among the batches of the server, -1000 to 1000.
        backend: with ``model_path``, the ``--backend`` of ``sglang-batch serve``.
        options: with ``model_path``, options of ``sglang-batch serve`` such as ``tp=2``.

    Raises:
        ConfigError: neither or both of ``model_path`` and ``server`` are given, or an option
            cannot be used.
    """

    def __init__(
        self,
        *,
        model_path: str | None = None,
        server: str | None = None,
        key: str | None = None,
        verify: str | None = None,
        priority: int = 0,
        backend: str = "sglang",
        **options: Any,
    ) -> None:
        if (model_path is None) == (server is None):
            raise ConfigError(
                "name an engine: model_path='...' to load a model, or server='http://...' "
                "for a running server, and not both."
            )
        if server is not None and options:
            raise ConfigError(
                f"{next(iter(options))}: the server has its model and options already; "
                "leave it out."
            )
        if model_path is not None and (key is not None or verify is not None):
            raise ConfigError(
                "key and verify are of a running server: name it as server."
            )
        if abs(priority) > MAX_PRIORITY:
            raise ConfigError(
                f"priority={priority!r} must be {-MAX_PRIORITY} to {MAX_PRIORITY}."
            )
        self._model_path = model_path
        self._backend = backend
        self._options = options
        self._url = None if server is None else server.rstrip("/").removesuffix("/v1")
        self._key = key
        self._verify = verify
        self._priority = priority
        self._own: OwnServer | None = None
        self._open: set[StreamWindows] = set()

    def __enter__(self) -> Streamer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End open streams, and the engine if it is the streamer's own."""
        for windows in list(self._open):
            windows.close()
        if self._own is not None:
            self._own.close()
            self._own = None

    def start(self) -> None:
        """Load the model now, if there is one to load. A stream does so by itself.

        Raises:
            ConfigError: the model or an option cannot be used.
            EngineError: the engine did not start.
        """
        if self._model_path is not None and self._own is None:
            self._own = OwnServer(self._model_path, self._backend, self._options)
            try:
                self._own.wait()
            except BaseException:
                self._own = None
                raise

    def stream(
        self,
        rows: Iterable[Any],
        *,
        url: str = CHAT,
        template: Mapping[str, Any] | str | None = None,
        id_column: str | None = None,
        ordered: bool = False,
        window: int = WINDOW,
    ) -> Iterator[StreamAnswer]:
        """Answer rows, each as soon as it is finished.

        Args:
            rows: of any number, read as they are needed, in another thread. Each is the body
                of a request, a line of a batch file, or with a template any mapping; or one
                of these as JSON text.
            url: the endpoint of rows that do not name theirs.
            template: the body of each request, with ``"{{column}}"`` for values of the row,
                as ``run --template`` has it. As text: JSON, or ``@FILE``.
            id_column: with a template, the column with the ``custom_id``.
            ordered: yield answers in the order of the rows.
            window: most rows that are planned together. Three times as many may be in memory.

        Raises:
            ConfigError: an argument cannot be used. Raised by the call.
            EngineError: the engine or the connection failed. Raised while iterating, after
                all answers that came before.
            Exception: an error of ``rows``, after the answers to those before it.
        """
        lines = RowLines(url, template, id_column)
        if window < 1:
            raise ConfigError(f"window={window!r} must be 1 or more.")
        return self._answers(rows, lines, window, ordered)

    def _answers(
        self, rows: Iterable[Any], lines: RowLines, window: int, ordered: bool
    ) -> Iterator[StreamAnswer]:
        self.start()
        windows = StreamWindows(rows, lines, self._transport(), window)
        self._open.add(windows)
        try:
            answers = windows.answers()
            for answer in in_order(answers) if ordered else answers:
                windows.taken()
                yield answer
        finally:
            self._open.discard(windows)
            windows.close()

    def _transport(self) -> Any:
        from .wave_transports import HttpTransport

        url, key = self._url, self._key
        if self._own is not None:
            url, key = self._own.url, self._own.key
        assert url is not None
        return HttpTransport(url, key, self._verify, self._priority, kind="lines")


def in_order(answers: Iterable[StreamAnswer]) -> Iterator[StreamAnswer]:
    """Answers by their index, from 0: each as soon as all before it have come."""
    waiting: dict[int, StreamAnswer] = {}
    due = 0
    for answer in answers:
        waiting[answer.index] = answer
        while due in waiting:
            yield waiting.pop(due)
            due += 1


def stream(
    rows: Iterable[Any],
    *,
    url: str = CHAT,
    template: Mapping[str, Any] | str | None = None,
    id_column: str | None = None,
    ordered: bool = False,
    window: int = WINDOW,
    **where: Any,
) -> Iterator[StreamAnswer]:
    """Answer rows, each as soon as it is finished. See :meth:`Streamer.stream`.

    Args:
        where: the engine, as the arguments of :class:`Streamer`. A model is loaded with the
            first answer that is asked for, and unloaded at the end.

    Raises:
        ConfigError: an argument cannot be used.
    """
    streamer = Streamer(**where)
    answers = streamer.stream(
        rows, url=url, template=template, id_column=id_column,
        ordered=ordered, window=window,
    )  # fmt: skip
    return _closing(streamer, answers)


def _closing(
    streamer: Streamer, answers: Iterator[StreamAnswer]
) -> Iterator[StreamAnswer]:
    with streamer:
        yield from answers


class AnswerColumns:
    """Answers the rows of a batch of columns, and adds the answers as columns.

    For ``map_batches`` of Ray Data and batch functions of Daft, which call it with one block of
    rows at a time. Each block is planned by itself, so blocks should be as large as memory
    allows. A model is loaded once for each copy of this object.

    Args:
        template: the body of each request, as of :meth:`.streamer.Streamer.stream`.
        url: the endpoint.
        text_column, error_column: of the answers. One of both is null in each row.
        body_column: of the whole answers as JSON text, if a name is given.
        where: the engine, as the arguments of :class:`.streamer.Streamer`.
    """

    def __init__(
        self,
        template: Mapping[str, Any] | str,
        *,
        url: str = CHAT,
        text_column: str = "answer",
        error_column: str = "error",
        body_column: str | None = None,
        **where: Any,
    ) -> None:
        self._streamer = Streamer(**where)
        self._template = template
        self._url = url
        self._names = (text_column, error_column, body_column)

    def __call__(self, batch: Any) -> Any:
        """Answer a batch.

        Args:
            batch: a pyarrow Table, or columns of equal length by name: lists or numpy arrays.

        Returns:
            The same columns, and those of the answers: of strings in a table, else lists.
        """
        if hasattr(batch, "to_pylist"):
            rows = batch.to_pylist()
        else:
            columns = zip(*batch.values(), strict=True)
            rows = [dict(zip(batch, values, strict=True)) for values in columns]
        found = self._streamer.stream(
            rows, url=self._url, template=self._template,
            ordered=True, window=max(1, len(rows)),
        )  # fmt: skip
        answers = self._answer_columns(list(found))
        if not hasattr(batch, "to_pylist"):
            return {**batch, **answers}
        import pyarrow as pa

        for name, values in answers.items():
            batch = batch.append_column(name, pa.array(values, pa.string()))
        return batch

    def _answer_columns(self, answers: list[StreamAnswer]) -> dict[str, Any]:
        text, error, body = self._names
        columns: dict[str, Any] = {
            text: [answer.text for answer in answers],
            error: [answer.error for answer in answers],
        }
        if body is not None:
            columns[body] = [json.dumps(answer.body) for answer in answers]
        return columns

    def close(self) -> None:
        """Unload the model, if it is this object's own."""
        self._streamer.close()
