"""Verification of drafts (``--speculative-algorithm``) in PyTorch, for SGLang on a CPU.

SGLang drafts n-grams with a C++ library that runs anywhere, and the rest with draft models. The
steps after a draft need Triton or compiled operators. Each function here has the arguments of
the kernel whose place it takes.
A step verifies a tree of ``num_drafts`` tokens per request. Node 0 is the request's last
token, and the children of a node are its first child and that one's siblings.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# The tree -----------------------------------------------------------------------------


def tree_links(
    tree_mask: Tensor,
    verified_seq_len: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """Write where the tokens of trees are, and how the trees branch.

    tree_mask: bool ``[batch_size, num_drafts, num_drafts]``, of any shape: of each node, itself
        and the nodes above it, which come before it.
    verified_seq_len: ``[batch_size]``, tokens before the draft.
    positions: ``[batch_size * num_drafts]``, in the request. Written, like all that follow.
    retrieve_index: ``[batch_size, num_drafts]``, numbers of the nodes in the batch.
    retrieve_next_token, retrieve_next_sibling: the same shape, a node's first child and
        next sibling, -1 if it has none.
    """
    mask = tree_mask.view(batch_size, draft_token_num, draft_token_num)
    above = mask.tril(-1)
    positions.copy_((above.sum(-1) + verified_seq_len.unsqueeze(1)).flatten())
    retrieve_index.copy_(torch.arange(retrieve_index.numel()).view_as(retrieve_index))
    retrieve_next_token.fill_(-1)
    retrieve_next_sibling.fill_(-1)
    for row, nodes in enumerate(above.tolist()):
        last_child: dict[int, int] = {}
        for node in range(1, draft_token_num):
            ancestors = [i for i in range(node) if nodes[node][i]]
            if not ancestors:
                continue
            parent = ancestors[-1]
            if parent in last_child:
                retrieve_next_sibling[row, last_child[parent]] = node
            else:
                retrieve_next_token[row, parent] = node
            last_child[parent] = node


def build_tree(
    parent_list: Tensor,
    top_scores_index: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    topk: int,
    spec_steps: int,
    num_verify_tokens: int,
    tree_mask_mode: int,
) -> None:
    """Link the best candidates of a draft model into trees.

    Each step of the draft model makes ``topk`` candidates of each of its ``topk`` tokens, the
    first step of the last token alone. They are numbered through, step after step.

    parent_list: ``[batch_size, ...]``: by group of ``topk`` candidates, the number of the one
        that they follow. The first group follows the last token.
    top_scores_index: ``[batch_size, num_drafts - 1]``, candidates in the tree, ascending.
    seq_lens: ``[batch_size]``, tokens before the draft.
    tree_mask: bool, one after the other of each request ``[num_drafts, length + num_drafts]``,
        where columns before the draft are set. Written, like all that follow.
    positions, retrieve_index, retrieve_next_token, retrieve_next_sibling: see
        :func:`tree_links`.
    """
    number = len(seq_lens)
    seen = torch.eye(num_verify_tokens, dtype=torch.bool).repeat(number, 1, 1)
    pairs = zip(top_scores_index.tolist(), parent_list.tolist(), strict=True)
    for row, (candidates, parents) in enumerate(pairs):
        at = {candidate: node for node, candidate in enumerate(candidates, 1)}
        for candidate, node in at.items():
            group = candidate // topk
            # Where scores are equal, a candidate may be there without its parent.
            parent = at.get(parents[group], node) if group else 0
            seen[row, node] |= seen[row, parent]
    tree_links(
        seen, seq_lens, positions, retrieve_index, retrieve_next_token,
        retrieve_next_sibling, number, num_verify_tokens,
    )  # fmt: skip
    begin = 0
    for drafts, length in zip(seen, seq_lens.tolist(), strict=True):
        width = length + num_verify_tokens
        end = begin + num_verify_tokens * width
        tree_mask[begin:end].view(-1, width)[:, length:] = drafts
        begin = end


def _children(first: list[int], sibling: list[int], node: int) -> Iterator[int]:
    child = first[node]
    while child >= 0:
        yield child
        child = sibling[child]


# Verification -------------------------------------------------------------------------


def verify_greedy(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    target_predict: Tensor,
    topk: int = -1,
) -> tuple[Tensor, Tensor, Tensor]:
    """Follow each tree as far as the model agrees with the draft.

    predicts: ``[batch_size * num_drafts]``, the model's token after each accepted node.
        Written, as are the next two, which are also returned.
    accept_index: ``[batch_size, depth]``, numbers of the accepted nodes in the batch. What
        follows them is left as it is.
    accept_token_num: ``[batch_size]``, accepted drafts, without the last token.
    candidates: ``[batch_size, num_drafts]``, tokens of the nodes.
    retrieve_index, retrieve_next_token, retrieve_next_sibling: see :func:`tree_links`.
    target_predict: ``[batch_size, num_drafts]``, the model's token after each node.
    """
    drafts, targets = candidates.tolist(), target_predict.tolist()
    firsts, siblings = retrieve_next_token.tolist(), retrieve_next_sibling.tolist()
    for row, numbers in enumerate(retrieve_index.tolist()):
        node, path = 0, [0]
        while len(path) < accept_index.shape[1]:
            wanted = targets[row][node]
            children = _children(firsts[row], siblings[row], node)
            found = next((i for i in children if drafts[row][i] == wanted), None)
            if found is None:
                break
            node = found
            path.append(node)
        for place, node in enumerate(path):
            accept_index[row, place] = numbers[node]
            predicts[numbers[node]] = targets[row][node]
        accept_token_num[row] = len(path) - 1
    return predicts, accept_index, accept_token_num


def verify_sampling(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """Accept drafts with the model's probability of them, so that answers are sampled as
    without drafts.

    Arguments as of :func:`verify_greedy`, and:

    uniform_samples: ``[batch_size, num_drafts]``, a draw of the unit interval for the
        children of each node.
    uniform_samples_for_final_sampling: ``[batch_size]``, for the last token.
    target_probs: ``[batch_size, num_drafts, vocab_size]``, the model's after each node.
    threshold_single: a draft at least this probable is accepted in any case.
    threshold_acc: factor of each draw.
    """
    drafts = candidates.tolist()
    firsts, siblings = retrive_next_token.tolist(), retrive_next_sibling.tolist()
    for row, numbers in enumerate(retrive_index.tolist()):
        node, path, rejected = 0, [0], list[int]()
        while len(path) < accept_index.shape[1]:
            draw, taken, rejected = float(uniform_samples[row, node]), 0.0, []
            found = None
            for child in _children(firsts[row], siblings[row], node):
                share = float(target_probs[row, node, drafts[row][child]])
                taken += share
                if draw * threshold_acc < taken or share >= threshold_single:
                    found = child
                    break
                rejected.append(drafts[row][child])
            if found is None:
                break
            predicts[numbers[node]] = drafts[row][found]
            node, rejected = found, []
            path.append(node)
        for place, each in enumerate(path):
            accept_index[row, place] = numbers[each]
        accept_token_num[row] = len(path) - 1
        draw = float(uniform_samples_for_final_sampling[row])
        # A token other than the rejected ones.
        left = target_probs[row, node].double()
        left[rejected] = 0.0
        sums = left.cumsum(0)
        at = torch.searchsorted(sums, draw * sums[-1], right=True)
        predicts[numbers[node]] = min(int(at), int(left.nonzero()[-1]))


def keep_top_k(probs: Tensor, top_ks: Tensor) -> Tensor:
    """Probabilities ``[rows, vocab_size]`` of the ``top_ks`` likeliest tokens alone."""
    ordered = probs.sort(-1, descending=True).values
    last = (top_ks.clamp(1, probs.shape[-1]) - 1).long().unsqueeze(1)
    kept = probs.masked_fill(probs < ordered.gather(1, last), 0.0)
    return kept / kept.sum(-1, keepdim=True)


def keep_top_p(probs: Tensor, top_ps: Tensor) -> Tensor:
    """Probabilities ``[rows, vocab_size]`` of the likeliest tokens that make up ``top_ps``."""
    ordered, tokens = probs.sort(-1, descending=True)
    out = ordered.cumsum(-1) - ordered > top_ps.unsqueeze(1)
    kept = torch.zeros_like(probs).scatter(1, tokens, ordered.masked_fill(out, 0.0))
    return kept / kept.sum(-1, keepdim=True)


# Slots of KV --------------------------------------------------------------------------


def assign_slots(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    batch_size: int,
) -> None:
    """Write new slots into the rows of requests, between two offsets of each."""
    begin = 0
    for row, first, end in _spans(req_pool_indices, start_offset, end_offset):
        slots = out_cache_loc[begin : begin + end - first]
        req_to_token[row, first:end] = slots.to(req_to_token.dtype)
        begin += end - first


def assigned_slots(
    *,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    **_: object,
) -> Tensor:
    """Slots of the rows of requests between two offsets of each, one after the other."""
    spans = _spans(req_pool_indices, start_offset, end_offset)
    return torch.cat([req_to_token[row, first:end] for row, first, end in spans]).long()


def drafted_slots(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    topk: int,
    num_cols: int,
    positions: None = None,
    mrope: None = None,
) -> None:
    """Write the ``topk * num_cols`` slots of each request behind its tokens."""
    ends = seq_lens + topk * num_cols
    spans = _spans(req_pool_indices, seq_lens, ends)
    slots = [req_to_token[row, first:end] for row, first, end in spans]
    out_cache_loc.copy_(torch.cat(slots))


def _spans(
    rows: Tensor, starts: Tensor, ends: Tensor
) -> Iterator[tuple[int, int, int]]:
    return zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True)


def first_slots(counts: Tensor, out_cache_loc: Tensor, found: Tensor) -> None:
    """Write the first ``counts`` slots of each request's, one after the other."""
    windows = out_cache_loc.view(len(counts), -1)
    pairs = zip(windows, counts.tolist(), strict=True)
    slots = torch.cat([window[:count] for window, count in pairs])
    found[: len(slots)] = slots


def accepted_slots(
    accept_index: Tensor, out_cache_loc: Tensor, found: Tensor, size: int
) -> None:
    """Write the slots of the accepted nodes, one after the other."""
    nodes = accept_index.flatten()[:size]
    slots = out_cache_loc[nodes[nodes >= 0].long()]
    found[: len(slots)] = slots


def last_tokens(
    accept_tokens: Tensor, accept_lens: Tensor, found: Tensor, width: int, number: int
) -> None:
    """Write the last of each request's ``accept_lens`` tokens, of ``width`` each."""
    last = accept_lens.long().unsqueeze(1) - 1
    found.copy_(accept_tokens.view(number, width).gather(1, last).flatten())
