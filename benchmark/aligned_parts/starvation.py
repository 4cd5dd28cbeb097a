"""1,000 random jobs with a limit: nobody waits longer than it while somebody could join.

Requests come over time, grow, end, are parked and aborted, in an engine of counters
(``test/helpers/batch_runs.py``). From ``limit + 1`` ticks on a request is due. It may wait
longer only by the steps in which it was due and the request that is next did not fit,
and that request has to have waited as long, or to be in a candidate batch with one that has.
"""

from __future__ import annotations

import sys
from pathlib import Path

from report import Figure

from sglang_batch.planner.kv_lengths.batch_state import GROUPS, TREE

sys.path.append(str(Path(__file__).parents[2] / "test" / "helpers"))

from batch_runs import BatchRun, random_job

JOBS = 1000
# Tests run the first jobs.
FIRST = 10_000


def measure(quick: bool = False) -> list[Figure]:
    """The figures of this part. A quick run has fewer jobs."""
    jobs = 50 if quick else JOBS
    late = early = joined = due = 0
    for k in range(jobs):
        job = random_job(FIRST + k, (TREE, GROUPS)[k % 2], due=True)
        run = BatchRun(job).run()
        late += len(run.late)
        early += len(run.early)
        joined += len(run.joined)
        due += run.num_due
    return [
        Figure(f"beyond their limit, of {joined:,} that joined", late, "", ("=", 0)),
        Figure(f"overtook one that was due, of {due:,}", early, "", ("=", 0)),
    ]
