"""Names of jobs, for a scheduler in another process that knows their ids only."""

from __future__ import annotations

import tempfile
from pathlib import Path

from sglang_batch.request import named_job_id

# A file per id. A name gives its id, so tests may share the directory.
_NAMES = Path(tempfile.gettempdir()) / "names-of-test-jobs"


def note_name(name: str) -> str:
    """Tell other processes the name of a job. Returns its id."""
    job_id = named_job_id(name)
    _NAMES.mkdir(exist_ok=True)
    (_NAMES / job_id).write_text(name)
    return job_id


def name_of(job_id: str) -> str:
    """The name of a job. Empty for one that no test has named."""
    path = _NAMES / job_id
    return path.read_text() if path.exists() else ""
