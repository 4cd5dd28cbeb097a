"""Kernel tests: those for Triton's interpreter run in a process of their own.

Triton decides when a kernel's module is imported whether it is interpreted. The files
below need that, and no other test may see it: ``test_interpreter.py`` runs them with
TRITON_INTERPRET=1 in a child process, and only there are they collected.
"""

from __future__ import annotations

import os

import pytest

pytest.register_assert_rewrite("gpu_batches")

INTERPRETED_FILES = ["test_merge_state.py", "test_shared_prefix_kernel.py"]

collect_ignore = (
    [] if os.environ.get("TRITON_INTERPRET") == "1" else list(INTERPRETED_FILES)
)
