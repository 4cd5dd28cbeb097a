"""What a decode server sends to prefill servers over HTTP."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import msgspec
from sglang.srt.managers.io_struct import GenerateReqInput

from ... import request

CALL_PATH = "/offline_batch/prefill/call"
JOBS_PATH = "/offline_batch/prefill/jobs"

OPEN, PRIORITY, CLOSE, ALIVE = "open", "priority", "close", "alive"
# Seconds after which the jobs of a decode server that says nothing are closed, and a
# third of which it may be silent.
SILENCE_S = 60.0

# Fields of a message to the scheduler that bear on its prompt and first token, which
# SGLang's requests have as well.
_FIELDS = (
    *("return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob"),
    *("return_sampling_mask", "sampling_logprobs_mode", "return_hidden_states"),
    *("custom_logit_processor", "require_reasoning", "priority", "routing_key"),
    *("extra_key", "cache_salt", "lora_name"),
)
_RENAMED = {"lora_name": "lora_path"}
# Sampling parameters that bear on later tokens only, or that SGLang computes.
_LATER = frozenset(
    {
        *("stop", "stop_strs", "stop_str_max_len", "n", "stream_interval"),
        *("stop_regex", "stop_regex_strs", "stop_regex_max_len", "is_normalized"),
        *("no_stop_trim", "skip_special_tokens", "spaces_between_special_tokens"),
    }
)
# Fields whose values only the decode server has.
_NOT_SENT = {
    "mm_inputs": "prompts with images or sound",
    "input_embeds": "prompts that are embeddings",
    "positional_embed_overrides": "prompts with embeddings",
    "session_params": "sessions",
    "session_id": "sessions",
}


def authorization() -> dict[str, str]:
    """The HTTP headers of calls to prefill servers, with ``SGLANG_BATCH_API_KEY``."""
    return request.authorization(os.environ.get("SGLANG_BATCH_API_KEY"))


def room_after(room: int) -> int:
    """The room of a request that is computed again, the same on all ranks.

    Not its last one, which the prefill server may still have to clear.
    """
    return (room * 6364136223846793005 + 1) % (1 << 62) + 1


class PrefillCall(msgspec.Struct, frozen=True):
    """One request whose prompt a prefill server computes.

    rid: the decode server's id for it, which names its job.
    fields: the other fields of SGLang's request, by name.
    """

    rid: str
    input_ids: list[int]
    sampling_params: dict[str, Any]
    bootstrap_host: str
    bootstrap_port: int
    bootstrap_room: int
    fields: dict[str, Any]

    @classmethod
    def of(cls, rid: str, message: Any, address: tuple[str, int, int]) -> PrefillCall:
        """The call for a message to the decode server's scheduler.

        Args:
            address: bootstrap host, port and room.

        Raises:
            ValueError: it cannot be sent to another server.
        """
        for name, what in _NOT_SENT.items():
            if getattr(message, name, None) is not None:
                raise ValueError(f"This server's prefill servers take no {what}.")
        params = message.sampling_params
        if (params.beam_width or 1) > 1:
            raise ValueError("Beam search does not work with prefill servers.")
        wants_prompt = 0 <= message.logprob_start_len < len(message.input_ids)
        if message.return_hidden_states or (
            message.return_logprob and (wants_prompt or message.token_ids_logprob)
        ):
            raise ValueError(
                "Log probabilities of prompts or of chosen tokens, and hidden states, do "
                "not work with prefill servers: SGLang does not send them with the KV."
            )
        changed = {
            _RENAMED.get(name, name): value
            for name in _FIELDS
            if (value := getattr(message, name, None)) or name == "logprob_start_len"
        }
        if not message.return_sampling_mask:
            changed.pop("sampling_logprobs_mode", None)  # refused without it
        sampling = {
            each.name: value
            for each in msgspec.structs.fields(type(params))
            if each.name not in _LATER
            and (value := getattr(params, each.name)) != each.default
        }
        sampling["max_new_tokens"] = max(1, params.max_new_tokens or 1)
        return cls(rid, list(message.input_ids), sampling, *address, changed)

    @classmethod
    def again(cls, payload: Mapping[str, Any]) -> PrefillCall:
        """The call for a request that lost its KV, prompt and answer so far.

        payload: that of ``Req.build_rebootstrap_payload``, and the name of an adapter.
        """
        names = ("extra_key", "cache_salt", "routing_key", "lora_path")
        fields = {
            name: payload[name] for name in names if payload.get(name) is not None
        }
        rid = f"again.{payload['bootstrap_room']}"  # its own may be that of a line
        own = ("rid", "fields")
        given = {n: payload[n] for n in cls.__struct_fields__ if n not in own}
        return cls(rid=rid, fields=fields, **given)

    def request(self) -> GenerateReqInput:
        """SGLang's request, without an id."""
        values = msgspec.structs.asdict(self)
        del values["rid"]
        return GenerateReqInput(**values.pop("fields"), **values)


class JobCall(msgspec.Struct, frozen=True):
    """Opens, changes or closes a job, or only says that the decode server is there.

    sender: names the process of the decode server.
    plan: with ``open``, the job's plan, see :mod:`sglang_batch.fleet.plan_bytes`.
    """

    sender: str
    action: str
    job_id: str = ""
    plan: bytes = b""
    priority: int = 0
