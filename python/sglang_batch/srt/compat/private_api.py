"""The supported SGLang release, and the parts of its private API that we use.

The table has each method that we override or call, and its parameters. The next release, or
another plugin, may change them. :func:`check_private_api` compares the installed SGLang with
:data:`PRIVATE_API` before the server starts, so that a difference becomes an error message
and not a wrong batch hours later. It is also the code to read when a new release comes out.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Mapping
from typing import Any

from sglang.version import __version__ as installed_version

from ... import __version__
from ...errors import UnsupportedSGLang
from .support import STOCK_SCHEDULER

# The SGLang release that this package extends.
SUPPORTED_VERSION = "0.5.23"

# Stand for the parameters of a property, and of a field of a class with slots.
PROPERTY = "(property)"
ATTRIBUTE = "(attribute)"
# Without its type and default, a parameter prints as its stars and name.
PLAIN: Any = {"annotation": inspect.Parameter.empty, "default": inspect.Parameter.empty}

# A module or class in each line that is not indented. Below it each name in it, with its
# parameters as in the "def" line, without "self", types and defaults, and our use of it.
_PRIVATE_API = """
sglang.srt.lora.lora_manager:LoRAManager
    validate_lora_batch(lora_ids): which adapters fit at a time
sglang.srt.lora.mem_pool:LoRAMemoryPool
    remove_lora(uid): makes room for an adapter
# Overridden by OfflineScheduler, down to pause_generation. The rest is called.
sglang.srt.managers.scheduler:Scheduler
    init_schedule_policy(): sets the policy that keeps the plan's order
    get_prefill_adder_class(): admission without a guess of output lengths
    get_output_streamer_class(): skips requests of which nothing is sent
    init_batch_result_processor(): does less for requests that continue
    init_request_dispatcher(): control messages of jobs
    _create_generation_req(recv_req, *args, **kwargs): stop rules
    init_load_inquirer(): makes our parts; load reports count the backlog
    init_all_attention_backends(): attention that shares prefixes
    get_init_info(): logs that this scheduler is ours
    get_internal_state(recv_req): settings and counters in /server_info
    get_next_batch_to_run(running_batch, last_batch): begin and end of a step
    get_new_batch_prefill(running_batch): the requests that join the step
    update_running_batch(batch): a decode step that no request leaves
    _reqs_finishing_inflight(batch): requests that end in the running step
    run_batch(batch, pp_proxy_tensors): launches a step
    on_idle(): publishes the step records
    init_model_worker(): leaves room for drafts
    maybe_sleep_on_idle(): waits for messages, where SGLang would
    _record_scheduler_state_for_paused_engine(): a paused engine waits too
    flush_cache(empty_cache): empties the tree when nothing runs or waits
    _add_request_to_queue(req, is_retracted): requests of jobs join the backlog
    is_fully_idle(for_health_check, ignore_waiting): counts the backlog
    abort_request(recv_req): also aborts requests in the backlog
    pause_generation(recv_req): a retraction also recomputes offloaded requests
    process_batch_result(batch, result): results held back by overlap
    get_num_allocatable_reqs(running_bs, beam_width, running_batch, num_held_rows):
        rows that are free
    record_weight_version_change(new_version): also notes it for requests in the
        backlog
    send_abort_output(abort_req, req): the answer of an aborted request
    _release_aborted_request(req): frees what an aborted request holds
    _build_hisparse_decode_batch(reqs): SGLang's model of a resumed batch
    # Overridden or called by PrefillScheduler.
    get_next_disagg_prefill_batch_to_run(running_batch, last_batch,
        should_retry_storage_prefetch): begin and end of a step of a prefill server
    resolve_waiting_queue_bootstrap(): requests given up by their decode rank
    maybe_send_cached_prefix_chunk(req, allow_send): not on a CPU
    handle_bootstrap_failure(req): answers such a request
    release_aborted_prefill_waiting_req(req): frees an aborted request
    # Overridden by DecodeScheduler.
    init_disaggregation(): checks that the queues are ours
    process_decode_queue(): requests whose KV has come
    get_next_disagg_decode_batch_to_run(running_batch): begin and end of a step of a
        decode server
