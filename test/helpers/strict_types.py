"""Which JSON texts a client's own types accept, each strictly. Run by a test.

Reads a line ``[kind, text]`` of JSON for each on standard input. Prints the client's
version, and for each text None or what is wrong. The client is the ``openai`` that Python
finds first.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import openai
from openai.pagination import SyncCursorPage
from openai.types import (
    Batch,
    Completion,
    CreateEmbeddingResponse,
    FileDeleted,
    FileObject,
    Model,
    Upload,
)
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.shared import ErrorObject
from openai.types.uploads import UploadPart
from pydantic import BaseModel, TypeAdapter, ValidationError


class ModelList(BaseModel):
    """The client's page of models has no types of its own."""

    object: str
    data: list[Model]


class ErrorBody(BaseModel):
    """An error as the client reads it, whose type is that of its inner object."""

    error: ErrorObject


KINDS: dict[str, Any] = {
    "chat": ChatCompletion,
    "chat chunk": ChatCompletionChunk,
    "completion": Completion,
    "completion chunk": Completion,
    "embeddings": CreateEmbeddingResponse,
    "response": Response,
    "response event": ResponseStreamEvent,
    "batch": Batch,
    "batches": SyncCursorPage[Batch],
    "file": FileObject,
    "files": SyncCursorPage[FileObject],
    "file deleted": FileDeleted,
    "upload": Upload,
    "part": UploadPart,
    "models": ModelList,
    "error": ErrorBody,
}


def fault(kind: Any, text: str) -> str | None:
    """What is wrong with a text, or None."""
    try:
        TypeAdapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        return "; ".join(
            f"{'.'.join(map(str, each['loc']))}: {each['msg']}"
            for each in error.errors(include_url=False)
        )
    return None


def main() -> None:
    pairs = [json.loads(line) for line in sys.stdin]
    faults = [fault(KINDS[kind], text) for kind, text in pairs]
    print(json.dumps({"client": openai.__version__, "faults": faults}))


if __name__ == "__main__":
    main()
