"""The server's HTTP API beside SGLang's own.

Thin: parameters in, :class:`~sglang_batch.service.BatchService`, objects out.
"""

from __future__ import annotations

from fastapi import APIRouter

from . import batches, files, waves

ROUTERS = (files.router, batches.router, waves.router)


def make_router() -> APIRouter:
    """All our routes."""
    router = APIRouter()
    for each in ROUTERS:
        router.include_router(each)
    return router
