"""What the checks of the contract share: a client, strict types, refusals.

Plain Python and the official client alone, so that it runs with any version of it.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import openai
from openai import OpenAI
from openai.types import Batch, FileObject
from pydantic import BaseModel

Answer = TypeVar("Answer", bound=BaseModel)

CHAT = "/v1/chat/completions"
ENDED = ("completed", "failed", "cancelled", "expired")
TIMEOUT_S = 60
# Keys of ours in objects of OpenAI's, each there only where it says something.
OUR_KEYS = {
    "optimal_cached_share",
    "priority",
    "paused_reason",
    "total",
    "engine_seconds",
    "merged_requests",
    "merged_tokens",
    "truncated_answers",
}


@dataclass(frozen=True)
class Calls:
    """One run of the checks against a server.

    base_url: of the server, without ``/v1``.
    model: the name under which it serves its model, which generates text.
    name: tells what this run made from what others did.
    """

    base_url: str
    model: str
    name: str = field(default_factory=lambda: uuid.uuid4().hex[:8])

    @property
    def api(self) -> OpenAI:
        """A client as a user makes it."""
        return OpenAI(base_url=f"{self.base_url}/v1", api_key="none", timeout=TIMEOUT_S)

    def chat(self, custom_id: str, **body: Any) -> dict[str, Any]:
        """A line that asks for a short chat completion."""
        return self.line(
            custom_id,
            CHAT,
            {
                "messages": [{"role": "user", "content": f"What is {custom_id}?"}],
                "max_tokens": 4,
                "temperature": 0,
                **body,
            },
        )

    def line(self, custom_id: str, url: str, body: dict[str, Any]) -> dict[str, Any]:
        body = {"model": self.model, **body}
        return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}

    def upload(
        self, content: bytes | Iterable[dict[str, Any]], purpose: Any = "batch"
    ) -> FileObject:
        data = content if isinstance(content, bytes) else jsonl(content)
        name = f"{self.name}.jsonl"
        return self.api.files.create(file=(name, data), purpose=purpose)

    def start(
        self,
        content: bytes | Iterable[dict[str, Any]],
        endpoint: Any = CHAT,
        **fields: Any,
    ) -> Batch:
        window = fields.pop("completion_window", "24h")
        return self.api.batches.create(
            input_file_id=self.upload(content).id,
            endpoint=endpoint,
            completion_window=window,
            **fields,
        )

    def ended(self, batch: Batch) -> Batch:
        """The batch at its end; every state on the way is of the client's type."""
        deadline = time.monotonic() + TIMEOUT_S
        while batch.status not in ENDED:
            assert time.monotonic() < deadline, f"still not ended: {batch}"
            time.sleep(0.1)
            batch = strictly(self.api.batches.retrieve(batch.id))
        return batch

    def lines(self, file_id: str | None) -> list[dict[str, Any]]:
        """The lines of a result file; none where there is no such file."""
        if file_id is None:
            return []
        text = self.api.files.content(file_id).text
        return [json.loads(line) for line in text.split("\n") if line]


def jsonl(lines: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def but_for_cost(batch: Batch) -> dict[str, Any]:
    """A batch without its costs, which become exact as the work of others does."""
    found = batch.to_dict()
    usage: Any = found.get("usage") or {}
    for name in ("engine_seconds", "dollars"):
        usage.pop(name, None)
    return found


def strictly(answer: Answer) -> Answer:
    """An answer whose keys and types are those of the client's type.

    Every key that may be null is there, and no key that the type does not know.
    """
    kind = type(answer)
    kind.model_validate(answer.model_dump(by_alias=True, exclude_unset=True))
    _check_keys(answer)
    return answer


def _check_keys(value: Any) -> None:
    if isinstance(value, list):
        for item in value:
            _check_keys(item)
    if not isinstance(value, BaseModel):
        return
    kind = type(value)
    extra = set(value.model_extra or ()) - {"_request_id"} - OUR_KEYS
    assert not extra, f"{kind.__name__} has no {sorted(extra)}"
    missing = set(kind.model_fields) - value.model_fields_set
    assert not missing, f"{kind.__name__} lacks {sorted(missing)}"
    for key in kind.model_fields:
        _check_keys(getattr(value, key))


ANY: Any = object()


def refused(
    call: Callable[[], Any],
    kind: type[openai.APIStatusError] = openai.BadRequestError,
    *,
    param: str | None = ANY,
    code: str | None = ANY,
    says: str = "",
) -> openai.APIStatusError:
    """The error of a call that has to be refused, at once and in the nested shape."""
    try:
        answer = call()
    except openai.APIStatusError as error:
        body = error.body
        assert type(error) is kind, f"{error!r} is no {kind.__name__}"
        assert isinstance(body, dict), f"not the nested shape: {error.response.text}"
        assert set(body) == {"message", "type", "param", "code"}, body
        assert error.type == "invalid_request_error", body
        assert says.lower() in body["message"].lower(), body
        assert param is ANY or error.param == param, body
        assert code is ANY or error.code == code, body
        assert "text/html" not in error.response.headers["content-type"]
        retries = error.response.request.headers["x-stainless-retry-count"]
        assert retries == "0", f"called {retries} times more: {body}"
        return error
    raise AssertionError(f"not refused: {answer}")
