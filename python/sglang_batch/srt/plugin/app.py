"""SGLang's HTTP app with our routes, for tokenizer workers.

With ``--tokenizer-worker-num`` above 1, SGLang's HTTP server runs in worker processes,
which import the app from the path in ``SGLANG_HTTP_SERVER_APP_PATH``.
"""

from sglang.srt.entrypoints.http_server import app

from . import quiet_log
from .main_process import enter_tokenizer_worker
from .server_routes import attach

attach(app)
enter_tokenizer_worker()
quiet_log.hide_polls()

__all__ = ["app"]
