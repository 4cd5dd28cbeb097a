"""Thousands of odd requests on every door of a server, which stays alive."""

from __future__ import annotations

import asyncio

from request_fuzz import WAVE, fuzz
from servers import Server

NUM_CASES = 5000
SEED = 7


def test_no_request_ends_the_server(offline_server: Server) -> None:
    found = asyncio.run(fuzz(offline_server.url, NUM_CASES, SEED))
    assert found.faults == []
    assert offline_server.process.poll() is None
    assert found.statuses.total() == NUM_CASES
    # Many cases came as far as the engine, and many did not.
    assert found.statuses[f"{WAVE} 200"] > NUM_CASES / 20
    assert found.statuses[f"{WAVE} 400"] > NUM_CASES / 20
