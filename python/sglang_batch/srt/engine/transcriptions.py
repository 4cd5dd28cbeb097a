"""Lines of ``/v1/audio/transcriptions``, which name a file where online calls send one.

SGLang's serving class builds and answers their requests. What it does before that, for
Whisper alone, needs more than one request to the engine, and is left out.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, Literal

import orjson
from pydantic import BaseModel, Field

from ...request import BatchRequestInput
from .media import MediaReader


class TranscriptionBody(BaseModel):
    """The body of a line.

    file_url: where the sound is: a data: URL, or a place of ``media_sources``.
    duration_s: its length in seconds, which the server fills in.
    """

    model: str
    file_url: str
    language: str | None = None
    response_format: Literal["json", "verbose_json"] = "json"
    temperature: float = Field(default=0.0, ge=0, le=2)
    timestamp_granularities: list[Literal["word", "segment"]] | None = None
    stream: Literal[False] = False
    duration_s: float = 0.0


async def with_duration(
    line: BatchRequestInput, body: dict[str, Any], reader: MediaReader
) -> BatchRequestInput:
    """A line whose body says how long its sound is.

    Raises:
        ValueError: the place may not be read.
        Exception: the file cannot be read, or is no sound.
    """
    place = body.get("file_url")
    if not isinstance(place, str):
        return line  # whose checks say so
    url = await reader.data_url(place, "audio")
    seconds = await asyncio.to_thread(_duration, url, place)
    # Not its bytes: lines wait in memory.
    return replace(line, body=orjson.dumps(body | {"duration_s": seconds}))


def _duration(url: str, place: str) -> float:
    """The length in seconds of the sound in a data: URL, which was in a place."""
    from sglang.srt.utils import load_audio

    sound = load_audio(url, sr=16000)
    if not sound.size:
        raise ValueError(f"{place[:100]!r} has no sound.")
    return float(sound.shape[-1]) / 16000


def serving_class(manager: Any) -> Any:
    """SGLang's serving class of transcriptions.

    Raises:
        ValueError: the model does not transcribe, or SGLang does so in several steps.
    """
    from sglang.srt.entrypoints.openai.serving_transcription import (
        OpenAIServingTranscription,
    )
    from sglang.srt.entrypoints.openai.transcription_adapters import WhisperAdapter

    handler = OpenAIServingTranscription(manager)
    if isinstance(handler._adapter, WhisperAdapter):  # also that of all other models
        names = ", ".join(manager.model_config.hf_config.architectures or ())
        raise ValueError(
            f"{names} does not transcribe in batches; models that do are Qwen3-ASR, "
            "Qwen2-Audio, GLM-ASR, Granite Speech and MiMo-V2-ASR."
        )
    return handler


def request_of(body: Any) -> Any:
    """SGLang's request for a :class:`TranscriptionBody`."""
    from sglang.srt.entrypoints.openai.protocol import TranscriptionRequest

    fields = body.model_dump(exclude={"file_url", "duration_s"})
    request = TranscriptionRequest(**fields, audio_duration_s=body.duration_s)
    # Not its bytes: they are read once the request is sent, as images are.
    request.audio_data = body.file_url
    return request
