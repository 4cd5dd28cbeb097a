"""What the head of a fleet and its workers tell each other, as msgpack.

The head sends commands and a worker answers with events, both numbered within a session, see
:mod:`.session_ends`. Plans and machines are bytes of :mod:`.plan_bytes`, which are safe to
read. Rendered requests are pickles, and only travel over ports that carry Python objects.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from operator import attrgetter
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from .. import __version__
from ..errors import InputError
from ..planner.requests import Int32s
from ..request import BatchRequestInput, Cuts, RequestOutput, Usage, Work

# What no engine reaches, and no message may say.
MOST_REPLICAS = 1 << 16
MOST_LEASE_S = 86_400.0
_Count = Annotated[int, Meta(ge=0, lt=1 << 53)]


def loop_time() -> float:
    """Seconds on the clock of the running event loop."""
    return asyncio.get_running_loop().time()


class Session(msgspec.Struct, frozen=True, order=True, array_like=True):
    """A time during which a worker serves one head, by the epoch of the head, which rises with
    each start of one, and a number, which rises whenever the head attaches to this worker.
    """

    epoch: int
    number: int


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


class RunLine(msgspec.Struct, tag="run", frozen=True):
    """Run a line.

    replica: the replica of this worker, None for any.
    stored: the rendered request without its tokens, as of ``Engine.stored``. None: render it.
    input_ids: int32, with ``stored``.
    trace: W3C headers of the head's span for it.
    """

    job_id: str
    rid: str
    line: BatchRequestInput
    replica: Annotated[int, Meta(ge=0, lt=MOST_REPLICAS)] | None = None
    stored: bytes | None = None
    input_ids: bytes = b""
    trace: dict[str, str] = {}

    def __post_init__(self) -> None:
        _check_ids(self.input_ids)


class AbortLine(msgspec.Struct, tag="abort", frozen=True):
    """Stop a line. No answer is wanted."""

    rid: str


class EndLine(msgspec.Struct, tag="end", frozen=True):
    """End a sample of a rollout. It is answered with its tokens so far."""

    rid: str


Command = OpenJob | SetPriority | CloseJob | RunLine | AbortLine | EndLine


class LinesJoined(msgspec.Struct, tag="joined", frozen=True):
    """Requests of a job that have begun to run, by their numbers."""

    job_id: str
    numbers: list[int]


_usage_of = attrgetter(*Usage.__match_args__)
_cuts_of = attrgetter(*Cuts.__match_args__)
_work_of = attrgetter(*Work.__match_args__)


class LineAnswer(msgspec.Struct, tag="answer", frozen=True):
    """The answer to a line. ``usage``, ``cuts``, ``work``: the fields of a
    :class:`~.request.Usage`, of a :class:`~.request.Cuts` and of a :class:`~.request.Work`."""

    rid: str
    status_code: Annotated[int, Meta(ge=100, le=599)]
    body: bytes
    usage: tuple[_Count, _Count, _Count, _Count] = (0, 0, 0, 0)
    cuts: tuple[_Count, _Count, _Count, _Count] = (0, 0, 0, 0)
    work: tuple[_Count, _Count, _Count] | None = None

    @classmethod
    def of(cls, rid: str, output: RequestOutput) -> LineAnswer:
        usage, cuts = _usage_of(output.usage), _cuts_of(output.cuts)
        work = None if output.work is None else _work_of(output.work)
        return cls(rid, output.status_code, output.body, usage, cuts, work)

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
    wait_s: Annotated[float, Meta(ge=0, le=MOST_LEASE_S)]


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
    model_names: Annotated[tuple[str, ...], Meta(min_length=1)]
    num_replicas: Annotated[int, Meta(ge=1, lt=MOST_REPLICAS)]
    default_max_inflight: _Count
    max_running_requests: _Count
    machine: bytes
    lease_s: Annotated[float, Meta(gt=0, le=MOST_LEASE_S)]


class RenderCall(msgspec.Struct, frozen=True):
    """Lines of a job to be rendered, with the ids that they will have."""

    rids: list[str]
    lines: list[BatchRequestInput]

    def __post_init__(self) -> None:
        if len(self.rids) != len(self.lines):
            raise ValueError(f"{len(self.rids)} ids for {len(self.lines)} lines")


class RenderedLine(msgspec.Struct, tag="rendered", frozen=True):
    """A rendered line: the attributes of an ``engine.PreparedRequest``.

    input_ids: int32, None for a request without tokens.
    stored: as of ``Engine.stored``.
    """

    rid: str
    input_ids: bytes | None
    shareable_len: _Count | None
    has_media: bool
    adapter: str
    namespace: str
    max_new_tokens: _Count | None
    ignore_eos: bool
    stored: bytes | None

    def __post_init__(self) -> None:
        if self.input_ids is not None:
            _check_ids(self.input_ids)


Rendering = RenderedLine | LineAnswer


class EngineQuery(msgspec.Struct, frozen=True):
    """A question about the running engine, by the name of its method."""

    what: Literal["kv_use", "running_tree", "running_s"]
    limit: int = 0


class _AboutVersion(msgspec.Struct, tag="about"):
    """What every version says of itself, whatever else it says."""

    version: str


def _reader(kind: Any) -> Callable[[bytes], Any]:
    """Reads messages of a type. It raises InputError for bytes that are none."""
    decode = msgspec.msgpack.Decoder(kind).decode

    def read(data: bytes) -> Any:
        try:
            return decode(data)
        except (RecursionError, msgspec.MsgspecError, ValueError, TypeError) as error:
            raise InputError(f"{len(data)} bytes are no message: {error}") from None

    return read


encode = msgspec.msgpack.Encoder().encode
_decode_version = _reader(_AboutVersion | SessionRefused)
_decode_about = _reader(About | SessionRefused)


def _decode_worker(data: bytes) -> About | SessionRefused:
    """What a worker is. Its version is looked at first: others say other things."""
    found = _decode_version(data)
    if isinstance(found, _AboutVersion) and found.version != __version__:
        raise InputError(
            f"it has sglang-batch {found.version[:40]} and this process {__version__}; "
            "install the same version everywhere"
        )
    about: About | SessionRefused = _decode_about(data)
    return about


# The calls of a head by name: how a worker reads each, and how the head reads the answer.
READ_CALL = {
    "attach": _reader(Session),
    "exchange": _reader(Exchange),
    "render": _reader(RenderCall),
    "query": _reader(EngineQuery),
}
READ_ANSWER = {
    "attach": _decode_worker,
    "exchange": _reader(Reply | SessionRefused),
    "render": _reader(list[Rendering]),
    "query": _reader(Any),
}


def _check_ids(data: bytes) -> None:
    """Raise ValueError for bytes that are no token ids."""
    if len(data) % 4 or (data and np.frombuffer(data, "<i4").min() < 0):
        raise ValueError(f"{len(data)} bytes are no token ids")


def ids_to_bytes(input_ids: list[int] | None) -> bytes | None:
    """Token ids as little-endian int32."""
    if input_ids is None:
        return None
    return np.asarray(input_ids, "<i4").tobytes()


def ids_of_bytes(data: bytes) -> Int32s:
    """The token ids of :func:`ids_to_bytes`."""
    return np.frombuffer(data, "<i4").astype(np.int32, copy=False)
