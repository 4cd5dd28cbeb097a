"""When a request waits for a prefix that another one computes, in scheduler and simulator."""

from __future__ import annotations

# Most requests that begin to wait in one step: a large group must not delay the step.
MOST_FOLLOWERS = 256
# Fewer tokens are computed again at once. Many prompts begin alike by a token or two, and
# a step for each of these would cost more.
SHORTEST_AWAITED = 8
# Prompt tokens that a recurrent state has to save later requests. Keeping one cuts a prompt.
WORTH_A_STATE = 32
