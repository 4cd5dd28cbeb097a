"""Every call of the batch API, by whichever version of the client is importable.

    python contract_calls.py http://127.0.0.1:30000 MODEL
    python contract_calls.py http://127.0.0.1:30000 MODEL a_deleted_file_is_gone

Runs all checks, or those named, against a running server and prints one JSON object as the last line:
the client's version, and what came of each check, null where it passed. The exit status
is 1 if one failed.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import contract_batches
import contract_errors
import contract_files
import openai

# Threads that import its parts at the same time end in a deadlock of import locks.
import openai.resources
from contract_base import Calls

Check = Callable[[Calls], None]
CHECKS: dict[str, Check] = {
    check.__name__: check
    for module in (contract_batches, contract_errors, contract_files)
    for check in module.CHECKS
}
# Most of a check's time is a batch's, which is waited for.
THREADS = 8


def outcome(check: Check, calls: Calls) -> str | None:
    """None where a check passes, and what it says where it does not."""
    began = time.monotonic()
    try:
        check(calls)
    except Exception:
        return traceback.format_exc(limit=-3)
    print(f"{time.monotonic() - began:5.1f} s {check.__name__}", file=sys.stderr)
    return None


def main() -> int:
    base_url, model, *names = sys.argv[1:]
    checks = {name: CHECKS[name] for name in names or CHECKS}
    calls = Calls(base_url, model)
    began = time.monotonic()
    with ThreadPoolExecutor(THREADS) as pool:
        results = pool.map(lambda check: outcome(check, calls), checks.values())
        outcomes = dict(zip(checks, results, strict=True))
    for name, failure in outcomes.items():
        if failure is not None:
            print(f"{name}:\n{failure}", file=sys.stderr)
    report = {
        "client": openai.__version__,
        "seconds": round(time.monotonic() - began, 1),
        "outcomes": outcomes,
    }
    print(json.dumps(report))
    return int(any(outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