# Queues of a decode server.
sglang.srt.disaggregation.decode:DecodePreallocQueue
    add(req, is_retracted, is_rebootstrap): asks for a request's KV
    hold_rebootstrap(req): asks for it after a pause
    pop_preallocated(rids_to_check, pp_good_rids, pp_bad_rids): reserves room on the
        host
    _resolve_pending_reqs(): which prefill rank computes a prompt
    _update_handshake_waiters(rids_to_check, pp_good_rids, pp_bad_rids): prefill ranks
        that know a request
    _send_kv_metadata(decode_req, kv_indices, page_size, state_indices,
        **metadata_kwargs): tells the prefill rank where KV goes
    _transfer_page_indices(decode_req, kv_indices, page_size): pages of the host
        instead of slots
    _rebootstrap_prefill_len(req): tokens whose KV comes
    _check_if_req_exceed_kv_capacity(req): prompts that never fit
    _submit_prefill_recompute(decode_req): computes a prompt again with its adapter
sglang.srt.disaggregation.decode:DecodeTransferQueue
    _release_request(decode_req): frees room on the host
# The base classes of the transfer backend.
sglang.srt.disaggregation.common.conn:CommonKVManager
    update_status(bootstrap_room, status): counts failures
    try_ensure_parallel_info(bootstrap_addr): refuses one server, not all
    _handle_node_failure(failed_bootstrap_addr): a connection was lost
    apply_prefill_status(*, bootstrap_room, status, prefill_rank, failure_reason): the
        end of a transfer
    conclude_failure(*, bootstrap_room, failure_reason, targets): tells the decode
        rank
    _run_prefill_recompute(kv_receiver, prefill_url, payload): KV that was lost on the
        decode side
    _get_prefill_recompute_session(): its HTTP session
    _fail_prefill_recompute(kv_receiver, reason): its failure
    _make_worker_recv(socket, timeout_ms): control messages
    _start_heartbeat_checker_thread(): prefill servers that hang
sglang.srt.disaggregation.common.conn:CommonKVSender
    __init__(mgr, bootstrap_addr, bootstrap_room, req_has_disagg_prefill_dp_rank): the
        prefill side of a request
    clear(): forgets it
    abort(): tells the decode rank
sglang.srt.disaggregation.common.conn:CommonKVReceiver
    init(prefill_dp_rank): refuses servers that do not fit
    _register_kv_args(): tells the prefill rank where we listen
    _send_bootstrap_message(*, bootstrap_info, message, operation): control messages
    send_metadata(kv_indices, aux_index, state_indices, decode_prefix_len,
        destination, device_kv_indices): where the KV goes
    clear(): writes no more
    abort(): writes no more
sglang.srt.disaggregation.utils
    get_kv_class(transfer_backend, class_type): finds our backend
sglang.srt.managers.scheduler_components.output_sender:SenderWrapper
    send_output(output, recv_obj): reports of requests that joined
sglang.srt.managers.scheduler_components.new_token_ratio_tracker:NewTokenRatioTracker
    decay_step(): called by SGLang in every decode step with room
sglang.srt.beam_search.coordinator:BeamCoordinator
    _num_live_groups (attribute): beams have further rows
sglang.srt.managers.scheduler_components.output_streamer:SchedulerOutputStreamer
    _stream_output_generation(reqs, return_logprob, skip_req, is_idle_batch): gets
        only requests of which something is sent
    stream_output(reqs, return_logprob, skip_req): all tokens of an aborted request
        that waits to resume
sglang.srt.managers.scheduler_components.batch_result_processor:SchedulerBatchResultProcessor
    _handle_finish_state_updated_req(req, batch, result, i, logits_output): is skipped
        for requests that continue
sglang.srt.utils.weight_versions
    record_weight_version_events(reqs, old_version): for the backlog
sglang.srt.managers.scheduler
    NextBatchPlan(batch_to_run, running_batch): the result of a step's choice
    _make_abort_req(req, finished_reason): the answer to an abort
