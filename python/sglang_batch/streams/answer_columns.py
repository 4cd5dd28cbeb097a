"""Batches of columns in, the same with answers out: a callable for Ray Data and the like."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .stream_rows import StreamAnswer
from .streamer import CHAT, Streamer


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
