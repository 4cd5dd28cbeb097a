"""Schemas of our routes for the server's documentation (``/docs``, ``/openapi.json``).

Our routes read the bodies of requests themselves, since some are too large for memory, so
FastAPI cannot infer their schemas. They check the bodies with
:func:`~.parameters.checked`, and are tested with calls generated from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Annotated, Any, Literal, get_type_hints

import openai.types as official
from fastapi import Query
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    create_model,
)
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import PydanticCustomError

from ...batch_api import protocol as api
from ...batch_api.message_batches import MAX_REQUESTS
from ...fleet.fleet_worker import WorkerState, WorkerStatus
from ...scheduling.running_tree import JobNow, NodeNow
from ..access.keys import NAME_LEN, check_name
from ..access.usage import COUNTS
from .idempotency import MAX_KEY_LEN

Docs = dict[str, Any]
Binary = Annotated[bytes, WithJsonSchema({"type": "string", "format": "binary"})]


def _one_of(choices: Iterable[str]) -> tuple[Any, Any]:
    """The annotations of a string that must be one of ``choices``."""
    listed: list[Any] = list(choices)

    def check(value: str) -> str:
        if value not in listed:
            context = {"expected": ", ".join(map(repr, listed))}
            raise PydanticCustomError("literal_error", "unknown value", context)
        return value

    return AfterValidator(check), Field(json_schema_extra={"enum": listed})


def _window(value: object) -> object:
    short = isinstance(value, str) and len(value) <= api.MAX_ID_LEN
    if short and api.window_seconds(str(value)) is None:
        most = api.MAX_WINDOW_S // 86_400
        raise ValueError(f"Use a duration of up to {most} days, such as '24h' or '30m'")
    return value


def _client_name(value: object) -> object:
    return check_name(value) if isinstance(value, str) else value


Purpose = Annotated[str, *_one_of(api.FILE_PURPOSES)]
Filename = Annotated[str, Field(max_length=api.MAX_FILENAME_LEN)]
Seconds = Annotated[int, Field(ge=api.MIN_EXPIRY_S, le=api.MAX_EXPIRY_S)]
ModelName = Annotated[str, Field(min_length=1, max_length=512)]
DailyLimit = Annotated[int, Field(ge=0, le=1 << 53)]
Priority = Annotated[int, Field(ge=-api.MAX_PRIORITY, le=api.MAX_PRIORITY)]


class _RequestBody(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)


class ExpiresAfter(_RequestBody):
    anchor: Literal["created_at"]
    seconds: Seconds


def seconds_of(expires_after: ExpiresAfter | None) -> int | None:
    return None if expires_after is None else expires_after.seconds


BodyKey = Annotated[str, Field(min_length=1, max_length=MAX_KEY_LEN)]


class _RepeatableBody(_RequestBody):
    idempotency_key: BodyKey | None = None
    """The same as the header `Idempotency-Key`."""


class _RepeatableForm(_RequestBody):
    # A form has no null value.
    idempotency_key: BodyKey | SkipJsonSchema[None] = None
    """The same as the header `Idempotency-Key`."""


class NewFile(_RepeatableForm):
    purpose: Purpose
    file: Binary
    """With purpose `batch`, the name must end in `.jsonl` or have no suffix."""
    anchor: Literal["created_at"] | SkipJsonSchema[None] = Field(
        None, alias="expires_after[anchor]"
    )
    seconds: Seconds | SkipJsonSchema[None] = Field(
        None, alias="expires_after[seconds]"
    )


class FileFields(BaseModel):
    """The fields of a form with a file, as a JSON body would have them."""

    filename: Filename
    purpose: Purpose
    expires_after: ExpiresAfter | None = None


class NewUpload(_RepeatableBody):
    filename: Filename
    """With purpose `batch`, the name must end in `.jsonl` or have no suffix."""
    purpose: Purpose
    mime_type: Annotated[str, Field(max_length=api.MAX_MIME_TYPE_LEN)]
    bytes: int = Field(ge=0, le=api.MAX_UPLOAD_BYTES)
    """Size of the whole file in bytes."""
    expires_after: ExpiresAfter | None = None
    """Lifetime of the file. The upload itself accepts parts for an hour."""


class NewPart(_RepeatableForm):
    data: Binary
    """Up to 64 MiB."""


class CompletedUpload(_RepeatableBody):
    part_ids: list[str]
    """The parts in the order in which they are joined."""
    md5: str | None = None
    """Expected MD5 of the file, in hexadecimal. Not checked if left out."""


class NewBatch(_RepeatableBody):
    input_file_id: Annotated[str, Field(max_length=api.MAX_ID_LEN)]
    """A file with purpose `batch`, which has one JSON line per request."""
    endpoint: Annotated[str, *_one_of(api.ENDPOINTS)]
    completion_window: Annotated[str, BeforeValidator(_window)] = Field(
        pattern=r"^([0-9]{1,9}[smhd])+$",
        max_length=api.MAX_ID_LEN,
        examples=["24h", "30m"],
    )
    """A duration from one second to 366 days. Requests that are not finished by then expire."""
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
    """Extension of OpenAI's API: batches with a higher priority run first. Default: 0."""
    enough: Annotated[float, Field(gt=0, le=1)] | None = None
    """Extension: the batch ends when this share of its requests has an answer."""
    dedupe: Literal["auto", "off"] | None = None
    """Extension: whether requests that must have equal answers are computed once."""
    output_expires_after: ExpiresAfter | None = None
    """Lifetime of the result files."""


