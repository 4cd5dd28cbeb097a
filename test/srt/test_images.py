"""Questions about images under the plan, on real SGLang with tiny models of two families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from image_runs import Line, run_images
from tiny_vision import image_of, image_url, write_tiny_mistral3, write_tiny_vision
from transformers import AutoProcessor, Mistral3ForConditionalGeneration

from sglang_batch.srt.engine.media import check_sources

NUM_IMAGES = 3
MOST_SENT = 10
STOCK = '--offline-batch-config={"scheduler":"stock"}'


@pytest.fixture(scope="module")
def job() -> list[Line]:
    urls = [image_url(seed) for seed in range(NUM_IMAGES)]
    # Neighbours are about different images.
    return [(urls[i % NUM_IMAGES], f"What is {i}?", 2 + i % 9) for i in range(21)]


@pytest.fixture(scope="module")
def runs(
    job: list[Line], tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], dict[str, Any]]:
    model = tmp_path_factory.mktemp("vision")
    write_tiny_vision(model)
    bad = [
        ("file:///etc/hostname", "A file?", 4),
        ("data:image/png;base64,AAAA", "No image?", 4),
    ]
    small = ("--max-running-requests=8", "--chunked-prefill-size=64")
    planned = run_images(model, [*job, *bad], *small, ahead=MOST_SENT)
    return planned, run_images(model, job, *small, STOCK, policy="fcfs")


def test_answers_are_those_of_sglangs_scheduler(
    runs: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    planned, stock = runs
    assert planned["texts"][: len(stock["texts"])] == stock["texts"]
    assert len(set(stock["texts"])) > 10


def test_an_image_is_encoded_and_computed_once(
    runs: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    planned, _ = runs
    assert planned["encoded"] == NUM_IMAGES
    assert planned["cached"] >= 0.97 * planned["ratio"] * planned["input"]
    # So the remaining work of the plan has the encoder's time as long as it is to come.
    computed, in_plan = planned["placeholders"]
    assert computed == in_plan > NUM_IMAGES


def test_pixels_are_in_memory_for_a_bounded_number_of_requests(
    runs: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    planned, stock = runs
    assert planned["sent"] <= MOST_SENT < stock["sent"]


def test_an_image_that_may_not_be_read_or_does_not_load_is_its_lines_error(
    runs: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    file, broken = runs[0]["texts"][-2:]
    assert file.startswith("error: 'file:///etc/hostname' may not be read")
    assert broken.startswith("error: ") and "Could not decode image" in broken


def test_answers_of_mistral_3_are_those_of_transformers(
    job: list[Line], tmp_path: Path
) -> None:
    # Its images have several runs of placeholders, and tokens of text between them.
    write_tiny_mistral3(tmp_path)
    found = run_images(tmp_path, job, "--max-running-requests=8")
    assert found["texts"] == by_transformers(tmp_path, job)
    assert len(set(found["texts"])) > 10
    assert found["encoded"] == NUM_IMAGES
    assert found["cached"] >= 0.97 * found["ratio"] * found["input"]


def by_transformers(path: Path, job: list[Line]) -> list[str]:
    processor = AutoProcessor.from_pretrained(path)
    model = Mistral3ForConditionalGeneration.from_pretrained(path, dtype="float32")
    texts = []
    for url, question, most in job:
        parts = [
            {"type": "image", "image": image_of(url)},
            {"type": "text", "text": question},
        ]
        inputs = processor.apply_chat_template(
            [{"role": "user", "content": parts}],
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            add_generation_prompt=True,
        )
        ids = model.generate(**inputs, max_new_tokens=most, do_sample=False)
        answer = ids[0, inputs["input_ids"].shape[1] :]
        texts.append(processor.decode(answer, skip_special_tokens=True))
    return texts


class Request:
    def __init__(self, image_data: object = None, video_data: object = None) -> None:
        self.image_data, self.video_data = image_data, video_data


@pytest.mark.parametrize(
    ("request_", "allowed", "refused"),
    [
        (Request(), (), ""),
        (Request("data:image/png;base64,AA"), (), ""),
        (Request([["data:x", "/etc/passwd"]]), (), "/etc/passwd"),
        (Request([{"url": "http://10.0.0.1/x"}]), (), "http://10.0.0.1/x"),
        (Request("https://images.example.com/a"), ("https://images.example.com/",), ""),
        (Request("https://images.example.com.evil/"), ("https://images.example.com/",),
         "evil"),
        (Request("/data/../etc/passwd"), ("/data/",), "passwd"),
        (Request("https://a.com/%2e%2e/x"), ("https://a.com/",), "%2e"),
        (Request("/data/a.png"), ("/data/",), ""),
        (Request(None, ["file:///x"]), ("http",), "file:///x"),
    ],
)  # fmt: skip
def test_media_come_from_the_line_or_from_allowed_places(
    request_: Request, allowed: tuple[str, ...], refused: str
) -> None:
    if not refused:
        check_sources(request_, allowed)
        return
    with pytest.raises(ValueError, match="may not be read") as error:
        check_sources(request_, allowed)
    assert refused in str(error.value)
