"""What the server's documentation (``/docs``, ``/openapi.json``) says of our routes.

Routes read bodies as they come: some are never in memory as a whole, and errors are
ours. So FastAPI knows neither what they take nor what they answer; it is said here, and
checked by calls that are made from it. The values of requests are checked elsewhere.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

import openai.types as official
from fastapi import Query
from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema
from pydantic.json_schema import SkipJsonSchema

from ..batch_api import protocol as api
from ..batch_api.message_batches import MAX_REQUESTS
from .idempotency import MAX_KEY_LEN

Docs = dict[str, Any]
Binary = Annotated[bytes, WithJsonSchema({"type": "string", "format": "binary"})]
Purpose = Annotated[str, Field(json_schema_extra={"enum": list(api.FILE_PURPOSES)})]
Filename = Annotated[str, Field(max_length=api.MAX_FILENAME_LEN)]
Seconds = Annotated[int, Field(ge=api.MIN_EXPIRY_S, le=api.MAX_EXPIRY_S)]
Priority = Annotated[int, Field(ge=-api.MAX_PRIORITY, le=api.MAX_PRIORITY)]


# What routes take -----------------------------------------------------------------


class _Taken(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)


class ExpiresAfter(_Taken):
    anchor: Literal["created_at"]
    seconds: Seconds


class NewFile(_Taken):
    purpose: Purpose
    file: Binary
    """With purpose `batch`, a name without a suffix or with `.jsonl`."""
    # A form has no null.
    anchor: Literal["created_at"] | SkipJsonSchema[None] = Field(
        None, alias="expires_after[anchor]"
    )
    seconds: Seconds | SkipJsonSchema[None] = Field(
        None, alias="expires_after[seconds]"
    )


class NewUpload(_Taken):
    filename: Filename
    """With purpose `batch`, a name without a suffix or with `.jsonl`."""
    purpose: Purpose
    mime_type: str
    bytes: int = Field(ge=0, le=api.MAX_UPLOAD_BYTES)
    """Size of the file."""
    expires_after: ExpiresAfter | None = None
    """Of the file; the upload itself takes parts for an hour."""


class NewPart(_Taken):
    data: Binary
    """At most 64 MiB."""


class CompletedUpload(_Taken):
    part_ids: list[str]
    """The parts in the order in which they make the file."""
    md5: str | None = None
    """Of the file, in hexadecimal digits; without it, nothing is compared."""


class NewBatch(_Taken):
    input_file_id: str
    """A file with purpose `batch`: one JSON line per request."""
    endpoint: Annotated[str, Field(json_schema_extra={"enum": list(api.ENDPOINTS)})]
    completion_window: str = Field(
        pattern=r"^([0-9]{1,9}[smhd])+$", examples=["24h", "30m"]
    )
    """A duration from a second to a year; what is not done by then expires."""
    metadata: (
        Annotated[
            dict[
                Annotated[str, Field(max_length=api.MAX_METADATA_KEY_LEN)],
                Annotated[str, Field(max_length=api.MAX_METADATA_VALUE_LEN)],
            ],
            Field(max_length=api.MAX_METADATA_PAIRS),
        ]
        | None
    ) = None
    priority: Priority | None = None
    """Not OpenAI's: batches of a higher one run first. 0 if it is not given."""
    output_expires_after: ExpiresAfter | None = None
    """How long the files with results are kept."""


class MessageRequest(_Taken):
    custom_id: str = Field(pattern="^[a-zA-Z0-9_-]{1,64}$")
    params: dict[str, Any]
    """The body of a call of `/v1/messages`."""


class NewMessageBatch(_Taken):
    requests: list[MessageRequest] = Field(min_length=1, max_length=MAX_REQUESTS)


class NewWave(_Taken):
    requests: list[dict[str, Any]]
    """Bodies of calls of `/generate`."""


# What routes answer ---------------------------------------------------------------


class BatchObject(official.Batch):
    priority: int | None = None
    paused_reason: str | None = None


class FileObject(official.FileObject):
    # The client's own type leaves out a purpose that its uploads may have.
    purpose: Literal[  # type: ignore[assignment]
        "assistants",
        "batch",
        "batch_output",
        "evals",
        "fine-tune",
        "user_data",
        "vision",
    ]