class NewMessageRequest(_RequestBody):
    # Generated clients name their class after the title.
    model_config = ConfigDict(title="MessageRequest")

    custom_id: str = Field(pattern="^[a-zA-Z0-9_-]{1,64}$")
    params: dict[str, Any]
    """The body of a `/v1/messages` call."""


class NewMessageBatch(_RequestBody):
    requests: list[NewMessageRequest] = Field(min_length=1, max_length=MAX_REQUESTS)


class NewWave(_RequestBody):
    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [{"required": ["requests"]}, {"required": ["lines"]}]
        }
    )

    requests: list[dict[str, Any]] = []
    """Bodies of `/generate` calls."""
    lines: list[dict[str, Any]] = []
    """Instead of `requests`: lines of a batch file."""
    priority: Priority | None = None
    """As that of a batch. Default: above all batches."""


class ClientLimits(_RequestBody):
    model_config = ConfigDict(extra="forbid")

    models: list[ModelName] | None = Field(None, min_length=1, max_length=100)
    """Served models and LoRA adapters that the client may use. Null: all."""
    batches_per_day: DailyLimit | None = None
    lines_per_day: DailyLimit | None = None
    tokens_per_day: DailyLimit | None = None
    """Days are UTC. Null: no limit. A field that is left out keeps its value."""
    enqueued_tokens: DailyLimit | None = None
    """Most estimated tokens of its batches in progress. Null: `max_enqueued_tokens`."""


class NewApiKey(ClientLimits):
    name: Annotated[str, BeforeValidator(_client_name)] = Field(
        pattern=r"^\.*[A-Za-z0-9_@-][A-Za-z0-9._@-]*$", max_length=NAME_LEN
    )
    """Owner of all files and batches that are made with the key."""
    role: Literal["client", "admin"] = "client"
    same_owner: bool = False
    """Whether the name may be one that was used before."""


class ApiKey(ClientLimits):
    object: Literal["offline_batch.key"]
    id: str
    name: str
    role: Literal["client", "admin"]
    redacted_value: str
    created_at: int
    revoked_at: int | None


class MadeApiKey(ApiKey):
    value: str
    """The key. It is not kept, and no other answer contains it."""


class ApiKeyList(BaseModel):
    object: Literal["list"]
    data: list[ApiKey]


class RevokedApiKey(BaseModel):
    object: Literal["offline_batch.key.revoked"]
    id: str
    revoked: Literal[True]
    cancelled_batches: list[str]


def _model(name: str, doc: str | None, fields: Mapping[str, Any]) -> Any:
    """A model of an answer whose fields are listed where it is made."""
    given = {field: (kind, ...) for field, kind in fields.items()}
    return create_model(name, __doc__=doc, **given)  # type: ignore[call-overload]


_USAGE = dict.fromkeys(COUNTS[:-1], int) | {"engine_seconds": float}
DayOfUsage = _model(
    "DayOfUsage", None, {"day": str, "name": str, **_USAGE, "total_tokens": int}
)


class LabelCosts(BaseModel):
    value: str | None
    batches: int
    requests: int
    merged_requests: int
    computed_input_tokens: int
    cached_input_tokens: int
    computed_output_tokens: int
    merged_tokens: int
    engine_seconds: float
    dollars: float | None


class CostList(BaseModel):
    object: Literal["list"]
    label: str
    data: list[LabelCosts]


class UsageList(BaseModel):
    object: Literal["list"]
    data: list[DayOfUsage]  # type: ignore[valid-type]


