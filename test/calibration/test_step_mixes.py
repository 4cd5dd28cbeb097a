"""The requests whose steps are timed."""

from __future__ import annotations

import pytest

from sglang_batch.prediction.calibration.decode_shapes import (
    OUTPUTS,
    DecodeLimits,
    mixes,
)

LARGE = DecodeLimits(500_000, 1024, 131_072, 1, 8192)
SMALL = DecodeLimits(600, 8, 300, 1, 128, on_cpu=True)
TINY = DecodeLimits(100, 8, 64, 1, 16)


@pytest.mark.parametrize("limits", [LARGE, SMALL, TINY])
def test_every_mix_fits_into_the_engine(limits: DecodeLimits) -> None:
    found = mixes(limits, 128)
    assert found
    for mix in found:
        assert len(mix.lengths) == len(mix.outputs) <= 128
        longest = max(map(sum, zip(mix.lengths, mix.outputs, strict=True)))
        assert longest < limits.context_len
        # Half of the requests run at a time.
        rows = len(mix.lengths) // 2
        assert 0 < rows <= limits.max_running
        running = sum(mix.lengths[:rows]) - mix.shared * (rows - 1)
        assert running + rows * max(mix.outputs) <= limits.kv_capacity_tokens
        assert min(mix.lengths) > mix.shared


def test_steps_of_all_kinds_occur() -> None:
    found = mixes(LARGE, 128_000)
    lengths = {mix.lengths[0] for mix in found}
    assert min(lengths) < LARGE.step_tokens / 32
    assert max(lengths) > 2 * LARGE.step_tokens
    rows = {len(mix.lengths) // 2 for mix in found}
    # Of what they share there is one, so that more KV is read than there is room for.
    read = max(sum(mix.lengths) // 2 for mix in found if mix.shared)
    assert read > 3 * max(sum(mix.lengths) // 2 for mix in found if not mix.shared)
    assert min(rows) == 2
    assert max(rows) == 512
    # Some requests only have a prompt, and others decode while new prompts join.
    assert any(set(mix.outputs) == set(OUTPUTS) for mix in found)
