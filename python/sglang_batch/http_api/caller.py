"""Whose call it is: clients with keys of their own see only what is theirs."""

from __future__ import annotations

from fastapi import Request


def owner_of(request: Request) -> str:
    """The name of the caller's API key; empty where keys have no names."""
    owner: str = getattr(request.state, "offline_batch_owner", "")
    return owner
