"""SGLang's tool for offline throughput, with what attention read and did not read again.

    sglang-batch exec shared_prefix_tool --dataset-name generated-shared-prefix
        --model-path M --offline-batch --result-filename FILE

All options are those of ``sglang.benchmark.offline_throughput``. Each of its results gets
``attention_steps_shared`` and ``kv_read_bytes_saved`` since the engine started, which are 0
with SGLang's scheduler.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable
from typing import Any

from sglang.benchmark import offline_throughput
from throughput_engine import COUNTS


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


def main() -> None:
    run_once = offline_throughput.throughput_test_once

    def counted(*args: Any, **kwargs: Any) -> dict[str, Any]:
        result: dict[str, Any] = run_once(*args, **kwargs)
        info = kwargs["backend"].get_server_info()
        if inspect.isawaitable(info):
            info = asyncio.run(_awaited(info))
        state = info["internal_states"][0].get("offline_batch", {})
        return result | {name: state.get(name, 0) for name in COUNTS}

    offline_throughput.throughput_test_once = counted
    offline_throughput.cli_main()


if __name__ == "__main__":
    main()
