"""Instructor: answers by schema, single ones and those of a batch."""

from __future__ import annotations

import io
import os
from types import SimpleNamespace
from typing import Any

import checks as c
import instructor
import openai
from checks import check
from instructor.batch import BatchProcessor
from instructor.core.exceptions import InstructorRetryException

# A processor of batches takes both from the environment, and raises Exception.
os.environ.update(OPENAI_BASE_URL=f"{c.URL}/v1", OPENAI_API_KEY=c.KEY)
processor: Any = BatchProcessor(f"openai/{c.MODEL}", c.Place)


def place(mode: Any = instructor.Mode.TOOLS, key: str = c.KEY, **more: Any) -> Any:
    client = openai.OpenAI(base_url=f"{c.URL}/v1", api_key=key, max_retries=0)
    create = instructor.from_openai(client, mode=mode).chat.completions.create
    # After its call a random model goes on for some time, and instructor wants its end.
    asked: Any = {"model": c.MODEL, "messages": c.ASK, "max_tokens": 1500, **more}
    found = create(response_model=c.Place, max_retries=0, **asked)
    assert isinstance(found, c.Place), found
    return found


def fetch(batch: str) -> Any:
    return SimpleNamespace(**processor.get_batch_status(batch))


check("tools")(place)
check("schema")(lambda: place(instructor.Mode.JSON_SCHEMA))


@check("batch")
def _() -> None:
    lines = processor.create_batch_from_messages([c.ASK, c.ASK], max_tokens=90)
    made = processor.submit_batch(lines)
    assert c.ended(lambda: fetch(made)).status == "completed"
    found = processor.get_results(made)
    assert [type(each.result) for each in found] == [c.Place] * 2, found


c.check_batches(
    lambda content: processor.submit_batch(io.BytesIO(content)),
    fetch,
    processor.cancel_batch,
    lambda: [each.id for each in processor.list_batches(limit=100)],
    Exception,
)
ours = InstructorRetryException
c.check_errors(place, ours, ours, ours)
c.report("instructor")
