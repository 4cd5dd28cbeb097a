"""The server's HTTP API beside SGLang's own.

Thin: parameters in, :class:`~sglang_batch.service.BatchService`, objects out.
"""

from __future__ import annotations

from fastapi import APIRouter

from . import batches, files, message_batches, page, uploads, waves

ROUTERS = (
    files.router,
    uploads.router,
    batches.router,
    message_batches.router,
    waves.router,
    page.router,
)


def make_router() -> APIRouter:
    """All our routes."""
    router = APIRouter()
    for each in ROUTERS:
        router.include_router(each)
    return router
