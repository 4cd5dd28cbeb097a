"""The dense engine on an accelerator: the tokens of ``generate``, in float32.

On a CPU the same test runs without one, so that it is known to work.
"""

from __future__ import annotations

import pytest
import torch
from dense_runs import Run, greedy, prompts
from tiny_models import tiny_model

from sglang_batch.dense.model import wrap
from sglang_batch.dense.row_request import DenseSettings, Sampling


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda":
        request.getfixturevalue("accelerator")
    return str(request.param)


@pytest.mark.parametrize("name", ["llama", "bloom", "gpt2", "bart"])
def test_rows_have_the_tokens_of_generate(name: str, device: str) -> None:
    model = wrap(tiny_model(name).to(device))
    shared = prompts(1, seed=9, shortest=20, longest=20)[0]
    asked = [[*shared, *ids] for ids in prompts(6, seed=1)] + prompts(6, seed=2)
    settings = DenseSettings(max_rows=5, max_cells=400, shortest_shared=8)
    run = Run(model, settings).add(
        [greedy(str(i), ids, 3 + 5 * i, place=i) for i, ids in enumerate(asked)]
    )
    run.finish()
    for i, ids in enumerate(asked):
        count = 3 + 5 * i
        with torch.inference_mode():
            found = model.model.generate(
                torch.tensor([ids], device=device),
                attention_mask=torch.ones(1, len(ids), dtype=torch.int64, device=device),
                max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0,
            )[0, len(ids) :].tolist()  # fmt: skip
        assert run.tokens()[str(i)] == found, i


def test_a_seed_makes_the_same_tokens_in_any_company(device: str) -> None:
    model = wrap(tiny_model("llama").to(device))
    drawn = Sampling(temperature=1.0, top_p=0.9, seed=7)

    def answer(others: int) -> list[int]:
        requests = [greedy(str(i), ids, 12) for i, ids in enumerate(prompts(others))]
        requests.append(greedy("drawn", [5, 6, 7], 12, sampling=drawn))
        run = Run(model, DenseSettings(max_rows=8)).add(requests)
        run.finish()
        return run.tokens()["drawn"]

    assert answer(0) == answer(6)
