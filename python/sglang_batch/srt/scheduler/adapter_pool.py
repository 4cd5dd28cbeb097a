"""SGLang's pool of LoRA adapters: which of them make room for others."""

from __future__ import annotations

from collections.abc import Collection

from sglang.srt.lora.mem_pool import EMPTY_SLOT

from ..compat.scheduler_types import LoRAManager


def unload_others(manager: LoRAManager, needed: Collection[str | None]) -> None:
    """Unload an adapter that nobody needs if the pool is full and one is still to be loaded.

    SGLang would evict one that is not in the very next batch, and the model alone, which
    takes a slot, after all adapters.

    Args:
        needed: ids of the adapters that are or will be in use. None is the model alone.
    """
    pool = manager.memory_pool
    missing = sum(uid not in pool.uid_to_buffer_id for uid in needed)
    missing -= sum(uid is EMPTY_SLOT for uid in pool.buffer_id_to_uid)
    for uid in list(pool.uid_to_buffer_id):
        if missing <= 0:
            return
        if uid not in needed and not _is_pinned(manager, uid):
            pool.remove_lora(uid)
            missing -= 1


def _is_pinned(manager: LoRAManager, uid: str | None) -> bool:
    ref = manager.lora_refs.get(uid)
    return ref is not None and bool(ref.pinned)