class UploadObject(official.Upload):
    file: FileObject | None = None


class _Page(BaseModel):
    object: Literal["list"]
    first_id: str | None
    last_id: str | None
    has_more: bool


class BatchPage(_Page):
    data: list[BatchObject]


class FilePage(_Page):
    data: list[FileObject]


# Anthropic's own types would do, but its client takes a second to import.


class MessageBatchCounts(BaseModel):
    processing: int
    succeeded: int
    errored: int
    canceled: int
    expired: int


class MessageBatch(BaseModel):
    id: str
    type: Literal["message_batch"]
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: MessageBatchCounts
    created_at: datetime
    expires_at: datetime
    ended_at: datetime | None
    cancel_initiated_at: datetime | None
    archived_at: datetime | None
    results_url: str | None


class DeletedMessageBatch(BaseModel):
    id: str
    type: Literal["message_batch_deleted"]


class MessageBatchPage(BaseModel):
    data: list[MessageBatch]
    first_id: str | None
    last_id: str | None
    has_more: bool


class OpenAIErrorDetails(BaseModel):
    model_config = ConfigDict(extra="forbid")
    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: str | None
    code: str | None


class OpenAIError(BaseModel):
    model_config = ConfigDict(extra="forbid")
    error: OpenAIErrorDetails


class AnthropicErrorDetails(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: str
    message: str


class AnthropicError(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["error"]
    error: AnthropicErrorDetails
    request_id: str | None = None


# Of routes and their parameters ---------------------------------------------------

# Both, or FastAPI adds its own error to the documentation, which we never answer.
OPENAI_ERRORS: dict[int | str, Docs] = {
    "4XX": {"model": OpenAIError, "description": "The call cannot be done."},
    "5XX": {"model": OpenAIError, "description": "The server cannot do it now."},
}
ANTHROPIC_ERRORS: dict[int | str, Docs] = {
    key: {**docs, "model": AnthropicError} for key, docs in OPENAI_ERRORS.items()
}
_REPEATABLE = {
    "name": "Idempotency-Key",
    "in": "header",
    "description": "Calls with the same key are executed once and answered the same.",
    "schema": {"type": "string", "minLength": 1, "maxLength": MAX_KEY_LEN},
}


def takes_json(model: type[BaseModel], repeatable: bool = True) -> Docs:
    """The ``openapi_extra`` of a route that takes this as JSON.

    Args:
        repeatable: whether it may be called with an ``Idempotency-Key``.
    """
    return _takes("application/json", model, repeatable)


def takes_form(model: type[BaseModel]) -> Docs:
    """The ``openapi_extra`` of a route that takes this as a multipart form."""
    return _takes("multipart/form-data", model, True)


def _takes(media_type: str, model: type[BaseModel], repeatable: bool) -> Docs:
    schema = model.model_json_schema()
    # Not by reference: FastAPI collects only the models that it knows of.
    schema = _inlined(schema, schema.pop("$defs", {}))
    body = {"required": True, "content": {media_type: {"schema": schema}}}
    return {"requestBody": body, "parameters": [_REPEATABLE] if repeatable else []}


def _inlined(schema: Any, models: Docs) -> Any:
    """A schema with the models that it refers to."""
    if isinstance(schema, list):
        return [_inlined(each, models) for each in schema]
    if not isinstance(schema, dict):
        return schema
    rest = {key: _inlined(each, models) for key, each in schema.items()}
    name = rest.pop("$ref", "").rpartition("/")[2]
    return {**_inlined(models[name], models), **rest} if name else rest


def answers(*media_types: str, description: str) -> dict[int | str, Docs]:
    """The ``responses`` of a route that does not answer JSON."""
    schema = {"schema": {"type": "string"}}
    content = dict.fromkeys(media_types, schema)
    return {200: {"content": content, "description": description}}


def whole_number(minimum: int, maximum: int) -> Any:
    """A number in a query; that it is from ``minimum`` to ``maximum`` is only said."""
    return Query(json_schema_extra={"minimum": minimum, "maximum": maximum})


def one_of(*values: str) -> Any:
    """A word in a query; that it is one of these is only said."""
    return Query(json_schema_extra={"enum": list(values)})
