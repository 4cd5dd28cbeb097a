"""Counts the tokens of online calls by the key of the call, and chooses their ids.

SGLang's tokenizer manager answers every kind of call in one method, in the task of the
call or in one that it started. Lines of batches come from tasks of no call: they are
counted when their results are written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from ...access.access_control import AccessControl, current_caller
from ...access.keys import Role
from ...errors import ApiError
from ..compat.server_types import EngineRequest, TokenizerManager
from ..engine.request_ids import has_our_id


def count_online_usage(manager: TokenizerManager, access: AccessControl) -> None:
    """Count the calls that a tokenizer manager answers from now on.

    Clients' requests get ids from SGLang, whatever id they ask for: when a call is
    dropped, SGLang aborts every request whose id begins with that of the call.
    """
    generate = manager.generate_request

    def counted(obj: EngineRequest, request: Any = None) -> AsyncGenerator[Any]:
        caller = current_caller.get()
        if caller is not None and caller.role < Role.ADMIN and not has_our_id(obj):
            obj.rid = None
        if caller is None or not caller.name:
            return generate(obj, request)
        try:
            access.check_tokens(caller)
        except ApiError as error:
            # A wave is one call of any number of requests. SGLang answers each with 400.
            raise ValueError(error.message) from None
        return _counting(generate(obj, request), obj, caller.name, access)

    manager.generate_request = counted  # type: ignore[method-assign]


async def _counting(
    answers: AsyncGenerator[Any], obj: EngineRequest, name: str, access: AccessControl
) -> AsyncGenerator[Any]:
    """Pass answers on, and count them when they end or the caller leaves."""
    newest: dict[int, Mapping[str, Any]] = {}
    try:
        async for answer in answers:
            for place, one in enumerate(
                answer if isinstance(answer, list) else [answer]
            ):
                newest[one.get("index", place)] = one.get("meta_info", {})
            yield answer
    finally:
        await answers.aclose()
        # Samples of one prompt follow one another, and the prompt counts once.
        num_samples = getattr(obj, "parallel_sample_num", None) or 1
        access.count(name, used_by(newest, num_samples))


def used_by(newest: Mapping[int, Mapping[str, Any]], num_samples: int) -> Counter[str]:
    """The usage of a call.

    Args:
        newest: SGLang's last report on each answer, by its index.
        num_samples: answers to each prompt.
    """
    used = Counter(calls=1)
    for index, report in newest.items():
        used["output_tokens"] += report.get("completion_tokens") or 0
        if index % num_samples == 0:
            used["input_tokens"] += report.get("prompt_tokens") or 0
            used["cached_tokens"] += report.get("cached_tokens") or 0
    return used
