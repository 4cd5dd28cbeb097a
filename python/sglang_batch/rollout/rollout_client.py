"""A client of ``/offline_batch/rollouts``, and the lengths of answers that it learns."""

from __future__ import annotations

import hashlib
import json
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec
import numpy as np

from ..errors import ConfigError, ServerError
from ..planner.output_lengths.estimates import completed
from ..request import LineSplitter, authorization
from .rollout_call import (
    ID_HEADER,
    ROLLOUTS_PATH,
    GroupResult,
    RolloutCall,
    RolloutGroup,
    parse_call,
)

# Groups may take hours. Only connecting has a time limit.
_TIMEOUT = httpx.Timeout(None, connect=5.0)


@dataclass(eq=False)
class RunningRollout:
    """The groups of a call as they end. ``id``: of the call at the server."""

    client: RolloutClient
    call: RolloutCall
    http: httpx.AsyncClient
    response: httpx.Response

    @property
    def id(self) -> str:
        return str(self.response.headers.get(ID_HEADER, ""))

    async def __aiter__(self) -> AsyncIterator[GroupResult]:
        missing = len(self.call.groups)
        with self.client.plain_errors():
            lines = LineSplitter()
            async for block in self.response.aiter_bytes():
                for line in lines.add(block):
                    missing -= 1
                    yield self.client.read(self.call, line)
        self.client.check_complete(missing)

    async def stop(self) -> None:
        """Abort everything that runs. Its groups follow, with their tokens.

        Raises:
            ConfigError: the server refuses it. ServerError: it does not answer.
        """
        with self.client.plain_errors():
            answer = await self.http.post(f"{ROLLOUTS_PATH}/{self.id}/stop")
        if answer.status_code != 404:  # the call may have ended meanwhile
            self.client.check(answer)


class RolloutClient:
    """Samples groups on an offline server.

    Args:
        url: of the server, such as ``http://127.0.0.1:30000``.
        api_key: None for a server without keys.
        history: learns from all answers, and has the expected length of each prompt.
    """

    def __init__(
        self, url: str, api_key: str | None = None, history: LengthHistory | None = None
    ) -> None:
        self.url = url.rstrip("/")
        self.history = history
        self._headers = authorization(api_key)

    def run(self, groups: Sequence[RolloutGroup], **options: Any) -> list[GroupResult]:
        """Sample groups, and return them in the order of ``groups`` once all have ended.

        Args:
            options: further fields of :class:`RolloutCall`, such as ``n`` and ``k``.

        Raises:
            InputError: a field is not valid.
            ConfigError: the server refuses the call.
            ServerError: it does not answer, or ends before all groups have.
        """
        call = self._call(groups, options)
        found: list[GroupResult] = []
        with (
            self.plain_errors(),
            httpx.Client(**self._http_options) as http,
            http.stream("POST", ROLLOUTS_PATH, content=_body(call)) as response,
        ):
            if response.status_code != 200:
                response.read()
            self.check(response)
            lines = LineSplitter()
            for block in response.iter_bytes():
                found.extend(self.read(call, line) for line in lines.add(block))
        self.check_complete(len(call.groups) - len(found))
        return sorted(found, key=lambda group: group.index)

    @asynccontextmanager
    async def start(
        self, groups: Sequence[RolloutGroup], **options: Any
    ) -> AsyncGenerator[RunningRollout]:
        """Sample groups, and take them as they end. Leaving the block early aborts the rest,
        without its tokens. Arguments and errors are those of :meth:`run`.
        """
        call = self._call(groups, options)
        async with httpx.AsyncClient(**self._http_options) as http:
            with self.plain_errors():
                request = http.build_request("POST", ROLLOUTS_PATH, content=_body(call))
                response = await http.send(request, stream=True)
                if response.status_code != 200:
                    await response.aread()
            try:
                self.check(response)
                yield RunningRollout(self, call, http, response)
            finally:
                await response.aclose()

    def _call(
        self, groups: Sequence[RolloutGroup], options: dict[str, Any]
    ) -> RolloutCall:
        if self.history is not None:
            groups = self.history.expecting(groups)
        return parse_call({"groups": list(groups), **options})

    @property
    def _http_options(self) -> dict[str, Any]:
        headers = {**self._headers, "content-type": "application/json"}
        return {"base_url": self.url, "headers": headers, "timeout": _TIMEOUT}

    def read(self, call: RolloutCall, line: bytes) -> GroupResult:
        """A line of the server's answer."""
        try:
            result = msgspec.json.decode(line, type=GroupResult)
        except msgspec.DecodeError as error:
            raise ServerError(f"{self.url} answers with no group: {error}.") from None
        if self.history is not None:
            self.history.observe(call.groups[result.index], result)
        return result

    def check(self, response: httpx.Response) -> None:
        """Raise if the server refused a call."""
        if response.status_code == 200:
            return
        try:
            message = response.json()["error"]["message"]
        except (json.JSONDecodeError, LookupError, TypeError):
            message = response.text[:200]
        kind = ConfigError if response.status_code < 500 else ServerError
        raise kind(
            f"{self.url} refused the call with HTTP {response.status_code}: {message}"
        )

    def check_complete(self, missing: int) -> None:
        """Raise if the server did not answer all groups."""
        if missing:
            raise ServerError(
                f"{self.url} ended with {missing} groups missing; its log says why."
            )

    @contextmanager
    def plain_errors(self) -> Iterator[None]:
        """Turn errors of the connection into ours."""
        try:
            yield
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise ConfigError(
                f"{self.url!r} is not the URL of a server: {error}."
            ) from None
        except httpx.HTTPError as error:
            raise ServerError(
                f"{self.url} does not answer ({type(error).__name__}: {error})."
            ) from None


