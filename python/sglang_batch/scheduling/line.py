"""One line of a batch as the scheduler sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

LEFT, RIGHT, ONLINE = 0, 1, 2
SIDES = ("left", "right", "online")


@dataclass(slots=True, eq=False)
class Line:
    """A request of a job, or an online one, from its arrival to its end.

    Requests wait, then their prompt is computed, then they decode. One *decode step*
    generates one token; the first token comes with the prompt, so an answer of ``d``
    tokens takes ``d - 1`` decode steps and as many tokens of KV beside its prompt.

    req: SGLang's request.
    leaf: its leaf in the job's prefix tree; -1 for what is not planned.
    node: the tree's node that its prompt hangs from; 0 for none.
    turn: place in the job's order.
    input_len, own: tokens of its prompt, and those that no other request has.
    max_steps: most decode steps it may take.
    estimate: decode steps that it is expected to take in all.
    side: which scanner admitted it.
    read_len: prompt tokens that its decodes read; -1 for all of them.
    """

    req: Any
    leaf: int
    node: int
    turn: int
    input_len: int
    own: int
    max_steps: int
    estimate: int
    side: int = LEFT
    read_len: int = -1
    waiting: bool = False
    arrival: int = -1  # its place among the job's lines as they came
    entry: int = -1  # where the backlog has it
    # Set while it runs.
    running: bool = False
    decoding: bool = False  # its prompt is computed; until it leaves
    steps: int = 0  # decode steps before it last began to decode
    planned: int = 0  # its estimate before it joined
    counted: int = 0  # tokens with which it counts in what estimates came to
    begin: int = 0  # decode clock at which it began
    last: int = 0  # decode clock once it has taken all steps that it may take
    bucket: int = 0
    base: int = 0
    final: int = 0
    event: int = -1
    cached_node: int = -1  # the deepest of its nodes in the cache; -1: not asked yet
    # Nodes of the prefix tree that it computes and others wait for.
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
        """Whether it decodes; the engine learns one step late that it does no more."""
        return self.decoding and clock < self.last

    @property
    def whole_kv(self) -> int:
        """Tokens of KV that it is expected to hold in the end, shared ones aside."""
        return self.own + self.estimate