sglang.srt.managers.schedule_policy:PrefillAdder
    __init__(page_size, tree_cache, token_to_kv_pool_allocator, running_batch,
        new_token_ratio, rem_input_tokens, rem_chunk_tokens, num_mixed_decode_tokens,
        priority_scheduling_preemption_threshold, max_prefill_bs,
        max_running_requests, prefill_max_requests, prefill_delayer_single_pass,
        dllm_config, waiting_queue_len, prefill_tile_block_m): called by SGLang in
        each step; ours inherits it
    add_one_req(req, has_chunked_req, truncation_align_size): admits a request,
        through those below
    _get_running_request_total_token_offset(req): SGLang's guess of the KV a running
        request will take; 0 in ours
    _swa_new_tokens(req): answer tokens that need room in the pool of windows; 0 in
        ours
    _check_prefill_budget(req, *, extend_input_len, total_tokens, swa_host_hit_length,
        chunk_limit): requires room for the step's tokens, not for the answer
    _update_prefill_budget(prefix_len, extend_input_len, max_new_tokens,
        retracted_stain, mamba_gap_reserve, request_slot_reserve,
        is_chunked_continuation, replay_len): charges the step's tokens, not the
        answer
    add_chunked_req(req): ours ends the chunk where a state is kept
    _select_prefill_admission(req, *, total_tokens, host_hit_length,
        swa_host_hit_length, truncation_align_size, has_chunked_req): cuts a prompt
        where a state is kept, and keeps a second from being cut
sglang.srt.mem_cache.prefill_budget:PrefillBudget
    check_prefill(*, extend_input_len, total_tokens, max_new_tokens, input_tokens,
        swa_host_hit_length, chunk_limit, auxiliary_swa_host_hit_length): called by
        the adder's check
    reserve(extend_input_len, max_new_tokens, *, extra_tokens, chunk_limit,
        is_chunked_continuation): called by the adder's charge
    remaining_total (property): KV tokens left to the step
sglang.srt.managers.schedule_policy:SchedulePolicy
    calc_priority(waiting_queue, running_batch, processed_tokens): sorts the waiting
        queue; ours leaves the plan's order
    shortest_prefill_chunk_limit(chunked_req, waiting_queue, budget, page_size):
        limits the tokens of the prompt in progress in a step
sglang.srt.mem_cache.registry
    get_radix_cache_factory(name): whether our cache is registered
    register_radix_cache_backend(name, factory): our cache, by its name
    create_unified_radix_cache(ctx, *, cache_class): makes our cache
# The first five are overridden by PlannedRadixCache, the others called.
sglang.srt.mem_cache.unified_radix_cache:UnifiedRadixCache
    evict(params): unpins first, in the plan's order
    evict_for_alloc(params, *, allocation_reclaim_satisfied): the same, when an
        allocation needs room
    checkpoint(req, *, up_to, **kwargs): a leader's prefixes end where their followers
        need it
    on_release(req, *, checkpointed): a request gives its KV back
    reset(): the tree is emptied: pins are forgotten
    lock(node_id, skip_lock_components): pins a prefix that is needed again
    unlock(lock): unpins it
    match_prefix(params): finds a prefix in the tree
    evictable_size(): KV tokens that can be freed
    full_evictable_size(): of layers that keep all KV
    swa_evictable_size(): of sliding-window layers
    supports_swa(): whether there are such layers
    path_device_indices(node): slots of a prefix, for a resumed request
sglang.srt.mem_cache.rust_tree_core.adapter:RustUnifiedTreeCore
    match_full_device_prefix(key): the same without touching the tree
sglang.srt.mem_cache.common
    checkpoint_kv_cache(req, tree_cache): puts a computed prompt into the tree early
    release_kv_cache(req, tree_cache, *, checkpoint): frees an offloaded request
    evict_from_tree_cache(tree_cache, num_tokens): makes room to resume
    _req_radix_key(tree_cache, req, token_ids, max_prefix_len): a prefix as the tree's
        key
sglang.srt.model_executor.runner.decode_cuda_graph_runner
    create_dsv41_candidate_graph_variants(model_runner, capture_forward_mode,
        captured_req_width): hooked: two CUDA graphs for each size of a decode batch
sglang.srt.model_executor.runner_utils.capture_mode
    get_capture_attention_variant(): which of the two is captured
sglang.srt.arg_groups.model_override_base
    get_default_attn_backend(server_args, use_mla_backend, model_config): the backend
        that shared_prefix stands in front of
