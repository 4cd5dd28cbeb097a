"""The role that each route needs.

Clients' routes are listed by their template. Everything else, and so every route that a
later SGLang adds, is closed to clients.
"""

from __future__ import annotations

from ....job.engine import WAVE_PATH, WORKER_PATH
from ....rollout.rollout_call import ROLLOUTS_PATH
from ...access.keys import Role
from ..known_routes import KnownRoute

# Open without a key, for probes, as in SGLang.
OPEN = frozenset({"/health", "/health_generate", "/ready"})
# Of the admin, unless the server is told otherwise: it has the usage of all clients.
METRICS = "/metrics"

# OpenAI's and Anthropic's endpoints that answer at once.
ONLINE = frozenset(
    {
        "/v1/chat/completions",
        "/v1/classify",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/rerank",
        "/v1/responses",
        "/v1/score",
    }
)
# The model of these calls is not in a JSON body.
ONLINE_OTHER = frozenset({"/v1/audio/transcriptions", "/v1/realtime"})
# All calls that use tokens at once.
GENERATING = ONLINE | ONLINE_OTHER | {ROLLOUTS_PATH, WAVE_PATH}

CLIENT = frozenset(
    {
        *ONLINE,
        *ONLINE_OTHER,
        "/",
        "/docs",
        "/docs/oauth2-redirect",
        "/openapi.json",
        "/ping",
        "/redoc",
        "/v1/detokenize",
        "/v1/models",
        "/v1/models/{model:path}",
        "/v1/responses/{response_id}",
        "/v1/responses/{response_id}/cancel",
        "/v1/tokenize",
        # SGLang's frontend language asks for these before its first wave.
        "/get_model_info",
        "/model_info",
        # Ours.
        "/batches/data",
        "/offline_batch/usage",
        "/offline_batch/costs",
        "/v1/batches",
        "/v1/batches/{batch_id}",
        "/v1/batches/{batch_id}/cancel",
        "/v1/batches/{batch_id}/results",
        "/v1/files",
        "/v1/files/{file_id}",
        "/v1/files/{file_id}/content",
        "/v1/messages/batches",
        "/v1/messages/batches/{message_batch_id}",
        "/v1/messages/batches/{message_batch_id}/cancel",
        "/v1/messages/batches/{message_batch_id}/results",
        "/v1/uploads",
        "/v1/uploads/{upload_id}/cancel",
        "/v1/uploads/{upload_id}/complete",
        "/v1/uploads/{upload_id}/parts",
        ROLLOUTS_PATH,
        f"{ROLLOUTS_PATH}/{{rollout_id}}/stop",
        WAVE_PATH,
    }
)
ADMIN = frozenset(
    {
        METRICS,
        "/offline_batch/engines",
        "/offline_batch/keys",
        "/offline_batch/keys/{key_id}",
        "/offline_batch/limits/{name}",
        "/offline_batch/tree",
        *(
            f"{WORKER_PATH}/{call}"
            for call in ("attach", "exchange", "render", "query")
        ),
    }
)


def role_of(route: KnownRoute) -> Role:
    """The role that a route needs."""
    if route.template in OPEN:
        return Role.NOBODY
    if route.template in CLIENT:
        return Role.CLIENT
    # SGLang marks the routes of its admin, and opens the others to its --api-key.
    marked = getattr(route.endpoint, "_auth_level", None) is not None
    return Role.ADMIN if route.template in ADMIN or marked else Role.USER
