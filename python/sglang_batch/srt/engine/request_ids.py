"""Our ids on SGLang's requests, including those that SGLang splits.

The scheduler recognises the lines of a job by their ids. A request with any other id is
an online request, which runs before all lines.
"""

from __future__ import annotations

import itertools
import re
import uuid
from collections.abc import Iterator

from sglang.srt.managers.io_struct import GenerateReqInput

from ...request import engine_request_id, parse_request_id, part_request_id
from ..compat.server_types import EngineRequest

# An attribute of SGLang's requests that no body sets: SGLang ignores unknown fields.
_OURS = "_offline_batch_has_our_id"
# How the ids of jobs begin: of lists of prompts in one call, of gathered calls, and all. A
# random number of 32 hexadecimal digits follows, by which no client's id is taken for ours.
LIST_ID, GATHERED_ID = "list_", "gathered_"
OUR_IDS = ("batch_", GATHERED_ID, LIST_ID, "rollout_", "wave_")
_DIGITS = 32
# On a prefill server, they follow the name of the decode server. A bucket's number comes last.
_JOB_ID = re.compile(
    rf"([0-9a-f]{{12}}\.)?({'|'.join(OUR_IDS)})[0-9a-f]{{{_DIGITS}}}(-[0-9]{{6,}})?"
)
_HEX = re.compile("[0-9a-f]*")


def is_of_a_job(rid: str) -> bool:
    """Whether an id is that of a request of one of our jobs."""
    job_id, number, _ = parse_request_id(rid)
    return number >= 0 and is_job_id(job_id)


def is_job_id(job_id: str) -> bool:
    """Whether an id is that of a job, by which :func:`is_of_a_job` knows its requests."""
    return _JOB_ID.fullmatch(job_id) is not None


def may_be_ours(rid: str) -> bool:
    """Whether an id is, or could be the beginning of, an id that we choose.

    SGLang aborts every request whose id begins with the id of a call that is dropped.
    """
    for begin in OUR_IDS:
        if begin.startswith(rid):
            return True
        if rid.startswith(begin):
            digits, rest = rid[len(begin) :][:_DIGITS], rid[len(begin) + _DIGITS :]
            return bool(_HEX.fullmatch(digits)) and rest[:1] in ("", "-")
    return False


def has_our_id(adapted: EngineRequest) -> bool:
    """Whether :func:`set_rid` chose the id of a request, and not its client."""
    return _OURS in vars(adapted)


def name_list(adapted: EngineRequest) -> None:
    """Give the prompts of a call ids of a job, where SGLang made up random ones."""
    job_id = new_list_id()
    adapted.rid = [engine_request_id(job_id, i) for i in range(len(adapted.rid or ()))]


def new_list_id() -> str:
    return LIST_ID + uuid.uuid4().hex


def set_rid(adapted: EngineRequest, rid: str) -> None:
    """Give a request our id, and ids derived from it to the sequences that SGLang splits
    it into, so that the scheduler recognises them too."""
    vars(adapted)[_OURS] = True
    prompts = adapted.input_ids if adapted.input_ids is not None else adapted.text
    several = isinstance(prompts, list) and prompts and not isinstance(prompts[0], int)
    num_prompts = len(prompts) if several and isinstance(prompts, list) else 1
    if isinstance(adapted, GenerateReqInput) and _num_samples(adapted) > 1:
        adapted.__class__ = Samples
        adapted.part_ids = (part_request_id(rid, part) for part in itertools.count())
        # The prompts' own ids, until SGLang has made the samples.
        adapted.rid = [f"{rid}.prompt{i:06d}" for i in range(num_prompts)]
    elif several:
        adapted.rid = [part_request_id(rid, part) for part in range(num_prompts)]
    else:
        adapted.rid = rid


def _num_samples(adapted: GenerateReqInput) -> int:
    params = adapted.sampling_params or {}
    if isinstance(params, list):
        params = params[0] if params else {}
    if (params.get("beam_width") or 1) > 1:
        return 1  # one search finds all n
    return int(params.get("n") or 1)


class Samples(GenerateReqInput):  # type: ignore[misc]
    """A request for several answers to each prompt, whose copies get ids of ours.

    part_ids: yields them, shared by all copies.
    """

    part_ids: Iterator[str]

    def __getitem__(self, i: int) -> GenerateReqInput:
        item = super().__getitem__(i)
        item.__class__ = Samples
        item.part_ids = self.part_ids
        return item

    def regenerate_rid(self) -> str:
        self.rid = next(self.part_ids)
        return self.rid
