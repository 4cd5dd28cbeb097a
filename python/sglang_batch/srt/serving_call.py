"""SGLang's serving code, stopped where it gives a request to the engine.

Only some serving classes make SGLang's internal request in one method and answer in
another; others do all in one call. Either way the request comes to the tokenizer
manager: there it is held, so that it can be planned and gets our id, and there the
call goes on when its turn comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Generator
from types import coroutine
from typing import Any

from sglang.srt.managers.tokenizer_manager_score_mixin import (
    TokenizerManagerScoreMixin,
)

from .request_ids import set_rid


class Submission:
    """A request that serving code gives to the engine; awaiting it holds the call.

    adapted: SGLang's internal request.
    answer: what the engine gave; None until then.
    """

    def __init__(self, adapted: Any) -> None:
        self.adapted = adapted
        self.answer: Any = None

    def __await__(self) -> Generator[Submission, None, None]:
        yield self


class HoldingManager(TokenizerManagerScoreMixin):  # type: ignore[misc]
    """A tokenizer manager that holds requests, for serving classes to be made with.

    All else is the tokenizer manager's own. The mixin is what scores: it composes
    requests and hands them to its own ``generate_request``.
    """

    def __init__(self, tokenizer_manager: Any) -> None:
        self._tokenizer_manager = tokenizer_manager

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer_manager, name)

    async def generate_request(
        self, obj: Any, request: Any = None
    ) -> AsyncGenerator[Any]:
        """SGLang's answers to ``obj``, once :class:`ServingCall` lets it through."""
        submission = Submission(obj)
        await submission
        async for answer in self._tokenizer_manager.generate_request(obj, request):
            submission.answer = answer
            yield answer


class ServingCall:
    """One call of a serving class over a :class:`HoldingManager`.

    A call that is dropped before it has run to its end leaves nothing behind.

    submissions: the requests given to the engine so far; most calls give one.
    answer: what the call returned; None until then.
    """

    def __init__(self, call: Coroutine[Any, Any, Any], rid: str) -> None:
        self._call = call
        self._rid = rid
        self.submissions: list[Submission] = []
        self.answer: Any = None

    def render(self) -> Any:
        """Run up to the first request for the engine, in any thread.

        Returns:
            SGLang's internal request under our id; None where the call ended without
            one, see :attr:`answer`.

        Raises:
            RuntimeError: the call waits for something else than the engine.
            Exception: whatever the serving code raises.
        """
        try:
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
        # One after the first (a reranker asks for each document, a built-in tool's
        # result is answered) stands in no plan: its id is known to be of the job, so
        # that it ends with it, and of no line.
        number = len(self.submissions)
        rid = f"{self._rid}.call{number:06d}" if number else self._rid
        set_rid(submission.adapted, rid)
        self.submissions.append(submission)

    @coroutine
    def run(self, **fields: Any) -> Generator[Any, Any, Any]:
        """Go on to the end; awaited on the tokenizer manager's event loop.

        Args:
            fields: set on each of SGLang's internal requests before it goes.

        Returns:
            What the call returns.

        Raises:
            asyncio.CancelledError: the caller was cancelled; what is under way is
                aborted, also where the serving code makes an answer of it.
        """
        vars(self.submissions[-1].adapted).update(fields)
        advance, value = self._call.send, None
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
