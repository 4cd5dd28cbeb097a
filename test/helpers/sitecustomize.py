"""Python runs this when it starts, in every process of the tests.

SGLang's imports make a million objects that stay. Looking for garbage among them takes
a sixth of the processor time of a start, so look less often. Where a test says so, the children
of a server or a Ray worker, a new process itself, are its forks.
"""

import gc
import os
import sys

gc.set_threshold(50_000, 20, 100)

main = os.environ.get("SGLANG_BATCH_TEST_FORKS")
if main in sys.orig_argv and sys.argv[0] in ("-m", main):
    import forked_children

    forked_children.start_fork_server()
