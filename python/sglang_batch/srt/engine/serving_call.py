"""SGLang's serving code, held where it passes a request to the engine.

All serving classes pass SGLang's internal request to the tokenizer manager. It is held
there, so that it can be planned and gets our id, and the call continues once it is sent.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from contextlib import contextmanager
from types import coroutine
from typing import Any

from sglang.srt.managers.tokenizer_manager_score_mixin import TokenizerManagerScoreMixin

from ...batch_api.stop_rules import StopRules
from ..compat.server_types import EngineAnswer, EngineRequest
from .checks.stop_rule_checks import add_rules
from .endpoints import ServingCoroutine
from .media import media_reader
from .request_ids import set_rid

# An attribute of a request whose answer the engine could not give: a report of its tokens.
SPENT = "_offline_batch_spent"


class Submission:
    """A request that serving code passes to the engine. Awaiting it holds the call.

    answer: the engine's answer, or None until there is one.
    """

    def __init__(self, adapted: EngineRequest) -> None:
        self.adapted = adapted
        self.answer: EngineAnswer = None

    def __await__(self) -> Generator[Submission, None, None]:
        yield self


class PassingManager:
    """A tokenizer manager for SGLang's code that answers a call. Everything is passed on to the
    real one, but what a subclass has of its own."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)


class HoldingManager(PassingManager, TokenizerManagerScoreMixin):  # type: ignore[misc]
    """Holds the requests of serving classes.

    The mixin implements scoring, which passes requests to its own ``generate_request``.
    """

    async def generate_request(
        self, obj: EngineRequest, request: None = None
    ) -> AsyncGenerator[EngineAnswer]:
        """SGLang's answers to ``obj``, once :class:`ServingCall` sends it."""
        submission = Submission(obj)
        await submission
        # Also of the later requests of a call, which nobody else has seen.
        if obj.contains_mm_input():
            await media_reader(self._manager).read(obj)
        try:
            async for answer in self._manager.generate_request(obj, request):
                submission.answer = answer
                yield answer
        except Exception:
            submission.answer = getattr(obj, SPENT, submission.answer)
            raise


class ServingCall:
    """One call of a serving class over a :class:`HoldingManager`.

    A call that is dropped before its end leaves nothing behind.

    rules: of the requests that it passes to the engine.
    submissions: the requests passed to the engine so far, one for most calls.
    answer: the call's return value, or None until it returns.
    """

    def __init__(
        self, call: ServingCoroutine, rid: str, rules: StopRules | None = None
    ) -> None:
        self._call = call
        self._rid = rid
        self._rules = rules
        self.submissions: list[Submission] = []
        self.answer: object = None

    def render(self) -> EngineRequest | None:
        """SGLang's internal request under our id, after a run up to the first one for the engine
        in any thread. None if the call returned without one, see :attr:`answer`.

        Raises:
            RuntimeError: the call waits for something other than the engine.
            Exception: any error of the serving code.
        """
        try:
            with _unknown_to_asyncio():
                step = self._call.send(None)
        except StopIteration as done:
            self.answer = done.value
            return None
        if not isinstance(step, Submission):
            self._call.close()
            raise RuntimeError("this request needs more of the server than the engine")
        self._hold(step)
        return step.adapted

    def _hold(self, submission: Submission) -> None:
        # Later requests (a reranker sends one per document, a built-in tool's result
        # leads to another) are in no plan. Their ids belong to the job, so that they
        # end with it, but to none of its lines.
        number = len(self.submissions)
        rid = f"{self._rid}.call{number:06d}" if number else self._rid
        set_rid(submission.adapted, rid)
        add_rules(submission.adapted, self._rules)
        self.submissions.append(submission)

    @coroutine
    def run(self, **fields: object) -> Generator[Any, Any, object]:
        """The call's return value, after a run to the end on the tokenizer manager's event loop.

        Args:
            fields: set on each of SGLang's internal requests before it is sent.

        Raises:
            asyncio.CancelledError: the caller was cancelled. The request under way is
                aborted, even if the serving code turns the abort into an answer.
        """
        vars(self.submissions[-1].adapted).update(fields)
        advance: Callable[[Any], object] = self._call.send
        value: object = None
        cancelled: asyncio.CancelledError | None = None
        while True:
            try:
                step = advance(value)
            except StopIteration as done:
                if cancelled is not None:
                    raise cancelled from None
                self.answer = done.value
                return self.answer
            advance = self._call.send
            if isinstance(step, Submission):
                self._hold(step)
                vars(step.adapted).update(fields)
                value = None
                continue
            try:
                value = yield step
            except BaseException as error:
                if isinstance(error, asyncio.CancelledError):
                    cancelled = error
                advance, value = self._call.throw, error


@contextmanager
def _unknown_to_asyncio() -> Iterator[None]:
    """Asynchronous generators that start in this block are closed by Python.

    asyncio would close those of a held call that is dropped in a task of its own, which
    fails, because to Python they are running.
    """
    hooks = sys.get_asyncgen_hooks()
    sys.set_asyncgen_hooks(None, None)
    try:
        yield
    finally:
        sys.set_asyncgen_hooks(*hooks)
