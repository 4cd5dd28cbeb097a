"""A line of a job as the head of a fleet keeps it: rendered by a worker, run by any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from ...request import BatchRequestInput
from ..messages import Line, RenderedLine, RunLine, ids_of_bytes, ids_to_bytes


@dataclass(frozen=True, slots=True)
class FleetLine:
    """A rendered line, or one that its worker will render.

    rendering: None where a worker renders the line once more before it runs.
    """

    request: BatchRequestInput
    rid: str
    rendering: RenderedLine | None = None

    @property
    def input_ids(self) -> list[int] | None:
        if self.rendering is None or self.rendering.input_ids is None:
            return None
        ids: list[int] = ids_of_bytes(self.rendering.input_ids).tolist()
        return ids

    @property
    def shareable_len(self) -> int | None:
        return self.rendering.shareable_len if self.rendering else None

    @property
    def has_media(self) -> bool:
        return self.rendering.has_media if self.rendering else False

    @property
    def adapter(self) -> str:
        return self.rendering.adapter if self.rendering else ""

    @property
    def namespace(self) -> str:
        return self.rendering.namespace if self.rendering else ""

    @property
    def max_new_tokens(self) -> int | None:
        return self.rendering.max_new_tokens if self.rendering else None

    @property
    def ignore_eos(self) -> bool:
        return self.rendering.ignore_eos if self.rendering else False

    def stored(self) -> bytes | None:
        """The line without its tokens, for :func:`restored`. None: render it again."""
        rendering = self.rendering
        if rendering is None or rendering.stored is None:
            return None
        return _encode(msgspec.structs.replace(rendering, rid="", input_ids=None))

    def command(self, job_id: str, replica: int, *, trusted: bool) -> RunLine:
        """The command that runs the line.

        Args:
            trusted: whether the worker may be sent what was pickled by another one.
        """
        line = Line.of(self.request)
        rendering = self.rendering
        if not trusted or rendering is None or rendering.stored is None:
            return RunLine(job_id, self.rid, line, replica)
        ids = rendering.input_ids or b""
        return RunLine(job_id, self.rid, line, replica, rendering.stored, ids)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(RenderedLine).decode


def restored(
    request: BatchRequestInput, rid: str, stored: bytes, input_ids: Sequence[int]
) -> FleetLine:
    """The line of :meth:`FleetLine.stored`.

    Args:
        rid: its id from now on.
    """
    ids = ids_to_bytes(list(input_ids))
    return FleetLine(
        request,
        rid,
        msgspec.structs.replace(_decode(stored), rid=rid, input_ids=ids),
    )
