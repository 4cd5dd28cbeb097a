"""What the head of a fleet and its workers tell each other, as msgpack.

The head sends commands and a worker answers with events. Both are numbered within a
session, see :mod:`.session_ends`. Plans and machines are bytes of :mod:`.plan_bytes`, which
are safe to read. Rendered requests are pickles, and only travel over ports that carry Python
objects anyway.
"""

from __future__ import annotations

import msgspec
import numpy as np

from ..planner.requests import Int32s
from ..request import BatchRequestInput, Cuts, RequestOutput, Usage, Work


class Session(msgspec.Struct, frozen=True, order=True, array_like=True):
    """A time during which a worker serves one head.

    epoch: of the head. Each start of a head has a higher one than the last.
    number: rises whenever the head attaches to this worker.
    """

    epoch: int
    number: int


# --- Commands.


class OpenJob(msgspec.Struct, tag="open", frozen=True):
    """Open a job, or give it another plan. ``plans``: one for each replica here."""

    job_id: str
    plans: list[bytes]


class SetPriority(msgspec.Struct, tag="priority", frozen=True):
    """Set the priority of an open job."""

    job_id: str
    priority: int


class CloseJob(msgspec.Struct, tag="close", frozen=True):
    """No more lines of a job will follow."""

    job_id: str


class Line(msgspec.Struct, frozen=True, array_like=True):
    """A request of a batch, see :class:`~sglang_batch.request.BatchRequestInput`."""

    index: int
    custom_id: str
    url: str
    body: bytes

    @classmethod
    def of(cls, request: BatchRequestInput) -> Line:
        return cls(request.index, request.custom_id, request.url, request.body)

    def request(self) -> BatchRequestInput:
        return BatchRequestInput(self.index, self.custom_id, self.url, self.body)


class RunLine(msgspec.Struct, tag="run", frozen=True):
    """Run a line.

    replica: the replica of this worker, None for any.
    stored: the rendered request without its tokens, as of ``Engine.stored``. None: the
        worker renders the line itself.
    input_ids: int32, with ``stored``.
    """

    job_id: str
    rid: str
    line: Line
    replica: int | None = None
    stored: bytes | None = None
    input_ids: bytes = b""


class AbortLine(msgspec.Struct, tag="abort", frozen=True):
    """Stop a line. No answer is wanted."""

    rid: str


class EndLine(msgspec.Struct, tag="end", frozen=True):
    """End a sample of a rollout. It is answered with its tokens so far."""

    rid: str


Command = OpenJob | SetPriority | CloseJob | RunLine | AbortLine | EndLine


# --- Events.


class LinesJoined(msgspec.Struct, tag="joined", frozen=True):
    """Requests of a job that have begun to run, by their numbers."""

    job_id: str
    numbers: list[int]


class LineAnswer(msgspec.Struct, tag="answer", frozen=True):
    """The answer to a line. ``usage``, ``cuts``, ``work``: the fields of a
    :class:`~.request.Usage`, of a :class:`~.request.Cuts` and of a :class:`~.request.Work`."""

    rid: str
    status_code: int
    body: bytes
    usage: tuple[int, int, int, int] = (0, 0, 0, 0)
    cuts: tuple[int, int, int] = (0, 0, 0)
    work: tuple[int, int, int] | None = None

    @classmethod
    def of(cls, rid: str, output: RequestOutput) -> LineAnswer:
        usage, work = output.usage, output.work
        return cls(
            rid,
            output.status_code,
            output.body,
            (
                usage.input_tokens,
                usage.cached_tokens,
                usage.output_tokens,
                usage.reasoning_tokens,
            ),
            (output.cuts.json, output.cuts.regex, output.cuts.repetition),
            None if work is None else (work.tokens, work.attended, work.reads),
        )

    def output(self) -> RequestOutput:
        return RequestOutput(
            self.status_code,
            self.rid,
            self.body,
            Usage(*self.usage),
            cuts=Cuts(*self.cuts),
            work=None if self.work is None else Work(*self.work),
        )


class Leaving(msgspec.Struct, tag="leaving", frozen=True):
    """The worker will end soon. It takes no more lines, and finishes those that run."""

    reason: str


class Broken(msgspec.Struct, tag="broken", frozen=True):
    """The engine failed, not one line of it."""

    reason: str


Event = LinesJoined | LineAnswer | Leaving | Broken


# --- Calls.


class Exchange(msgspec.Struct, frozen=True):
    """One call of the head.

    first: number of the first command here, from 1 in each session.
    received: the last event that the head has.
    wait_s: how long the worker may wait for an event before it replies.
    """

    session: Session
    first: int
    commands: list[Command]
    received: int
    wait_s: float


class Reply(msgspec.Struct, tag="reply", frozen=True):
    """The reply to an exchange.

    applied: the last command that the worker has.
    first: number of the first event here, from 1 in each session.
    """

    session: Session
    applied: int
    first: int
    events: list[Event]


class SessionRefused(msgspec.Struct, tag="refused", frozen=True):
    """The worker does not serve this session.

    session: the one that it serves, None if it has none: it has started anew, or its lease
        has run out.
    """

    session: Session | None


class About(msgspec.Struct, tag="about", frozen=True):
    """What a worker is.

    machine: its :class:`~.planner.machine_model.Machine`, see :mod:`.plan_bytes`.
    version: of sglang-batch.
    """

    name: str
    version: str
    model_names: tuple[str, ...]
    num_replicas: int
    default_max_inflight: int
    max_running_requests: int
    machine: bytes
    lease_s: float


# --- Rendering.


class RenderCall(msgspec.Struct, frozen=True):
    """Lines of a job to be rendered, with the ids that they will have."""

    rids: list[str]
    lines: list[Line]


class RenderedLine(msgspec.Struct, tag="rendered", frozen=True):
    """A rendered line: the attributes of an ``engine.PreparedRequest``.

    input_ids: int32, None for a request without tokens.
    stored: as of ``Engine.stored``.
    """

    rid: str
    input_ids: bytes | None
    shareable_len: int | None
    has_media: bool
    adapter: str
    namespace: str
    max_new_tokens: int | None
    ignore_eos: bool
    stored: bytes | None


Rendering = RenderedLine | LineAnswer


class EngineQuery(msgspec.Struct, frozen=True):
    """A question about the running engine: ``kv_use``, ``running_tree``, ``running_s``."""

    what: str
    limit: int = 0


encode = msgspec.msgpack.Encoder().encode
decode_exchange = msgspec.msgpack.Decoder(Exchange).decode
decode_reply = msgspec.msgpack.Decoder(Reply | SessionRefused).decode
decode_about = msgspec.msgpack.Decoder(About | SessionRefused).decode
decode_session = msgspec.msgpack.Decoder(Session).decode
decode_render_call = msgspec.msgpack.Decoder(RenderCall).decode
decode_renderings = msgspec.msgpack.Decoder(list[Rendering]).decode
decode_query = msgspec.msgpack.Decoder(EngineQuery).decode


def ids_to_bytes(input_ids: list[int] | None) -> bytes | None:
    """Token ids as little-endian int32."""
    if input_ids is None:
        return None
    return np.asarray(input_ids, "<i4").tobytes()


def ids_of_bytes(data: bytes) -> Int32s:
    """The token ids of :func:`ids_to_bytes`."""
    return np.frombuffer(data, "<i4").astype(np.int32, copy=False)
