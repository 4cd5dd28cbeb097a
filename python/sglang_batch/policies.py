"""The policies: every order that a job's requests can be given.

This table is the one place that lists them. The function that makes a policy's order is
in ``planner/ordering/order_functions.py``, registered under the policy's name. SGLang's
names are used for policies that SGLang has too.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Policy:
    """The properties of one policy.

    description: one line, for ``--help`` and the documentation.
    needs_estimates: whether the order depends on estimates of the output lengths. If
        so, a sample of the requests runs first.
    both_ends: whether requests are taken from both ends of the order, so that a step
        mixes compute-intensive and memory-intensive ones.
    uses_prompts: whether the job is planned from its prompts, which are all rendered
        first. If not, requests are rendered and sent in the order of the input.
    for_dense: whether it is made for dense batches. ``auto`` does not simulate it for
        paged KV.
    by_length: whether requests join by the length of their KV, in batches.
    """

    description: str
    needs_estimates: bool = False
    both_ends: bool = False
    uses_prompts: bool = True
    for_dense: bool = False
    by_length: bool = False


AUTO = "auto"
# Simplest first: among orders that are equally fast, ``auto`` takes the first.
POLICY_TABLE = {
    AUTO: Policy("the fastest order, by simulation", needs_estimates=True),
    "dfs": Policy("depth-first through the prefix tree"),
    "dfs-weight": Policy(
        "depth-first, at each node the subtree with most requests first"
    ),
    "dfs-longest": Policy(
        "depth-first, at each node the subtree with the longest expected answer first",
        needs_estimates=True,
    ),
    "dual-scan": Policy(
        "BlendServe's tree sorted by compute density, taken from both ends",
        needs_estimates=True,
        both_ends=True,
    ),
    "prefix-groups": Policy(
        "BatchLLM's prefix groups, those with most decoding per prompt token first",
        needs_estimates=True,
    ),
    "lpt": Policy("longest estimated output first", needs_estimates=True),
    "lof": Policy("longest max_new_tokens first"),
    "length-aligned": Policy(
        "batches of similar KV length, prefix families together",
        needs_estimates=True,
        by_length=True,
    ),
    "length-tree": Policy(
        "AlignedServe's batches of similar KV length, from a quad-tree",
        by_length=True,
    ),
    "random": Policy("shuffled with the seed"),
    "fcfs": Policy("order of the input", uses_prompts=False),
    "aligned": Policy(
        "depth-first, at each node the longest prompt and answer first, for dense "
        "batches",
        needs_estimates=True,
        for_dense=True,
    ),
}

POLICIES = tuple(POLICY_TABLE)
"""Names of all policies, ``auto`` included."""

ORDERS = tuple(name for name in POLICIES if name != AUTO)
"""Names of the policies that are an order themselves: all but ``auto``."""

PAGED_ORDERS = tuple(name for name in ORDERS if not POLICY_TABLE[name].for_dense)
"""The orders among which ``auto`` chooses for paged KV, by simulation."""

DENSE_ORDERS = tuple(
    name
    for name in ORDERS
    if POLICY_TABLE[name].for_dense or POLICY_TABLE[name].by_length
)
"""The orders among which ``auto`` chooses for dense batches."""

POLICY_HELP = "; ".join(
    f"{name}: {each.description}" for name, each in POLICY_TABLE.items()
)
"""All policies with their descriptions, for ``--help``."""
