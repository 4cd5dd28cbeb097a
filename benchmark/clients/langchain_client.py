"""LangChain, with langchain-openai. Its ``batch`` makes single calls in threads."""

from __future__ import annotations

from typing import Any

import checks as c
import openai
from checks import check
from langchain_openai import ChatOpenAI, OpenAIEmbeddings


def model(model: str = c.MODEL, key: str = c.KEY, **more: Any) -> Any:
    at: Any = {"base_url": f"{c.URL}/v1", "api_key": key, "max_retries": 0}
    return ChatOpenAI(model=model, max_tokens=90, **at | {"temperature": 0} | more)


@check("chat")
def _() -> None:
    answers = [model().invoke(c.QUESTION), *model().batch([c.QUESTION] * 3)]
    assert all(each.content and each.usage_metadata for each in answers), answers


@check("stream")
def _() -> None:
    assert "".join(chunk.content for chunk in model().stream(c.QUESTION))


@check("tools")
def _() -> None:
    caller = model().bind_tools(c.TOOLS, tool_choice="required")
    [call] = caller.invoke(c.QUESTION).tool_calls
    c.Place.model_validate(call["args"])


@check("schema")
def _() -> None:
    for method in ("json_schema", "function_calling"):
        caller = model().with_structured_output(c.Place, method=method)
        assert isinstance(caller.invoke(c.QUESTION), c.Place)


def embed() -> list[list[float]]:
    at: Any = {"base_url": f"{c.EMBEDDING_URL}/v1", "api_key": c.KEY}
    # Otherwise it sends ids of OpenAI's tokenizer.
    at["check_embedding_ctx_length"] = False
    model: Any = OpenAIEmbeddings(model=c.EMBEDDING_MODEL, **at)
    return [*model.embed_documents(c.TEXTS)]


@check("responses")
def _() -> None:
    api = model(use_responses_api=True)
    assert api.invoke(c.QUESTION).text
    assert "".join(chunk.text for chunk in api.stream(c.QUESTION))
    assert api.with_structured_output(c.Place).invoke(c.QUESTION).city


def ask(**more: Any) -> Any:
    return model(**more).invoke(c.QUESTION)


c.check_vectors(embed)
c.check_errors(
    ask, openai.BadRequestError, openai.AuthenticationError, openai.NotFoundError
)
c.report("langchain-openai")
