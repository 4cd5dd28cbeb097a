"""Whether an engine reads shared prefixes once, and in front of which backend.

Three ways lead there: the backend's name in ``--attention-backend``; the setting
``attention`` with the name of an implementation; and the setting's "auto", with which
it is chosen wherever it is known to fit and works when it is tried out.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_parallel

from ..errors import ConfigError, EngineError
from .support import ATTENTION_ARGUMENTS, ATTENTION_BACKEND

logger = logging.getLogger(__name__)

# SGLang's backends that can be shared in, by the names of their classes. They make
# ready for a step in ``init_forward_metadata`` or ``..._out_graph``, never in both.
CLASSES = (
    "FlashAttentionBackend", "FlashInferAttnBackend", "TritonAttnBackend",
    "TorchNativeAttnBackend",
)  # fmt: skip


def make_backend(model_runner: Any) -> Any:
    """SGLang's factory for ``--attention-backend shared_prefix``.

    What SGLang itself would choose, made to share; SGLang's Triton backend where that
    is one that cannot be.

    Raises:
        ConfigError: the model's attention is of a kind that the kernels do not have.
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
    backend = ATTENTION_BACKENDS[name if name in names else "triton"](model_runner)
    share(backend, model_runner)
    return backend


def share_by_default(model_runner: Any) -> None:
    """Make the backend that SGLang has chosen share, if the settings have it so.

    Raises:
        ConfigError: the setting names an implementation, and model, backend or machine
            are such that it cannot be.
        EngineError: the same, and its kernels fail on this device.
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
        logger.info("Each request reads all of its prefix, because of %s.", found)
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
    # Ranks that capture different graphs would wait for one another for ever.
    if automatic and not _by_all_ranks(done):
        backend.__class__ = kind
        logger.warning("Each request reads all of its prefix: %s", why)


def _by_all_ranks(done: bool) -> bool:
    """Whether something was done by all TP ranks."""
    parallel = get_parallel()
    if parallel.tp_size == 1:
        return done
    flag = torch.tensor(int(done))
    group = parallel.tp_group.cpu_group
    torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MIN, group)
    return bool(flag)


def _why_not(model_runner: Any, named: list[str]) -> str | None:
    """Why "auto" leaves attention alone, whatever the model."""
    if named:
        return f"the choice of {' and '.join(named)}"
    if model_runner.device != "cuda":
        return f"a {model_runner.device}, where memory is not what attention waits for"
    from sgl_kernel_ext.shared_prefix_attention.configs import device_family

    if not model_runner.is_generation:
        return "a model that does not decode"
    if model_runner.server_args.enable_torch_compile:
        return "--enable-torch-compile"
    device = model_runner.req_to_token_pool.req_to_token.device
    if device_family(device) == "default":
        return "a device that the kernel has no settings for"
    return None


def _obstacle(model_runner: Any) -> str | None:
    """What sharing does not work with, of backend and model."""
    from .attention_checks import model_obstacle

    kind = type(model_runner.attn_backend).__name__
    if kind not in CLASSES:
        return f"SGLang's {kind}"
    if envs.SGLANG_ENABLE_METADATA_GLUE_GRAPH.get():
        return "SGLANG_ENABLE_METADATA_GLUE_GRAPH"
    return model_obstacle(model_runner)
