"""``sglang-batch`` in a process that pauses before it sends a timed request to SGLang.

As on a machine whose cores are busy: the scheduler runs steps meanwhile. Everything is measured
twice, which is the least.
"""

from __future__ import annotations

import time
from typing import Any

from sglang.srt.managers.tokenizer_manager import TokenizerManager

from sglang_batch.__main__ import command
from sglang_batch.prediction.calibration import calibrate_command

PAUSE_S = 0.05  # ten steps of the demo model


def main() -> None:
    send = TokenizerManager._send_one_request

    async def send_late(self: TokenizerManager, tokenized_obj: Any) -> None:
        if tokenized_obj.rid.startswith("calibrate_"):
            time.sleep(PAUSE_S)
        await send(self, tokenized_obj)

    TokenizerManager._send_one_request = send_late
    calibrate_command.MOST_ROUNDS = calibrate_command.LEAST_ROUNDS
    command()
