"""Hooks on SGLang: their targets, and how they leave engines without ``--offline-batch`` alone.

SGLang hooks a function for good, and for every engine of the process: a notebook may have an
offline engine and, before, after or at the same time, a stock one. So each hook of a process that
can have several engines is registered here, with the way to the arguments of the engine that
a call is for. Unless these are an offline engine's, SGLang's function runs as if there were
no hook.

A child process of SGLang belongs to one engine and needs no such question.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from ...errors import EngineError

ArgumentsOf: TypeAlias = Callable[..., object]
"""From the arguments of a hooked function, SGLang's server arguments of the engine that the
call is for. None if it is for none."""


def is_offline(server_args: object) -> bool:
    """Whether server arguments are those of an offline engine."""
    return bool(getattr(server_args, "offline_batch", False))


def register_offline(
    target: str, hook: Callable[..., Any], hook_type: HookType, arguments: ArgumentsOf
) -> None:
    """Register a hook on SGLang's function ``target`` for the calls of offline engines.

    arguments: one of the functions below.
    """
    HookRegistry.register(target, OfflineHook(hook, hook_type, arguments), hook_type)


@dataclass(eq=False)
class OfflineHook:
    """A hook as SGLang calls it, which passes calls of other engines on."""

    hook: Callable[..., Any]
    hook_type: HookType
    arguments: ArgumentsOf

    def __post_init__(self) -> None:
        self.__qualname__ = self.hook.__qualname__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # SGLang gives an AROUND hook the original first, and an AFTER hook the result.
        own = args if self.hook_type is HookType.BEFORE else args[1:]
        if is_offline(self.arguments(*own, **kwargs)):
            return self.hook(*args, **kwargs)
        if self.hook_type is HookType.AROUND:
            return args[0](*own, **kwargs)
        return None  # arguments or result stay as they are


# Where the arguments are ----------------------------------------------------------------


def first(server_args: object, *_args: object, **_kwargs: object) -> object:
    """Of a function that gets them first."""
    return server_args


def second(_cls: object, server_args: object, *_args: object, **_kw: object) -> object:
    """Of a class method that gets them first."""
    return server_args


def own(it: Any, *_args: object, **_kwargs: object) -> object:
    """Of a method of an object that has them: a tokenizer manager, an engine."""
    return it.server_args


def managers(it: Any, *_args: object, **_kwargs: object) -> object:
    """Of a method of an object that has a tokenizer manager."""
    return it.tokenizer_manager.server_args


# An attribute of a request on its way into an engine: the arguments of that engine.
_ENGINE = "_offline_batch_engine"


def requested(request: object, *_args: object, **_kwargs: object) -> object:
    """Of a method of a request, which :func:`enter` has named an engine for."""
    return vars(request).get(_ENGINE)


def enter(manager: Any, request: object, *_args: object, **_kwargs: object) -> None:
    """BEFORE hook on ``TokenizerManager.generate_request``: the request is for its engine."""
    vars(request)[_ENGINE] = manager.server_args


def leave(request: object) -> None:
    """Forget the engine again: a request may be copied, kept and sent to another one."""
    vars(request).pop(_ENGINE, None)


def served(*_args: object, **_kwargs: object) -> object:
    """Of a function that is called for the HTTP server of this process."""
    from sglang.srt.entrypoints import http_server

    state = http_server.get_global_state()
    return None if state is None else state.tokenizer_manager.server_args


def published(*_args: object, **_kwargs: object) -> object:
    """Of a function that is called while an engine of this process is being made."""
    from sglang.srt.runtime_context import get_server_args

    return get_server_args()


# Targets ------------------------------------------------------------------------------

_MANAGERS = "sglang.srt.managers"
_TOKENIZER_MANAGER = f"{_MANAGERS}.tokenizer_manager.TokenizerManager"
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_XGRAMMAR = "sglang.srt.constrained.xgrammar_backend.XGrammarGrammar"

FLAG_HOOKS = (
    "sglang.srt.server_args.ServerArgs.add_cli_args",
    "sglang.srt.server_args.ServerArgs.from_cli_args",
)
START_HOOK = "sglang.srt.entrypoints.http_server.launch_server"
SERVER_HOOK = "sglang.srt.entrypoints.http_server._setup_and_run_http_server"
ENGINE_DEATH_HOOK = (
    f"{_MANAGERS}.tokenizer_manager.SignalHandler.running_phase_sigquit_handler"
)
ROUTE_LABEL_HOOK = (
    "sglang.srt.observability.http_request_metrics._get_fastapi_request_path"
)
LAUNCH_HOOK = "sglang.srt.entrypoints.engine.Engine._launch_scheduler_processes"
SHUTDOWN_HOOK = "sglang.srt.entrypoints.engine.Engine.shutdown"
ENTER_HOOK = f"{_TOKENIZER_MANAGER}.generate_request"
REQUEST_HOOKS = (
    f"{_MANAGERS}.io_struct.GenerateReqInput.normalize_batch_and_arguments",
    f"{_MANAGERS}.io_struct.EmbeddingReqInput.normalize_batch_and_arguments",
)
MESSAGE_HOOK = f"{_TOKENIZER_MANAGER}._create_tokenized_object"
LIST_HOOK = f"{_TOKENIZER_MANAGER}._handle_batch_request"
SEND_HOOK = f"{_TOKENIZER_MANAGER}._send_one_request"
BATCH_SEND_HOOK = f"{_TOKENIZER_MANAGER}._send_batch_request"
ABORT_HOOK = f"{_TOKENIZER_MANAGER}.abort_request"
MODEL_CONFIG_HOOK = "sglang.srt.configs.model_config.ModelConfig.from_server_args"
FORWARD_HOOK = f"{_RUNNER}.forward"
LOAD_MODEL_HOOK = f"{_RUNNER}.load_model"
SCHEDULER_HOOK = f"{_MANAGERS}.scheduler.Scheduler"
PENALTY_HOOK = (
    f"{_MANAGERS}.schedule_batch.ScheduleBatch.cumulate_penalty_output_tokens"
)
TRIM_HOOK = f"{_MANAGERS}.detokenizer_manager.DetokenizerManager.trim_matched_stop"
GRAMMAR_HOOK = f"{_XGRAMMAR}.fill_vocab_mask"
GRAMMAR_COMPILER_HOOK = f"{_XGRAMMAR}Backend.__init__"
_RESULTS = (
    f"{_MANAGERS}.scheduler_components.batch_result_processor"
    ".SchedulerBatchResultProcessor.process_batch_result_"
)
RESULT_HOOKS = (f"{_RESULTS}prefill", f"{_RESULTS}decode")
GRAPH_VARIANTS_HOOK = (
    "sglang.srt.model_executor.runner.decode_cuda_graph_runner"
    ".create_dsv41_candidate_graph_variants"
)
DP_CONTROLLER_HOOK = (
    f"{_MANAGERS}.data_parallel_controller.DataParallelController.event_loop"
)
# The enumeration of SGLang's transfer backends, and where it finds their classes.
TRANSFER_BACKENDS_HOOK = "sglang.srt.disaggregation.utils.TransferBackend"
KV_CLASS_HOOK = "sglang.srt.disaggregation.utils.get_kv_class"
# In a decode server that follows plans, its queues.
PREALLOC_QUEUE_HOOK = "sglang.srt.disaggregation.decode.DecodePreallocQueue"
TRANSFER_QUEUE_HOOK = "sglang.srt.disaggregation.decode.DecodeTransferQueue"


def check_hooks_took() -> None:
    """Check that SGLang applied our hooks of this process, since it continues without those
    that fail.

    Raises:
        EngineError: names the first target without its hook.
    """
    for target, registered in HookRegistry._hooks.items():
        ours = any(
            hook.__module__.startswith("sglang_batch.") for _, hook, _ in registered
        )
        if ours and target not in HookRegistry._patched:
            raise EngineError(
                f"--offline-batch: the hook on {target} did not take effect; "
                "see the log above for SGLang's reason, or remove the flag."
            )