TreeJob = _model(
    "TreeJob", "An open job: a batch, or a wave of programs.", get_type_hints(JobNow)
)
TreeNode = _model(
    "TreeNode",
    "A prefix that requests of a job share.",
    get_type_hints(NodeNow) | {"state": Literal["absent", "computing", "kept"]},
)


class ReplicaTree(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)

    replica: int
    jobs: list[TreeJob]  # type: ignore[valid-type]
    nodes: list[TreeNode]  # type: ignore[valid-type]
    admission: str | None = None
    """Why the next request in line did not join the last step, such as ``no_kv``."""
    admissions: dict[str, int] | None = None
    """Steps so far by that reason."""


class RunningTree(BaseModel):
    object: Literal["offline_batch.tree"]
    replicas: list[ReplicaTree]


EngineState = _model(
    "EngineState",
    WorkerState.__doc__,
    get_type_hints(WorkerState)
    | {"status": Annotated[str, *_one_of(status.value for status in WorkerStatus)]},
)


class EngineTable(BaseModel):
    object: Literal["offline_batch.engines"]
    engines: list[EngineState]  # type: ignore[valid-type]


class BatchObject(official.Batch):
    owner: str | None = None
    """Name of the key that created it. Only admins see it."""
    priority: int | None = None
    paused_reason: str | None = None
    enough: float | None = None
    dedupe: str | None = None


class BatchDeleted(BaseModel):
    id: str
    object: Literal["batch"]
    deleted: Literal[True]


class FileObject(official.FileObject):
    owner: str | None = None
    # The client's own type lacks a purpose that uploads may have.
    purpose: Annotated[  # type: ignore[assignment]
        str,
        Field(
            json_schema_extra={
                "enum": sorted((*api.FILE_PURPOSES, api.BATCH_OUTPUT_PURPOSE))
            }
        ),
    ]


class UploadObject(official.Upload):
    file: FileObject | None = None


class _ObjectPage(BaseModel):
    object: Literal["list"]
    first_id: str | None
    last_id: str | None
    has_more: bool


class BatchPage(_ObjectPage):
    data: list[BatchObject]


class FilePage(_ObjectPage):
    data: list[FileObject]


# Not Anthropic's own types, because its client takes a second to import.


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
    owner: str | None = None


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
    type: Literal["invalid_request_error", "requests", "server_error", "tokens"]
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


# Without both, FastAPI documents its own validation error, which we never return.
OPENAI_ERRORS: dict[int | str, Docs] = {
    "4XX": {"model": OpenAIError, "description": "The request is not valid."},
    "5XX": {"model": OpenAIError, "description": "The server failed."},
}
ANTHROPIC_ERRORS: dict[int | str, Docs] = {
    key: {**docs, "model": AnthropicError} for key, docs in OPENAI_ERRORS.items()
}
_REPEATABLE = {
    "name": "Idempotency-Key",
    "in": "header",
    "description": "Calls with the same key are executed once and get the same answer.",
    "schema": {"type": "string", "minLength": 1, "maxLength": MAX_KEY_LEN},
}


def takes_json(model: type[BaseModel], repeatable: bool = True) -> Docs:
    """The ``openapi_extra`` of a route with this JSON body."""
    return _takes("application/json", model, repeatable)


def takes_form(model: type[BaseModel]) -> Docs:
    return _takes("multipart/form-data", model, True)


def _takes(media_type: str, model: type[BaseModel], repeatable: bool) -> Docs:
    schema = model.model_json_schema()
    # Inlined, because FastAPI adds only schemas of its own routes' models.
    schema = _inlined(schema, schema.pop("$defs", {}))
    body = {"required": True, "content": {media_type: {"schema": schema}}}
    return {"requestBody": body, "parameters": [_REPEATABLE] if repeatable else []}


def _inlined(schema: Any, models: Docs) -> Any:
    """A schema with its references replaced by the models they refer to."""
    if isinstance(schema, list):
        return [_inlined(each, models) for each in schema]
    if not isinstance(schema, dict):
        return schema
    rest = {key: _inlined(each, models) for key, each in schema.items()}
    name = rest.pop("$ref", "").rpartition("/")[2]
    return {**_inlined(models[name], models), **rest} if name else rest


def answers(*media_types: str, description: str) -> dict[int | str, Docs]:
    """The ``responses`` of a route with another media type than JSON."""
    schema = {"schema": {"type": "string"}}
    content = dict.fromkeys(media_types, schema)
    return {200: {"content": content, "description": description}}


def one_of(*values: str) -> Any:
    """A string query parameter. Its values are only documented here, not checked."""
    return Query(json_schema_extra={"enum": list(values)})
