"""Lines with sounds, and transcriptions, on real SGLang with a tiny Qwen2-Audio."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from image_runs import Line, run_images
from tiny_audio import RATE, sound, sound_url, write_tiny_audio

NUM_SOUNDS = 3
PROMPT = (
    "Transcribe the audio. Output only the exact transcription, with no preamble, "
    "prefix, commentary, or quotation marks."
)
MOST = 448  # of SGLang's transcriptions of short sounds


def part(seed: int, inline: bool) -> dict[str, Any]:
    url = sound_url(seed)
    if inline:
        data = url.partition(",")[2]
        return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    return {"type": "audio_url", "audio_url": {"url": url}}


@pytest.fixture(scope="module")
def questions() -> list[Line]:
    return [
        (part(i % NUM_SOUNDS, i % 2 == 0), f"What is {i}?", 2 + i % 5)
        for i in range(12)
    ]


@pytest.fixture(scope="module")
def run(
    questions: list[Line], tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], Path]:
    model = tmp_path_factory.mktemp("sounds")
    write_tiny_audio(model)
    broken = "data:audio/wav;base64,AAAA"
    others: list[Line] = [
        ({"file_url": sound_url(0)}, "", 0),
        ({"file_url": "file:///etc/hostname"}, "", 0),
        ({"file_url": broken}, "", 0),
        ({"type": "audio_url", "audio_url": {"url": "/etc/hostname"}}, "A file?", 4),
        ({"type": "audio_url", "audio_url": {"url": broken}}, "No sound?", 4),
    ]
    lines = [*questions, *others]
    return run_images(model, lines, "--max-running-requests=8"), model


def by_transformers(model: Path, lines: list[tuple[int, str, int]]) -> list[str]:
    import soundfile
    from transformers import AutoProcessor, Qwen2AudioForConditionalGeneration

    processor = AutoProcessor.from_pretrained(model)
    tiny = Qwen2AudioForConditionalGeneration.from_pretrained(model, dtype="float32")
    # SGLang's encoder sees the silence after a sound, which this one would mask.
    tiny.model.audio_tower.register_forward_pre_hook(
        lambda _, args, kwargs: (args, kwargs | {"attention_mask": None}),
        with_kwargs=True,
    )
    texts = []
    for seed, question, most in lines:
        parts = [{"type": "audio"}, {"type": "text", "text": question}]
        text = processor.apply_chat_template(
            [{"role": "user", "content": parts}], add_generation_prompt=True
        )
        samples, _ = soundfile.read(io.BytesIO(sound(seed)), dtype="float32")
        inputs = processor(
            text=text, audio=[samples], sampling_rate=RATE, return_tensors="pt"
        )
        ids = tiny.generate(**inputs, max_new_tokens=most, do_sample=False)
        answer = ids[0, inputs["input_ids"].shape[1] :]
        texts.append(processor.decode(answer, skip_special_tokens=True))
    return texts


def test_answers_are_those_of_transformers(
    run: tuple[dict[str, Any], Path], questions: list[Line]
) -> None:
    found, model = run
    lines = [(i % NUM_SOUNDS, q, most) for i, (_, q, most) in enumerate(questions)]
    right = by_transformers(model, [*lines, (0, PROMPT, MOST)])
    assert found["texts"][: len(right)] == right
    assert found["encoded"] == NUM_SOUNDS


def test_a_sound_that_may_not_be_read_or_does_not_load_is_its_lines_error(
    run: tuple[dict[str, Any], Path],
) -> None:
    file, broken, part_of_file, broken_part = run[0]["texts"][-4:]
    assert file.startswith("error: 'file:///etc/hostname' may not be read")
    assert part_of_file.startswith("error: '/etc/hostname' may not be read")
    assert broken.startswith("error: ") and broken_part.startswith("error: ")
