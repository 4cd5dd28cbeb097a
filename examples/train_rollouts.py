"""Reinforcement learning in small: rollouts on a server, a policy-gradient step, new weights.

python examples/train_rollouts.py [--url http://localhost:30000] [--steps 6]

A server of yours must run the tiny model of ``sglang-batch demo-model``: its weights are replaced. The reward
of an answer is the share of its bytes that are lower-case letters.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import demo
import httpx
import torch
from transformers import AutoModelForCausalLM

from sglang_batch.rollout import (
    GroupResult,
    LengthHistory,
    RolloutClient,
    RolloutGroup,
    SampleResult,
)
from sglang_batch.run.demo_model import write_demo_model

PROMPTS = [list(f"Write a word, number {i}: ".encode()) for i in range(8)]
# Of 8 answers to each prompt, the first 6 that finish.
SAMPLING = {"temperature": 1.0, "max_new_tokens": 32}
N, K = 8, 6
LEARNING_RATE = 5e-3


def reward(sample: SampleResult) -> float:
    letters = sum(ord("a") <= token <= ord("z") for token in sample.output_ids)
    return letters / max(1, len(sample.output_ids))


def update(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, groups: list[GroupResult]
) -> None:
    """A step of REINFORCE: rewards are compared within a group."""
    optimizer.zero_grad()
    num_samples = sum(len(group.finished) for group in groups)
    for group in groups:
        rewards = torch.tensor([reward(sample) for sample in group.finished])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        for sample, advantage in zip(group.finished, advantages, strict=True):
            tokens = torch.tensor([*(group.input_ids or []), *sample.output_ids])
            logits = model(tokens[None, :-1]).logits[0].float()
            logprobs = logits.log_softmax(-1).gather(-1, tokens[1:, None])
            answer = logprobs[-len(sample.output_ids) :]
            (-advantage * answer.mean() / num_samples).backward()
    optimizer.step()


def load(url: str, model: torch.nn.Module, directory: Path, version: str) -> None:
    """Have the server load the weights. Its cache is flushed: it is of the old ones."""
    model.save_pretrained(directory)
    body = {"model_path": str(directory), "weight_version": version}
    httpx.post(
        f"{url}/update_weights_from_disk", json=body, timeout=300
    ).raise_for_status()


def train(url: str, steps: int, directory: Path) -> list[float]:
    """The mean reward of each step."""
    write_demo_model(directory / "start")
    model = AutoModelForCausalLM.from_pretrained(directory / "start").float()
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE)
    client = RolloutClient(url, history=LengthHistory())
    rewards = []
    for step in range(steps):
        load(url, model, directory / "weights", str(step))
        prompts = [RolloutGroup(input_ids=prompt) for prompt in PROMPTS]
        groups = client.run(prompts, n=N, k=K, sampling_params=SAMPLING)
        answers = [sample for group in groups for sample in group.finished]
        assert {s["version"] for a in answers for s in a.weight_versions} == {str(step)}
        rewards.append(sum(map(reward, answers)) / len(answers))
        print(f"step {step}: {len(answers)} answers, reward {rewards[-1]:.3f}")
        update(model, optimizer, groups)
    return rewards


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the tiny model.")
    parser.add_argument("--url", help="default: a server is started")
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    torch.manual_seed(0)
    with demo.server(options.url) as url, tempfile.TemporaryDirectory() as directory:
        rewards = train(url, options.steps, Path(directory))
    print(
        f"reward of the last step over that of the first: {rewards[-1] / rewards[0]:.2f}"
    )


if __name__ == "__main__":
    main()
