"""Python runs this when it starts, in every process of the tests.

SGLang's imports make a million objects that stay. Looking for garbage among them takes
a sixth of the processor time of a start, so look less often.
"""

import gc

gc.set_threshold(50_000, 20, 100)
