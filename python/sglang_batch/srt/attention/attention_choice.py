"""Whether an engine reads shared prefixes once, and in front of which backend.

It does so if ``--attention-backend`` names our backend or the setting ``attention`` names
an implementation. With "auto" it does so wherever the model and the device are supported
and a trial run succeeds.
"""

from __future__ import annotations

import logging

import torch
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_parallel

from ...errors import ConfigError, EngineError
from ..compat.scheduler_types import AttentionBackend, ModelRunner
from ..compat.support import (
    ATTENTION_ARGUMENTS,
    ATTENTION_BACKEND,
    is_deterministic,
)

logger = logging.getLogger(__name__)

# Classes of SGLang's backends that can share. They prepare a step in
# ``init_forward_metadata`` or ``..._out_graph``, never in both.
CLASSES = (
    "FlashAttentionBackend", "FlashInferAttnBackend", "TritonAttnBackend",
    "TorchNativeAttnBackend",
)  # fmt: skip


def make_backend(model_runner: ModelRunner) -> AttentionBackend:
    """SGLang's factory for ``--attention-backend shared_prefix``.

    The result is the backend that SGLang itself would choose, made to share, or SGLang's
    Triton backend where that one cannot share.

    Raises:
        ConfigError: the kernels do not support the model's attention.
        EngineError: see :func:`.attention_backend.share`.
    """
    from sglang.srt.arg_groups.model_override_base import get_default_attn_backend
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    from .attention_backend import share
    from .attention_checks import check_model

    check_model(model_runner)
    name = get_default_attn_backend(
        model_runner.server_args, False, model_runner.model_config
    )
    names = ("fa3", "flashinfer", "torch_native")
    make = ATTENTION_BACKENDS[name if name in names else "triton"]
    backend: AttentionBackend = make(model_runner)
    share(backend, model_runner)
    return backend


def share_by_default(model_runner: ModelRunner) -> None:
    """Make the backend that SGLang has chosen share, if the settings allow it.

    Raises:
        ConfigError: the setting names an implementation that does not support the
            model, the backend or the machine.
        EngineError: the setting names an implementation whose kernels fail here.
    """
    server_args = model_runner.server_args
    wanted = server_args.offline_config.attention
    given = [getattr(server_args, name) for name in ATTENTION_ARGUMENTS]
    named = list(filter(None, given))
    if wanted == "stock" or ATTENTION_BACKEND in named:
        return
    automatic = wanted == "auto"
    found = _why_not(model_runner, named) if automatic else None
    found = found or _obstacle(model_runner)
    if found is not None and not automatic:
        raise ConfigError(
            f'attention="{wanted}" does not work with {found}; choose "stock".'
        )
    if found is not None:
        logger.info("Shared prefixes are not read once, because of %s.", found)
        return
    backend = model_runner.attn_backend
    kind = type(backend)
    why = "another rank cannot read shared prefixes once"
    from .attention_backend import share

    try:
        share(backend, model_runner)
        done = True
    except EngineError as error:
        if not automatic:
            raise
        done, why = False, str(error)
    # Ranks that capture different graphs would wait for one another forever.
    if automatic and not _by_all_ranks(done):
        backend.__class__ = kind
        logger.warning("Shared prefixes are not read once: %s", why)


def _by_all_ranks(done: bool) -> bool:
    """Whether ``done`` is true on all TP ranks."""
    parallel = get_parallel()
    if parallel.tp_size == 1:
        return done
    flag = torch.tensor(int(done))
    group = parallel.tp_group.cpu_group
    torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MIN, group)
    return bool(flag)


def _why_not(model_runner: ModelRunner, named: list[str]) -> str | None:
    """The reason why "auto" leaves attention to SGLang, apart from the model's layers."""
    if named:
        return f"the choice of {' and '.join(named)}"
    if is_deterministic(model_runner.server_args):
        return "deterministic inference"
    if model_runner.device != "cuda":
        return f"a {model_runner.device}, where attention is not bound by memory"
    from sgl_kernel_ext.shared_prefix_attention.configs import device_family

    if not model_runner.is_generation:
        return "a model that does not decode"
    if model_runner.server_args.enable_torch_compile:
        return "--enable-torch-compile"
    device = model_runner.req_to_token_pool.req_to_token.device
    if device_family(device) == "default":
        return "a device that the kernel has no settings for"
    return None


def _obstacle(model_runner: ModelRunner) -> str | None:
    """The backend or feature of the model that does not support sharing, if any."""
    from .attention_checks import model_obstacle

    kind = type(model_runner.attn_backend).__name__
    if kind not in CLASSES:
        return f"SGLang's {kind}"
    if not model_runner.spec_algorithm.is_none():
        return "drafts, which are verified and not decoded"
    if envs.SGLANG_ENABLE_METADATA_GLUE_GRAPH.get():
        return "SGLANG_ENABLE_METADATA_GLUE_GRAPH"
    return model_obstacle(model_runner)
