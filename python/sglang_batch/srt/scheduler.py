"""SGLang's scheduler in an offline server.

The plan of a job is carried out here, in each scheduler process (one per TP and
DP rank). For now the stock scheduler does the work and the plan reaches it as the
order in which requests arrive; this subclass says that it is in place, so that the
main process can tell an offline scheduler from a stock one.
"""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.managers.scheduler import Scheduler

from ..config import OfflineBatchConfig

logger = logging.getLogger(__name__)

STATE_KEY = "offline_batch"


class OfflineScheduler(Scheduler):  # type: ignore[misc]
    """The scheduler of an offline server; REPLACEs SGLang's in its processes."""

    def get_init_info(self) -> dict[str, Any]:
        """Say in the log of each rank that this scheduler is ours."""
        logger.info("Offline batch scheduler ready: %s", self._offline_config())
        return super().get_init_info()

    def get_internal_state(self, recv_req: Any) -> Any:
        """Add the settings in force to ``/server_info``, for each DP rank.

        The main process also reads them to tell our scheduler from a stock one.
        """
        output = super().get_internal_state(recv_req)
        output.internal_state[STATE_KEY] = self._offline_config()
        return output

    def _offline_config(self) -> str:
        return str(OfflineBatchConfig.from_json(self.server_args.offline_batch_config))
