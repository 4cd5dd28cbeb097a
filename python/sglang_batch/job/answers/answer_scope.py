"""What an answer depends on besides its request: the model's files and the engine's options."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Options of SGLang that change no answer: where it listens, how it logs, how much it runs at a
# time, and the seed of requests that have none, whose answers are not kept.
IGNORED = (
    "offline_batch", "offline_config", "offline_batch_config", "offline_batch_dir",
    "host", "port", "nccl_port", "dist_init_addr", "dist_timeout", "grpc_port",
    "api_key", "admin_api_key", "ssl_keyfile", "ssl_certfile", "random_seed",
    "log_level", "log_level_http", "log_requests", "log_requests_level", "show_time_cost",
    "mem_fraction_static", "max_total_tokens", "max_running_requests",
    "max_queued_requests", "chunked_prefill_size", "max_prefill_tokens", "schedule_policy",
    "schedule_conservativeness", "cuda_graph_bs", "cuda_graph_max_bs",
    "enable_metrics", "watchdog_timeout", "tokenizer_worker_num", "skip_server_warmup",
)  # fmt: skip


def answer_scope(model: str, options: Mapping[str, Any], owner: str = "") -> bytes:
    """16 bytes that differ where equal requests may have other answers.

    Args:
        model: directory of the model, or its name on a hub.
        options: of the engine, by name.
        owner: whose answers they are: nobody sees those of others.
    """
    digest = hashlib.blake2b(digest_size=16)
    place = Path(model)
    if place.is_dir():
        for file in sorted(place.rglob("*")):
            if file.is_file():
                stat = file.stat()
                told = (str(file.relative_to(place)), stat.st_size, stat.st_mtime_ns)
                digest.update(json.dumps(told).encode())
    digest.update(
        json.dumps([str(place.absolute()) if place.exists() else model]).encode()
    )
    kept = {
        name: str(value)
        for name, value in options.items()
        if not name.startswith("_") and name not in IGNORED
    }
    digest.update(json.dumps([kept, owner], sort_keys=True).encode())
    return digest.digest()