# Overridden by SharedPrefixMixin, in a subclass of the backend that SGLang chooses.
sglang.srt.layers.attention.base_attn_backend:AttentionBackend
    init_forward_metadata(forward_batch): the plan of a step
    init_forward_metadata_out_graph(forward_batch, in_capture): the same for a
        captured CUDA graph
    shared_read_ends(fm): rows are read in every layer
    forward_decode(q, k, v, layer, forward_batch, save_kv_cache, **kwargs): a decode
        step
    forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs): a step
        that mixes prompts and decodes
sglang.srt.managers.schedule_batch:ScheduleBatch
    init_new(reqs, req_to_token_pool, token_to_kv_pool_allocator, tree_cache,
        model_config, enable_overlap, spec_algorithm, chunked_req, dllm_config): a
        decode batch of resumed requests
    filter_batch(reqs_to_exclude, keep_indices): takes requests out
    merge_batch(other): puts resumed requests in
    prepare_for_decode(): a decode step that no request leaves
    mix_with_running(running_batch): decodes in steps with prompts, where SGLang
        leaves them out
    cumulate_penalty_output_tokens(): hooked: which token a request counts for its
        penalties
    check_decode_mem(selected_indices): whether the next step has room
    retract_decode(): SGLang's last resort, where offloading is not enough
sglang.srt.managers.schedule_batch:Req
    reset_for_retract(): for an offloaded request that cannot resume
    finished(): whether a request is done
    update_finish_state(new_accepted_len): stop rules, after each step
    set_finish_with_abort(error_msg, status_code, err_type): stop rules that cannot be
        checked
sglang.srt.managers.detokenizer_manager:DetokenizerManager
    trim_matched_stop(output, finished_reason, no_stop_trim): text behind the end that
        a stop rule found
sglang.srt.sampling.sampling_batch_info:SamplingBatchInfo
    from_schedule_batch(batch, vocab_size): sampling of a resumed batch
sglang.srt.sampling.watermarking.core
    _watermark_hash32_torch(keys, context_hashes, token_ids): random numbers on a CPU
sglang.srt.mem_cache.allocator:TokenToKVPoolAllocator
    alloc(need_size): slots to resume into
sglang.srt.mem_cache.host_memory
    available_host_memory_bytes(*, allow_cgroup_fallback): the default size of the
        host pool
sglang.srt.mem_cache.memory_pool:ReqToTokenPool
    alloc(reqs): a row for a resumed request
    write(indices, values): fills it
sglang.srt.managers.overlap_utils:FutureMap
    stash(future_indices, payload): the next input token of a resumed request
sglang.srt.managers.communicator:FanOutCommunicator
    __init__(send, fan_out, mode): the channel of control messages
    handle_recv(recv_obj): their answers
# Mixed steps that are split.
sglang.srt.model_executor.model_runner:ModelRunner
    forward(forward_batch, skip_attn_backend_init, pp_proxy_tensors,
        reinit_attn_backend, split_forward_count): splits a mixed batch, and runs its
        decodes
    _get_attention_backend(init_new_workspace): a backend for prompts
    _extend_forward_kwargs(forward_batch, pp_proxy_tensors): options of the model for
        prompts
    _pp_kwargs(pp_proxy_tensors): options of the model for decodes
sglang.srt.model_executor.forward_context
    forward_context(ctx, *, forward_batch): shows the model that backend
sglang.srt.layers.attention.hybrid_attn_backend:HybridAttnBackend
    __init__(model_runner, prefill_backend, decode_backend): two backends in one, on a
        CPU
sglang.srt.mem_cache.kv_index_translator:KVIndexTranslator
    own_plan(forward_batch, *, runner_slots): KV slots of a half
sglang.srt.managers.io_struct
    hook_custom_types(*new_types): makes our messages known
