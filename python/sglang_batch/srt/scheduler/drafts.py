"""Drafts where few requests run, in place of SGLang's in every step, and tokens as without drafts.

While a step takes as long as reading the weights, verifying a few tokens per request costs next
to nothing. Where many run it costs as much as that many more. Other steps decode one token each.
A draft model, which has to compute all tokens, drafts in each step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative import eagle_utils, eagle_worker_common, ngram_worker
from sglang.srt.speculative.ngram_info import NgramVerifyInput

from ..compat.scheduler_types import ScheduleBatch


def change_drafts(scheduler: Any) -> None:
    """Change the worker of a scheduler that has just been made. Its jobs are made later."""
    worker = scheduler.draft_worker
    if scheduler.spec_algorithm.is_ngram():
        worker.__class__ = DraftsWhereFewRun
        worker.most_requests = partial(_most_requests, scheduler)
        worker.unseen = {}
    sample = partial(_sample, worker.target_worker.model_runner.sampler)
    ngram_worker.eagle_sample = eagle_worker_common.eagle_sample = sample


def _most_requests(scheduler: Any) -> float:
    if (setting := scheduler.server_args.offline_config.draft_requests) is not None:
        return float(setting)
    # Jobs have the costs of one engine. Without a job, steps draft as SGLang's do.
    width = scheduler.draft_worker.draft_token_num
    light = (job.plan.cost.light_tokens // width for job in scheduler.jobs.open.each)
    return min(light, default=math.inf)


class DraftsWhereFewRun(ngram_worker.NGRAMWorker):  # type: ignore[misc]
    """SGLang's worker, whose corpus also has the answers of steps without drafts.

    most_requests: running requests for which a step drafts at most.
    unseen: by id, requests that decode without drafts, and how many tokens of their answers
        the corpus has.
    """

    most_requests: Callable[[], float]
    unseen: dict[str, tuple[Any, int]]

    def forward_batch_generation(
        self, batch: ScheduleBatch, on_publish: Any = None, pp_proxy_tensors: Any = None
    ) -> Any:
        drafts = len(batch.reqs) <= self.most_requests() and _verified_as_sampled(batch)
        if batch.forward_mode.is_decode():
            self._add_to_corpus(batch.reqs, drafts=drafts)
            if not drafts:
                return self._decode_one_each(batch, on_publish)
        return super().forward_batch_generation(batch, on_publish, pp_proxy_tensors)

    def _prepare_draft_tokens(self, batch: ScheduleBatch) -> tuple[Any, Any]:
        drafts, seen = super()._prepare_draft_tokens(batch)
        if get_spec().speculative_eagle_topk == 1:
            return _in_a_row(drafts, seen, self.draft_token_num)
        return drafts, seen

    def _add_to_corpus(self, reqs: list[Any], *, drafts: bool) -> None:
        """Add answers that have ended, or before drafts all that the corpus lacks."""
        running = {} if drafts else {req.rid: req for req in reqs}
        depth, texts = self.max_trie_depth, []
        for rid in [rid for rid in self.unseen if rid not in running]:
            req, seen = self.unseen.pop(rid)
            text = [*req.origin_input_ids_unpadded[-depth:], *req.output_ids]
            texts.append(text[max(0, seen - depth) :])
        if texts:
            self.ngram_corpus.batch_put(texts)
        for rid, req in running.items():
            self.unseen.setdefault(rid, (req, len(req.output_ids)))

    def clear_cache_pool(self) -> None:
        super().clear_cache_pool()
        self.unseen.clear()

    def _decode_one_each(self, batch: Any, on_publish: Any) -> Any:
        """A step without drafts. SGLang restores the batch afterwards."""
        width, before = self.draft_token_num, batch.spec_info
        tokens = before.accept_tokens.view(-1, width).long()
        last = before.accept_lens.long().unsqueeze(1) - 1
        batch.input_ids = tokens.gather(1, last).flatten()
        rows = batch.req_to_token_pool.req_to_token
        batch.out_cache_loc = rows[batch.req_pool_indices, batch.seq_lens].long()
        batch.seq_lens = batch.seq_lens + 1
        if batch.seq_lens_cpu is not None:
            batch.seq_lens_cpu = batch.seq_lens_cpu + 1
        batch.seq_lens_sum = batch.spec_info = None
        result = self.target_worker.forward_batch_generation(batch)
        if on_publish is not None:
            on_publish(batch.seq_lens)
        # SGLang reads results as those of drafts of one token.
        if batch.return_logprob:
            output = result.logits_output
            output.next_token_logprobs = output.next_token_logprobs.unsqueeze(1)
        padded = torch.zeros_like(tokens, dtype=torch.int32)
        padded[:, 0] = result.next_token_ids
        result.accept_lens = torch.ones_like(before.accept_lens)
        result.speculative_num_draft_tokens = 1
        result.new_seq_lens = batch.seq_lens
        result.next_draft_input = NgramVerifyInput(
            draft_token_num=width,
            new_seq_lens=batch.seq_lens,
            accept_tokens=padded.flatten(),
            accept_lens=result.accept_lens,
        )
        return result


def _in_a_row(drafts: Any, seen: Any, width: int) -> tuple[Any, Any]:
    """The longest branch of each request, followed by its other drafts.

    Where one branch is asked for, SGLang's trees have more: continuations of texts that share
    fewer of the last tokens, and zeros that fill the width.

    drafts: int64 ``[requests * width]``.
    seen: int64 ``[requests * width * width]``, whether a draft sees another.
    """
    tokens, trees = drafts.reshape(-1, width), seen.reshape(-1, width, width)
    longest = trees[np.arange(len(trees)), trees.sum(2).argmax(1)]
    order = np.argsort(-longest, axis=1, kind="stable")
    row = np.tri(width, dtype=seen.dtype).ravel()
    return np.take_along_axis(tokens, order, 1).ravel(), np.tile(row, len(trees))


def _verified_as_sampled(batch: ScheduleBatch) -> bool:
    """Whether SGLang samples tokens of a draft by all rules of a single token. It counts one
    token per step for penalties, and knows no ``min_p`` and no processors."""
    info = batch.sampling_info
    penalties = (info.acc_additive_penalties, info.acc_scaling_penalties)
    others = info.need_min_p_sampling or info.has_custom_logit_processor
    return penalties == (None, None) and not others


_PER_ROW = ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed")


def _sample(
    sampler: Callable[..., torch.Tensor], drafted: Any, batch: ScheduleBatch,
    logits_output: Any, grammar_mask: Any = None, **more: Any,
) -> Any:  # fmt: skip
    """SGLang's ``eagle_sample``, except that tokens with a seed are those without drafts, and
    that no draft is accepted where SGLang would not sample by all rules.

    A seed and a position determine a token. The one behind each node of a draft is drawn
    so, and drafts are followed as far as they have the drawn tokens.
    """
    sample = eagle_utils.eagle_sample
    if batch.forward_mode.is_idle():
        return sample(drafted, batch, logits_output, grammar_mask, **more)
    if not _verified_as_sampled(batch):
        return _sample_one_each(sampler, drafted, batch, logits_output, grammar_mask)
    info, width = batch.sampling_info, drafted.draft_token_num
    unseeded = info.sampling_seed is None or info.has_watermark_candidates
    if info.is_all_greedy or unseeded:
        return sample(drafted, batch, logits_output, grammar_mask, **more)
    logits = logits_output.next_token_logits
    if info.logit_bias is not None:
        logits.add_(info.logit_bias.repeat_interleave(width, 0))
    if grammar_mask is not None:
        grammar_mask.apply(logits)
    wide = {name: getattr(info, name).repeat_interleave(width, 0) for name in _PER_ROW}
    drawn = sampler(
        replace(logits_output, next_token_logits=logits.clone()),
        replace(info, grammars=None, logit_bias=None, **wide),
        False, [], [], drafted.positions,
    )  # fmt: skip
    only = torch.zeros_like(logits).scatter_(1, drawn.long().unsqueeze(1), 1.0)
    batch.sampling_info = replace(info, is_all_greedy=True, logit_bias=None)
    found = sample(drafted, batch, SimpleNamespace(next_token_logits=only), **more)
    batch.sampling_info = info
    return found


def _sample_one_each(
    sampler: Callable[..., torch.Tensor], drafted: Any, batch: ScheduleBatch,
    logits_output: Any, grammar_mask: Any,
) -> Any:  # fmt: skip
    """The token behind the last one of each request, as without a draft."""
    info, width = batch.sampling_info, drafted.draft_token_num
    logits = logits_output.next_token_logits
    first = torch.arange(0, len(logits), width, device=logits.device)
    if grammar_mask is not None:
        grammar_mask.apply(logits)
    info.apply_logits_bias(logits[::width])  # in place, for log probabilities
    drawn = sampler(
        replace(logits_output, next_token_logits=logits[first]),
        replace(info, grammars=None),
        False, [], [], drafted.positions[first],
    )  # fmt: skip
    predicted = torch.zeros(len(logits), dtype=torch.int32, device=logits.device)
    predicted[first] = drawn.int()
    shape = len(first), drafted.max_tree_depth
    accepted = torch.full(shape, -1, dtype=torch.int32, device=logits.device)
    accepted[:, 0] = first
    return predicted, torch.ones_like(predicted[first]), accepted
