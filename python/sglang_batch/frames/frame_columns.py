"""Data frames of any library: their rows as an Arrow table, and columns added to them.

A frame is read through the Arrow PyCapsule protocol (``__arrow_c_stream__``), which pandas,
Polars, pyarrow and DuckDB have in common. To add columns is a line for each of them, so that
a frame keeps its index, its types and its connection.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

from ..errors import ConfigError, InputError


class DataFrame:
    """A frame of some library.

    Args:
        frame: the frame.

    Raises:
        ConfigError: it is no frame.
    """

    def __init__(self, frame: Any) -> None:
        if not hasattr(frame, "__arrow_c_stream__"):
            raise ConfigError(
                f"a {type(frame).__name__} is no table: pass a DataFrame of pandas or "
                "Polars, a pyarrow.Table, a DuckDB relation, or anything else with "
                "__arrow_c_stream__."
            )
        self._frame = frame
        roots = {kind.__module__.partition(".")[0] for kind in type(frame).__mro__}
        self._is_pandas, self._is_polars = "pandas" in roots, "polars" in roots
        self._is_duckdb = bool(roots & {"duckdb", "_duckdb"})
        if (self._is_pandas or self._is_polars) and not hasattr(frame, "columns"):
            raise ConfigError(
                f"a {type(frame).__name__} is one column: make a DataFrame of it."
            )

    @property
    def columns(self) -> list[str]:
        """The names of its columns, as text. Those of pandas may be any values."""
        if self._is_pandas or self._is_polars:
            return list(map(str, self._frame.columns))
        return list(self._whole.column_names)

    def has_column(self, name: str) -> bool:
        """Whether a new column cannot have this name. DuckDB does not tell cases apart."""
        if self._is_duckdb:
            return name.lower() in map(str.lower, self.columns)
        return name in self.columns

    def arrow(self, columns: Collection[str]) -> Any:
        """These columns, as a ``pyarrow.Table``.

        Raises:
            InputError: a column is missing, or Arrow has no type for it.
        """
        import pyarrow

        names, found = sorted(columns), self.columns
        for column in names:
            if found.count(column) > 1:
                raise InputError(
                    f"{found.count(column)} columns of the table are named {column!r}: "
                    "rename all but one of them."
                )
            if column not in found:
                raise InputError(
                    f"the table has no column {column!r}; it has "
                    f"{', '.join(map(repr, found)) or 'none'}."
                )
        try:
            if self._is_pandas:  # its other columns may have no type in Arrow
                chosen = self._frame.iloc[:, [found.index(name) for name in names]]
                return pyarrow.Table.from_pandas(
                    chosen.set_axis(names, axis=1), preserve_index=False
                )
            return self._whole.select(names)
        except (pyarrow.ArrowException, TypeError, ValueError) as error:
            raise InputError(f"the table cannot be read as Arrow: {error}") from None

    def with_columns(self, columns: Mapping[str, Sequence[Any]]) -> Any:
        """A frame of the same kind with further columns, or else a ``pyarrow.Table``."""
        if self._is_pandas:
            frame = self._frame.copy(deep=False)
            levels = frame.columns.nlevels
            for name, values in columns.items():
                label = name if levels == 1 else (name, *[""] * (levels - 1))
                frame[label] = values
            return frame
        added = _table_of(columns)
        if self._is_polars:
            return self._frame.hstack(type(self._frame)(added))
        table = self._whole
        for name in added.column_names:
            table = table.append_column(name, added[name])
        if not self._is_duckdb:
            return table
        answered = table  # noqa: F841 - DuckDB finds it by this name
        return self._frame.query("table_before", "SELECT * FROM answered")

    @cached_property
    def _whole(self) -> Any:
        """All of it, read once: a relation is a query, and its rows may have no order."""
        import pyarrow

        return pyarrow.table(self._frame)


def _table_of(columns: Mapping[str, Sequence[Any]]) -> Any:
    """Columns as a ``pyarrow.Table``, of text where they have no other values."""
    import pyarrow

    def typed(values: Sequence[Any]) -> Any:
        is_text = all(value is None or isinstance(value, str) for value in values)
        return pyarrow.array(values, pyarrow.string() if is_text else None)

    return pyarrow.table({name: typed(values) for name, values in columns.items()})