sglang.srt.managers.tokenizer_manager:TokenizerManager
    _dispatch_to_scheduler(obj): sends them
    generate_request(obj, request): holds a request until it may be sent
    _handle_batch_request(obj, request, request_states): plans a call with several
        prompts as a job
    _should_use_batch_tokenization(batch_size, requests): as SGLang does
    _batch_tokenize_and_process(batch_size, obj): messages of all prompts
    _tokenize_one_request(obj): the message of one prompt
    _send_one_request(tokenized_obj): sends a message when its turn comes
    _wait_one_response(obj, request): SGLang's answers to one prompt
    _collect_batch_responses(generators): all answers, in input order
    _stream_batch_responses(generators, rids): answers as they come
    _init_req_state(obj, request): the state of a further sample
    _mark_state_dispatched(rid): tells when the scheduler has a request
    _handle_abort_req(recv_obj): ends a request that was not sent yet
    abort_request(rid, abort_all): requests that were not sent yet
    _create_tokenized_object(obj, input_text, input_ids, input_embeds, mm_inputs,
        token_type_ids): the last check of a request
sglang.srt.managers.io_struct:GenerateReqInput
    normalize_batch_and_arguments(): the first check of a request
sglang.srt.managers.io_struct:EmbeddingReqInput
    normalize_batch_and_arguments(): the first check of a request
"""


_ENTRY = re.compile(r" {4}(\w+)(?: (\(\w+\))|\((.*)\)): (.+)")


def _read(table: str) -> dict[str, dict[str, tuple[str, str]]]:
    api: dict[str, dict[str, tuple[str, str]]] = {}
    text = re.sub(r"\n {8}", " ", re.sub(r"(?m)^ *#.*\n", "", table)).strip()
    for line in text.split("\n"):
        if not line.startswith(" "):
            place = line
            api[place] = {}
        elif entry := _ENTRY.fullmatch(line):
            name, kind, expected, use = entry.groups()
            api[place][name] = kind or expected, use
        else:
            raise ValueError(f"not an entry of the private API: {line}")
    return api


PRIVATE_API = _read(_PRIVATE_API)


def check_private_api(
    api: Mapping[str, Mapping[str, tuple[str, str]]] = PRIVATE_API,
) -> None:
    """Compare :data:`PRIVATE_API` with the installed SGLang.

    It takes milliseconds where SGLang's scheduler is imported, and ten seconds elsewhere.

    Raises:
        UnsupportedSGLang: names the first method that is missing or has other
            parameters, the expected ones and those found.
    """
    for place, names in api.items():
        module, _, owner = place.partition(":")
        try:
            holder: Any = importlib.import_module(module)
            holder = getattr(holder, owner) if owner else holder
        except (ImportError, AttributeError):
            raise _unsupported(place.replace(":", "."), "to exist", "nothing") from None
        for name, (expected, _use) in names.items():
            found = parameters(inspect.getattr_static(holder, name, None))
            if found != expected:
                path = f"{owner or module}.{name}"
                raise _unsupported(path, f"({expected})", f"({found})")


def check_version() -> None:
    """Raise :class:`UnsupportedSGLang` unless the supported release is installed."""
    if installed_version != SUPPORTED_VERSION:
        raise UnsupportedSGLang(
            f"--offline-batch: sglang-batch {__version__} extends sglang "
            f"{SUPPORTED_VERSION}, but sglang {installed_version} is installed; "
            f"run `pip install sglang=={SUPPORTED_VERSION}` or remove the flag."
        )


def parameters(target: Any) -> str:
    """The parameters of a function as in the table. ``PROPERTY`` for a property,
    ``ATTRIBUTE`` for a field, and "missing" for anything else that cannot be called."""
    if isinstance(target, property):
        return PROPERTY
    if inspect.ismemberdescriptor(target):
        return ATTRIBUTE
    if isinstance(target, staticmethod | classmethod):
        target = target.__func__
    if not callable(target):
        return "missing"
    names: list[str] = []
    keyword_only = False
    for parameter in inspect.signature(target).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            names.append("*")
        keyword_only |= parameter.kind in (
            parameter.KEYWORD_ONLY,
            parameter.VAR_POSITIONAL,
        )
        names.append(str(parameter.replace(**PLAIN)))
    return ", ".join(names[1:] if names[:1] in (["self"], ["cls"]) else names)


def _unsupported(path: str, expected: str, found: str) -> UnsupportedSGLang:
    return UnsupportedSGLang(
        f"--offline-batch: sglang-batch {__version__} expects {path} {expected} and "
        f"found {found} in the installed sglang {installed_version}; run "
        f"`pip install sglang=={SUPPORTED_VERSION}` without other plugins that change "
        f"it, or give {STOCK_SCHEDULER}."
    )
