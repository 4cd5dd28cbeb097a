"""SGLang's HTTP app with our routes, as tokenizer workers import it.

With ``--tokenizer-worker-num`` above 1, SGLang's HTTP server runs in worker
processes that import the app by the path in ``SGLANG_HTTP_SERVER_APP_PATH``.
"""

from sglang.srt.entrypoints.http_server import app

from .plugin import hear_of_engine_death
from .server import attach

attach(app)
hear_of_engine_death()

__all__ = ["app"]
