"""The check of a job's input by ``run`` and ``plan``, before SGLang is imported."""

from __future__ import annotations

from ..batch_api.jsonl import BatchFile
from ..batch_api.lines import LineRules
from ..inputs.local_input import LocalInput

_WAY_OUT = "--skip-invalid answers bad lines with an error and runs the others."


def checked_requests(
    local: LocalInput, model: str | None, *, skip_invalid: bool
) -> BatchFile:
    """The requests of a file, checked in one pass.

    Args:
        model: the model's name in requests. None accepts every name.
        skip_invalid: keep bad lines as such, if there is a good one. Otherwise they
            reject the file.

    Raises:
        InputError: lines are bad; the message lists them.
    """
    from ..srt.engine.checks.body_checks import body_errors

    rules = LineRules(
        models=None if model is None else (model,),
        require_model=False,
        check_body=body_errors,
    )
    if not skip_invalid:
        return local.requests(rules, way_out=_WAY_OUT)
    requests = local.requests(rules, skip_invalid=True)
    if requests.invalid and len(requests.invalid) == len(requests):
        # Most likely an option is wrong, such as the model's name.
        with requests.closing():
            return local.requests(rules)
    return requests


def checked_again(
    requests: BatchFile,
    local: LocalInput,
    *,
    named: str | None,
    model: str,
    skip_invalid: bool,
) -> BatchFile:
    """The same requests, checked again if the model has another name after all.

    Args:
        named: the name that ``requests`` were checked for.
        model: the name that SGLang has.

    Raises:
        InputError: lines are bad; the message lists them.
    """
    if model == named:
        return requests
    with requests.closing():
        return checked_requests(local, model, skip_invalid=skip_invalid)
