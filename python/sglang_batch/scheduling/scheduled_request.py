"""One request of a batch as the scheduler sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..planner.requests import LEFT


@dataclass(slots=True, eq=False)
class ScheduledRequest:
    """A request of a job, or an online one, from its arrival to its end.

    A request waits, then its prompt is computed, then it decodes. One *decode step*
    generates one token. The first token comes from the prefill, so an answer of ``d``
    tokens takes ``d - 1`` decode steps and as many tokens of KV in addition to its
    prompt.

    req: SGLang's request.
    leaf: its leaf in the job's prefix tree, -1 if it is not planned.
    node: the tree's node above its leaf, 0 for none.
    position: its position in the job's order.
    input_len, own: tokens of its prompt, and those that no other request shares.
    max_decode_steps: most decode steps that it may take.
    est_decode_steps: estimate of the decode steps that it takes in total.
    side: the scanner that admitted it.
    read_len: prompt tokens that its decodes read, -1 for all of them.
    number: its number in the job, -1 if it has none.
    part: the index of this sequence among those of a request with several. Only the
        first can be planned.
    rows: of the running batch: one, or one for each of its beams.
    work: the ``JobWork`` of its job, None for an online request.
    adapter: the engine's id of the LoRA adapter that it runs with, None for the model alone.
    """

    req: Any
    leaf: int
    node: int
    position: int
    input_len: int
    own: int
    max_decode_steps: int
    est_decode_steps: int
    side: int = LEFT
    read_len: int = -1
    number: int = -1
    part: int = 0
    rows: int = 1
    work: Any = None
    adapter: str | None = None
    waiting: bool = False
    ahead: bool = False  # joins before others: another job has its prefix in the cache
    on_host: bool = False  # its KV is there, so that it decodes as soon as it joins
    prompt_only: bool = False  # it does not decode once its prompt is computed
    arrival: int = -1  # its number among the job's requests, by arrival
    entry: int = -1  # its key in the backlog
    # Set while it runs.
    running: bool = False
    decoding: bool = False  # from the end of its prefill until it leaves
    steps: int = 0  # decode steps before it last began to decode
    initial_est_decode_steps: int = 0  # before it was admitted
    subtree: int = 0  # the subtree with which its length is compared, 0 for the job
    bias: Any = None  # the LengthBias that it counts in, from its admission
    counted: int = 0  # its tokens in them
    counted_in: tuple[tuple[Any, int], ...] = ()  # in which sums, and as which answer
    first: int = 0  # decode steps before it joined
    charged_steps: int = 0  # decode steps that its job was charged for
    charged_s: float = 0.0  # its part of its job's charged work
    prompt_s: float = 0.0  # work on its prompt since it joined
    begin: int = 0  # decode clock at which it began
    backlog: Any = None  # the Backlog that it joined from
    last: int = 0  # decode clock once it has taken all steps that it may take
    # Its part of the KV forecast.
    bucket: int = 0
    base: int = 0
    final: int = 0
    pool_share: int = 0  # its units of the second pool
    overrun_at: int = -1  # decode clock at which it outlives its estimate
    cached_node: int = -1  # the deepest of its nodes in the cache, -1 if unknown
    # Nodes of the prefix tree that it computes and followers wait for.
    leading: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.read_len < 0:
            self.read_len = self.input_len

    def steps_done(self, clock: int) -> int:
        """Decode steps taken so far."""
        if not self.decoding:
            return self.steps
        return self.steps + min(clock, self.last) - self.begin

    def takes_steps(self, clock: int) -> bool:
        """Whether it decodes. The engine learns of its end one step later."""
        return self.decoding and clock < self.last

    @property
    def mixes(self) -> bool:
        """Whether it decodes in steps with prompts. Nothing does while a beam search runs."""
        return self.rows == 1

    @property
    def whole_kv(self) -> int:
        """Estimate of its tokens of KV at its end, without shared ones."""
        return self.own + self.est_decode_steps
