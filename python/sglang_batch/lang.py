"""SGLang's frontend programs (``@sgl.function``) as offline batches.

    from sglang_batch.lang import BatchBackend

See :mod:`sglang_batch.programs.batch_backend` for the documentation.
"""

from .programs.batch_backend import BatchBackend
from .programs.program_results import EarlierError
from .programs.wave_client import RequestError

__all__ = ["BatchBackend", "EarlierError", "RequestError"]
