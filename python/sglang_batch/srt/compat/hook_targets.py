"""Paths of the SGLang functions and classes that are hooked, and the check that they are."""

from __future__ import annotations

from ...errors import EngineError

FLAG_HOOKS = (
    "sglang.srt.server_args.ServerArgs.add_cli_args",
    "sglang.srt.server_args.ServerArgs.from_cli_args",
)
SERVER_HOOK = "sglang.srt.entrypoints.http_server._setup_and_run_http_server"
ENGINE_DEATH_HOOK = (
    "sglang.srt.managers.tokenizer_manager.SignalHandler.running_phase_sigquit_handler"
)
ROUTE_LABEL_HOOK = (
    "sglang.srt.observability.http_request_metrics._get_fastapi_request_path"
)
LAUNCH_HOOK = "sglang.srt.entrypoints.engine.Engine._launch_scheduler_processes"
SHUTDOWN_HOOK = "sglang.srt.entrypoints.engine.Engine.shutdown"
ENTER_HOOK = "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request"
REQUEST_HOOKS = (
    "sglang.srt.managers.io_struct.GenerateReqInput.normalize_batch_and_arguments",
    "sglang.srt.managers.io_struct.EmbeddingReqInput.normalize_batch_and_arguments",
)
MESSAGE_HOOK = (
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._create_tokenized_object"
)
LIST_HOOK = (
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._handle_batch_request"
)
SEND_HOOK = "sglang.srt.managers.tokenizer_manager.TokenizerManager._send_one_request"
BATCH_SEND_HOOK = (
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._send_batch_request"
)
ABORT_HOOK = "sglang.srt.managers.tokenizer_manager.TokenizerManager.abort_request"
MODEL_CONFIG_HOOK = "sglang.srt.configs.model_config.ModelConfig.from_server_args"
FORWARD_HOOK = "sglang.srt.model_executor.model_runner.ModelRunner.forward"
LOAD_MODEL_HOOK = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
SCHEDULER_HOOK = "sglang.srt.managers.scheduler.Scheduler"
PENALTY_HOOK = (
    "sglang.srt.managers.schedule_batch.ScheduleBatch.cumulate_penalty_output_tokens"
)
TRIM_HOOK = (
    "sglang.srt.managers.detokenizer_manager.DetokenizerManager.trim_matched_stop"
)
GRAMMAR_HOOK = "sglang.srt.constrained.xgrammar_backend.XGrammarGrammar.fill_vocab_mask"
GRAMMAR_COMPILER_HOOK = (
    "sglang.srt.constrained.xgrammar_backend.XGrammarGrammarBackend.__init__"
)
_RESULTS = (
    "sglang.srt.managers.scheduler_components.batch_result_processor"
    ".SchedulerBatchResultProcessor.process_batch_result_"
)
RESULT_HOOKS = (f"{_RESULTS}prefill", f"{_RESULTS}decode")
GRAPH_VARIANTS_HOOK = (
    "sglang.srt.model_executor.runner.decode_cuda_graph_runner"
    ".create_dsv41_candidate_graph_variants"
)
DP_CONTROLLER_HOOK = (
    "sglang.srt.managers.data_parallel_controller.DataParallelController.event_loop"
)
# The enumeration of SGLang's transfer backends, and where it finds their classes.
TRANSFER_BACKENDS_HOOK = "sglang.srt.disaggregation.utils.TransferBackend"
KV_CLASS_HOOK = "sglang.srt.disaggregation.utils.get_kv_class"
# In a decode server that follows plans, its queues.
PREALLOC_QUEUE_HOOK = "sglang.srt.disaggregation.decode.DecodePreallocQueue"
TRANSFER_QUEUE_HOOK = "sglang.srt.disaggregation.decode.DecodeTransferQueue"

# In the processes that answer HTTP.
HTTP_HOOKS = (
    ENGINE_DEATH_HOOK,
    ROUTE_LABEL_HOOK,
    ENTER_HOOK,
    *REQUEST_HOOKS,
    MESSAGE_HOOK,
    LIST_HOOK,
    SEND_HOOK,
    BATCH_SEND_HOOK,
    ABORT_HOOK,
)
MAIN_PROCESS_HOOKS = (
    *FLAG_HOOKS,
    SERVER_HOOK,
    *HTTP_HOOKS,
    MODEL_CONFIG_HOOK,
    LAUNCH_HOOK,
    SHUTDOWN_HOOK,
    TRANSFER_BACKENDS_HOOK,
    KV_CLASS_HOOK,
)
SCHEDULER_PROCESS_HOOKS = (
    SCHEDULER_HOOK,
    GRAMMAR_HOOK,
    GRAMMAR_COMPILER_HOOK,
    *RESULT_HOOKS,
    GRAPH_VARIANTS_HOOK,
    FORWARD_HOOK,
    TRANSFER_BACKENDS_HOOK,
    KV_CLASS_HOOK,
)


def check_hooks_took(targets: tuple[str, ...]) -> None:
    """Check that SGLang applied the hooks on ``targets``.

    SGLang logs a hook that fails to apply and continues without it. A server that
    looks like an offline one and is not would be worse than none.

    Raises:
        EngineError: names the first target without its hook.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    for target in targets:
        if target not in HookRegistry._patched:
            raise EngineError(
                f"--offline-batch: the hook on {target} did not take effect; "
                "see the log above for SGLang's reason, or remove the flag."
            )
