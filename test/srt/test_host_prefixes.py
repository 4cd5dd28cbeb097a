"""Prefixes in the host pool: which parts are found and copied, and who must leave."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sglang_batch.scheduling.job_plan import StepCost
from sglang_batch.srt.scheduler.kv.host_pool import HostPool, HostRoom, Run
from sglang_batch.srt.scheduler.kv.host_prefixes import BLOCK, HostPrefixes, Prompt

PAGE = 8
SLOTS, PAGES = 4096, 64  # tokens on the device, pages on the host


class Tree:
    """A prefix tree that holds one prompt, of which ``held`` tokens are in the cache."""

    page_size = PAGE

    def __init__(self) -> None:
        self.slots = torch.zeros(0, dtype=torch.int64)
        self.inserted: list[tuple[int, int]] = []
        self.locks = 0

    def match_prefix(self, params: Any) -> Any:
        return SimpleNamespace(device_prefix_len=len(self.slots), last_device_node=0)

    def path_device_indices(self, node: int) -> torch.Tensor:
        return self.slots

    def lock(self, node: int) -> str:
        self.locks += 1
        return "lock"

    def unlock(self, lock: str) -> None:
        self.locks -= 1

    def insert(self, params: Any) -> None:
        assert len(params.key) == len(params.value)
        self.inserted.append((params.prev_prefix_len, len(params.value)))
        self.slots = params.value


class Device:
    """KV whose value names the token and the layer, and an allocator of its slots."""

    def __init__(self) -> None:
        self.layers = [torch.zeros((SLOTS, 4)) for _ in range(2)]
        self.room = HostRoom(PAGES)
        self.pool = HostPool(self.layers, PAGES, PAGE)
        self.used = 0
        self.free = SLOTS

    def wait_for_forward(self) -> None:
        """Nothing is in flight."""

    def save(self, name: str, slots: torch.Tensor, runs: list[Run]) -> None:
        self.pool.save(slots, runs)

    def load(self, name: str, slots: torch.Tensor, runs: list[Run], skip: int) -> None:
        self.pool.load(slots, runs, skip)

    def forget(self, name: str) -> None:
        self.room.give_back(name)

    def allocate(self, num_tokens: int, reserve: int) -> torch.Tensor | None:
        if num_tokens + reserve > self.free:
            return None
        self.used += num_tokens
        return torch.arange(self.used - num_tokens, self.used)

    def fill(self, slots: torch.Tensor, tokens: Any) -> None:
        for number, layer in enumerate(self.layers):
            layer[slots] = 1.0 * torch.tensor(tokens)[:, None] + number * 1000

    def read(self, slots: torch.Tensor) -> list[int]:
        for number, layer in enumerate(self.layers):
            assert torch.equal(layer[slots] - number * 1000, self.layers[0][slots])
        found: list[int] = self.layers[0][slots, 0].int().tolist()
        return found


def prompt(tokens: Any, extra_key: str | None = None) -> Prompt:
    return Prompt(array("q", tokens), extra_key, None)


JOB: Any = SimpleNamespace(plan=SimpleNamespace(cost=StepCost(1e-5, 0.0, 0.0, 0.0)))
OTHER: Any = SimpleNamespace(plan=JOB.plan)


class Host:
    def __init__(self) -> None:
        self.tree, self.device = Tree(), Device()
        self.prefixes = HostPrefixes(self.tree, self.device)  # type: ignore[arg-type]

    def save(self, of: Prompt, begin: int, end: int, job: Any = JOB) -> None:
        """The device computes the prompt and the prefix goes to the host."""
        slots = self.device.allocate(end, 0)
        assert slots is not None
        self.device.fill(slots, of.tokens[:end])
        self.tree.slots = slots
        self.prefixes.save(job, of, 0, begin, end)  # type: ignore[arg-type]
        self.device.fill(slots, [-1] * end)  # and is overwritten

    def restore(self, of: Prompt, ends: list[int], held: int = 0) -> int:
        """Put it back where the tree holds the first ``held`` tokens."""
        slots = self.device.allocate(held, 0)
        assert slots is not None
        self.device.fill(slots, of.tokens[:held])
        self.tree.slots = slots
        tokens = self.prefixes.restore(of, ends, 0, lambda need: None)
        assert self.tree.locks == 0
        if tokens:
            assert self.tree.inserted[-1] == (held, tokens)
            assert self.device.read(self.tree.slots) == list(of.tokens[:tokens])
        return tokens


@pytest.fixture
def host() -> Host:
    return Host()


WORDS = prompt(range(100, 500))


@pytest.mark.parametrize("held", [0, PAGE, 7 * PAGE, 13 * PAGE])
def test_a_prefix_comes_back_from_behind_what_the_tree_holds(
    host: Host, held: int
) -> None:
    host.save(WORDS, 0, 200)
    assert host.restore(WORDS, [200], held) == 200


def test_a_longer_prefix_is_made_of_several(host: Host) -> None:
    host.save(WORDS, 0, 104)
    host.save(WORDS, 104, 200, OTHER)
    host.save(WORDS, 200, 240)
    assert host.restore(WORDS, [104, 200, 240]) == 240
    assert host.prefixes.num_restored == 3
    # Without the one in the middle, what is behind it is of no use.
    host.prefixes.drop_of(OTHER)
    assert host.restore(WORDS, [104, 200, 240]) == 104
    assert host.restore(WORDS, [104, 200, 240], held=200) == 240
    assert host.restore(WORDS, [104, 200, 240], held=240) == 0


def test_a_part_of_a_prompt_is_found_at_blocks(host: Host) -> None:
    host.save(WORDS, 0, 320)
    other = prompt([*WORDS.tokens[:150], *range(50)])
    assert host.restore(other, [144]) == 2 * BLOCK
    assert host.restore(prompt(range(400)), [320]) == 0


def test_names_have_more_than_the_tokens(host: Host) -> None:
    host.save(WORDS, 0, 200)
    assert host.restore(prompt(WORDS.tokens, "adapter"), [200]) == 0
    assert host.restore(WORDS._replace(cache_salt="mine"), [200]) == 0


def test_the_one_used_last_leaves_a_full_pool(host: Host) -> None:
    each = PAGES // 4 * PAGE
    prompts = [prompt(np.arange(each) + 1000 * i) for i in range(5)]
    for one in prompts[:4]:
        host.save(one, 0, each)
    assert host.restore(prompts[0], [each]) == each
    host.save(prompts[4], 0, each)
    assert [host.restore(one, [each]) for one in prompts] == [each, 0, each, each, each]


def test_requests_are_never_displaced(host: Host) -> None:
    host.device.room.take("request", PAGES - 2, 0.0)
    host.save(WORDS, 0, 3 * PAGE)
    assert host.prefixes.num_saved == 0
    host.save(WORDS, 0, 2 * PAGE)
    assert host.prefixes.num_saved == 1
    assert host.device.room.num_free == 0


def test_too_little_kv_restores_nothing(host: Host) -> None:
    host.save(WORDS, 0, 200)
    host.device.free = 100
    assert host.restore(WORDS, [200]) == 0
    assert not host.tree.inserted


def test_all_pages_come_back(host: Host) -> None:
    host.save(WORDS, 0, 104)
    host.save(WORDS, 0, 104)  # it is there already
    assert host.prefixes.num_saved == 1
    host.save(WORDS, 104, 200, OTHER)
    host.prefixes.drop_of(JOB)
    assert host.restore(WORDS, [104, 200]) == 0
    assert host.restore(WORDS, [104, 200], held=104) == 200
    host.prefixes.drop_all()
    assert host.device.room.num_free == PAGES
    assert not host.prefixes._found_by
