"""Keeps the online calls of a key to the models and adapters that it names."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.types import Message, Receive

from ....errors import ApiError
from ...access.model_names import body_refusal
from .route_roles import ONLINE, ONLINE_OTHER

# Larger bodies of online calls are refused for keys with a list of models.
MAX_BODY_BYTES = 64 << 20


async def with_checked_model(
    receive: Receive, template: str, allowed: Sequence[str], served: Sequence[str]
) -> Receive:
    """Read the body of an online call and check its model.

    Args:
        template: of the call's route.
        allowed: names of models and adapters.
        served: the names of the served model.

    Returns:
        A replacement of ``receive`` with the same body.

    Raises:
        ApiError: 403 for another model, 413 for a body that is too large to check.
    """
    if template in ONLINE_OTHER:
        raise _refused(
            "This API key may use some models only, so it does not open "
            f"{template}, whose calls cannot be checked."
        )
    if template not in ONLINE:
        return receive
    body, last = await _read(receive)
    if why := body_refusal(allowed, served, template, body):
        raise _refused(*why)
    sent = False

    async def replay() -> Message:
        nonlocal sent
        if last is not None:
            return last
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


async def _read(receive: Receive) -> tuple[bytes, Message | None]:
    """The whole body, and the message that ended it early if the client left."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return bytes(body), message
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            raise ApiError(
                413,
                f"The body has more than {MAX_BODY_BYTES} bytes, the most for an API key "
                "with a list of models.",
                code="request_too_large",
                retry=False,
            )
        if not message.get("more_body", False):
            return bytes(body), None


def _refused(message: str, param: str | None = None) -> ApiError:
    return ApiError(403, message, param=param, code="model_not_allowed", retry=False)
