"""Daft's functions for models, with its provider for OpenAI at another address."""

from __future__ import annotations

from typing import Any

import checks as c
import daft
from checks import check
from daft.ai.openai.provider import OpenAIProvider
from daft.functions import embed_text, prompt
from pydantic import BaseModel, Field

QUESTION = daft.col("question")


def answers(
    questions: list[str], url: str = c.URL, key: str = c.KEY, **more: Any
) -> list[Any]:
    """A prompt for each row. By default they go to ``/v1/responses``."""
    at: Any = {"base_url": f"{url}/v1", "api_key": key, "max_retries": 0}
    asked: Any = {"provider": OpenAIProvider("ours", **at), "model": c.MODEL, **more}
    frame = daft.from_pydict({"question": questions})
    frame = frame.with_column("answer", prompt(QUESTION, **asked))
    return [*frame.to_pydict()["answer"]]


def chats(questions: list[str], **more: Any) -> list[Any]:
    asked = {"use_chat_completions": True, "temperature": 0, "max_tokens": 90, **more}
    return answers(questions, **asked)


@check("chat")
def _() -> None:
    found = chats([c.QUESTION] * 3, system_message="Be brief.")
    assert len(found) == 3 and all(found), found


@check("responses")
def _() -> None:
    found = answers([c.QUESTION] * 3, temperature=0, max_output_tokens=90)
    assert len(found) == 3 and all(found), found


class City(BaseModel):
    """An answer by schema. Daft has no type for literals."""

    city: str = Field(max_length=4)


@check("schema")
def _() -> None:
    [found] = chats([c.QUESTION], return_format=City)
    City.model_validate(found)


def embed() -> list[list[float]]:
    at: Any = {"base_url": f"{c.EMBEDDING_URL}/v1", "api_key": c.KEY}
    frame = daft.from_pydict({"text": c.TEXTS})
    asked: Any = {"provider": OpenAIProvider("ours", **at), "model": c.EMBEDDING_MODEL}
    frame = frame.with_column("vector", embed_text(daft.col("text"), **asked))
    return [[*each] for each in frame.to_pydict()["vector"]]


def ask(**more: Any) -> Any:
    return chats([c.QUESTION], **more)


c.check_vectors(embed)
c.check_errors(ask, Exception, Exception, Exception)
# Daft 0.7.26 hangs in a query with more than 1,000 rows, and in a later one after 100 rows,
# whatever the server is.
c.check_plan(lambda texts, url: chats(texts, url=url, max_tokens=8))
c.report("daft")