def _body(call: RolloutCall) -> bytes:
    return call.model_dump_json(exclude_defaults=True).encode()


# Tokens still to come of an answer, while none to its prompt has ended.
DEFAULT_EXCESS = 256.0


class LengthHistory:
    """Expects of a prompt's answers the mean length of its last ones.

    Answers that were aborted count as longer than they are (Kaplan-Meier, see
    :mod:`sglang_batch.planner.output_lengths.estimates`): groups that end with their ``k``-th
    sample would teach that all answers are short.

    Args:
        keep: answers to each prompt that count, the newest ones.
        most_prompts: prompts that are remembered, those seen last.

    Raises:
        ConfigError: one of them is below 1.
    """

    def __init__(self, keep: int = 32, most_prompts: int = 1 << 20) -> None:
        for name, value in (("keep", keep), ("most_prompts", most_prompts)):
            if value < 1:
                raise ConfigError(f"{name}={value!r} must be 1 or more.")
        self._keep = keep
        self._most_prompts = most_prompts
        # Lengths by prompt, negated for answers that were aborted.
        self._lengths: dict[str, list[int]] = {}

    def expected(self, group: RolloutGroup) -> float | None:
        """Tokens that an answer to a group's prompt is expected to have, or None."""
        found = self._lengths.get(_key(group))
        if not found:
            return None
        length = np.abs(np.array(found, np.int64))
        mean, _ = completed(length, np.array(found) < 0, DEFAULT_EXCESS)
        return max(1.0, float(mean.mean()))

    def expecting(self, groups: Iterable[RolloutGroup]) -> list[RolloutGroup]:
        """The groups, with expected lengths for those that have none."""
        return [
            group
            if group.expected_tokens is not None
            else group.model_copy(update={"expected_tokens": self.expected(group)})
            for group in groups
        ]

    def observe(self, group: RolloutGroup, result: GroupResult) -> None:
        """Learn from the answers to a group. Failed samples and empty ones say nothing."""
        new = [
            len(each.output_ids) * (-1 if each.status == "aborted" else 1)
            for each in result.samples
            if each.status != "failed" and each.output_ids
        ]
        if not new:
            return
        key = _key(group)
        lengths = [*self._lengths.pop(key, ()), *new]
        self._lengths[key] = lengths[-self._keep :]
        if len(self._lengths) > self._most_prompts:
            del self._lengths[next(iter(self._lengths))]

    def state_dict(self) -> dict[str, Any]:
        """What was learnt, as plain values for a checkpoint."""
        return {"lengths": {key: list(each) for key, each in self._lengths.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        self._lengths = {key: list(each) for key, each in state["lengths"].items()}


def _key(group: RolloutGroup) -> str:
    """The group's id, or else its prompt."""
    if group.id is not None:
        return f"id {group.id}"
    if group.input_ids is None:
        prompt = (group.text or "").encode()
    else:
        prompt = np.array(group.input_ids, np.int32).tobytes()
    return hashlib.sha256(prompt).hexdigest()[:32]
