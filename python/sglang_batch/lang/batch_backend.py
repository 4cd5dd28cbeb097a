"""SGLang's frontend programs (``@sgl.function``) as offline batches.

::

    backend = BatchBackend("http://127.0.0.1:30000")  # or BatchBackend(engine)
    states = program.run_batch([{"text": t} for t in texts], backend=backend)
    failed = [state for state in states if state.error() is not None]

Programs need no change. They all run at once and send their calls in waves, which the
engine can plan. Each program continues as soon as its own answer arrives. A program that
fails is a state with an ``error()``. Other programs are unaffected.

With ``generator_style=True``, states are yielded in the order of the arguments, each as
soon as it is finished. With a ``job``, finished programs are kept and never run again::

    backend = BatchBackend("http://127.0.0.1:30000", job="night-1")
    for state in program.run_batch(rows, backend=backend, generator_style=True):
        print(state["answer"] if state.error() is None else state.error())

Run the same script again after a crash, or with more rows: it runs only the rest.
"""

from __future__ import annotations

import functools
from collections import deque
from pathlib import Path
from typing import Any

from sglang.lang import interpreter
from sglang.lang.backend.base_backend import BaseBackend
from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint
from sglang.lang.chat_template import get_chat_template, get_chat_template_by_model_path
from sglang.lang.global_config import global_config
from sglang.utils import http_request

from ..batch_api.protocol import MAX_PRIORITY
from ..errors import ConfigError, EngineError
from ..job.engine import WAVE_PATH
from ..request import authorization
from .program_log import ProgramJob
from .program_runner import EarlierError, run_programs
from .waves import EngineTransport, HttpTransport, RequestError, WaveClient

__all__ = ["BatchBackend", "EarlierError", "RequestError"]

# Each live program is a thread, which takes some memory.
MAX_LIVE_PROGRAMS = 2048
LOGPROB_OPTIONS = (
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "return_text_in_logprobs",
)
PREFILL_ONLY = {"max_new_tokens": 0}
# Of RuntimeEndpoint, which calls a server. An engine in this process has the same.
_ENGINE_CALLS = ("flush_cache", "get_server_info", "start_profile", "stop_profile")


class BatchBackend(RuntimeEndpoint):  # type: ignore[misc]
    """The backend that runs programs on an offline server or engine.

    Args:
        server: URL of a server launched with ``--offline-batch``, or a
            ``sglang.Engine(offline_batch=True, ...)``. Create the backend of an engine in
            the main thread, which handles signals. While programs run, they occupy its
            event loop.
        api_key: of the server.
        verify: file with the certificate authority of the server's certificate.
        chat_template_name: SGLang's name of a chat template, by default that of the model.
        max_live_programs: most programs that ``run_batch`` runs at a time, each in a
            thread, unless its ``num_threads`` is given.
        quiet_s: a wave is sent when no call has arrived for this many seconds.
        priority: of the waves among the batches of the server, -1000 to 1000. None is above
            all batches, since programs wait for their answers.
        job: name under which ``run_batch`` keeps the result of each finished program. It is
            not run again: its state is restored. Programs are the same if their code (with
            the strings and numbers that it reads from its module), arguments, sampling
            parameters and model are. An image given as a path is compared by its path, any
            other by its content. Several programs may share a job, but only one process may
            run it.
        job_dir: directory of the jobs' files, ``<job>.jsonl``. By default
            ``sglang-batch/programs`` in the user's data directory.
        retry_failed: whether a job runs failed programs again. If not, their states have
            the earlier error: a RequestError as it was, any other error as an EarlierError.
            Programs that failed because of the engine always run again.

    Raises:
        EngineError: the server or engine was not launched for offline batches.
        ConfigError: an option cannot be used. Also raised by ``run_batch`` if a job's
            arguments cannot be compared between runs.
        StoreError: from ``run_batch``: another process runs the job, or its file cannot be
            used.
    """

    def __init__(
        self,
        server: Any,
        api_key: str | None = None,
        verify: str | None = None,
        chat_template_name: str | None = None,
        *,
        max_live_programs: int = MAX_LIVE_PROGRAMS,
        quiet_s: float = 0.01,
        priority: int | None = None,
        job: str | None = None,
        job_dir: str | Path | None = None,
        retry_failed: bool = True,
    ) -> None:
        if max_live_programs < 1:
            raise ConfigError(
                f"max_live_programs={max_live_programs!r} must be 1 or more."
            )
        if priority is not None and abs(priority) > MAX_PRIORITY:
            raise ConfigError(
                f"priority={priority!r} must be {-MAX_PRIORITY} to {MAX_PRIORITY}."
            )
        self.max_live_programs = max_live_programs
        self.job = None if job is None else ProgramJob(job, job_dir, retry_failed)
        self._engine = None if isinstance(server, str) else server
        if self._engine is None:
            url = server.rstrip("/")
            self._connect(url, api_key, verify, chat_template_name)
            transport = HttpTransport(url, api_key, verify, priority)
            self.client = WaveClient(transport, quiet_s)
        else:
            self._attach(server, chat_template_name)
            self.client = WaveClient(EngineTransport(server, priority), quiet_s)
            for name in _ENGINE_CALLS:
                setattr(self, name, getattr(server, name))
        # SGLang's servers of this release have no route for it. Forks are joined as
        # text, which the prefix cache finds again.
        self.support_concate_and_append = False

    def _connect(
        self, url: str, api_key: str | None, verify: str | None, template: str | None
    ) -> None:
        authorization(api_key)  # raises for a key that cannot be sent
        try:
            super().__init__(url, api_key, verify, template)
            # The route accepts only POST: 405 shows that it exists, without a wave.
            probe = http_request(url + WAVE_PATH, api_key=api_key, verify=verify)
            probe.resp.close()
        except OSError as error:
            raise EngineError(
                f"no server answers at {url} ({error}); launch one with "
                "`sglang serve --model-path ... --offline-batch`, or correct the URL."
            ) from error
        if probe.status_code != 405:
            raise EngineError(
                f"the server at {url} does not take waves of programs (HTTP "
                f"{probe.status_code}); launch it with --offline-batch."
            )

    def _attach(self, engine: Any, template: str | None) -> None:
        if not hasattr(engine, "tokenizer_manager"):
            raise ConfigError(
                f"server={engine!r} must be the URL of a server or a sglang.Engine."
            )
        BaseBackend.__init__(self)
        self.base_url, self.api_key, self.verify = "", None, None
        self.model_info = {"model_path": engine.server_args.model_path}
        if template:
            self.chat_template = get_chat_template(template)
        else:
            path = self.model_info["model_path"]
            self.chat_template = get_chat_template_by_model_path(path)

    @property
    def wave_sizes(self) -> deque[int]:
        """Number of calls in each of the latest waves, in the order sent."""
        return self.client.wave_sizes

    # Called by StreamExecutor --------------------------------------------------------

    def generate(self, s: Any, sampling_params: Any) -> tuple[Any, Any]:
        """Text and meta info of one generation, or lists of ``n`` each if ``n`` > 1."""
        self._handle_dtype_to_regex(sampling_params)
        body: dict[str, Any] = {
            "text": s.text_,
            "sampling_params": {
                "skip_special_tokens": global_config.skip_special_tokens_in_output,
                "spaces_between_special_tokens": (
                    global_config.spaces_between_special_tokens_in_out
                ),
                **sampling_params.to_srt_kwargs(),
            },
        }
        for name in LOGPROB_OPTIONS:
            if (value := getattr(sampling_params, name, None)) is not None:
                body[name] = value
        answer = self._generate_http_request(s, body)
        if isinstance(answer, list):
            texts = [choice["text"] for choice in answer]
            return texts, [choice["meta_info"] for choice in answer]
        return answer["text"], answer["meta_info"]

    def generate_stream(self, s: Any, sampling_params: Any) -> Any:
        """Stream one generation, outside of any wave."""
        if self._engine is not None:
            raise EngineError(
                "run(stream=True) needs a server, but this backend uses an engine in this "
                "process. Launch a server and use BatchBackend(url), or run without "
                "streaming."
            )
        return super().generate_stream(s, sampling_params)

    def commit_lazy_operations(self, s: Any) -> None:
        """Prefill what a program has so far."""
        body = {"text": s.text_, "sampling_params": PREFILL_ONLY}
        self._generate_http_request(s, body)

    fill_image = commit_lazy_operations

    def cache_prefix(self, prefix_str: str) -> None:
        """Prefill a text into the prefix cache."""
        self.client.submit({"text": prefix_str, "sampling_params": PREFILL_ONLY})

    def _generate_http_request(self, s: Any, data: dict[str, Any]) -> Any:
        # SGLang's select() calls this method too.
        self._add_images(s, data)
        answer = self.client.submit(data)
        if data.get("return_text_in_logprobs"):
            # ``select`` must not subtract a log probability that SGLang does not return: the
            # first token of each choice has none. If the prompt ends in the same text (as in
            # "99"), SGLang mistakes that token for the prompt's last one and fails.
            for choice in answer:
                first = choice["meta_info"]["input_token_logprobs"][0]
                if first[0] is None:
                    first[-1] += "\0"
        return answer


def _install() -> None:
    """Make ``run_batch`` use :func:`run_programs` if the backend is a BatchBackend.

    ``SglFunction.run_batch`` looks the stock runner up in its module at each call, so
    one replaced function serves every program. Other backends use the stock runner.
    """
    stock = interpreter.run_program_batch
    if getattr(stock, "serves_batch_backend", False):
        return

    @functools.wraps(stock)
    def run_program_batch(
        program: Any, backend: Any, *args: Any, generator_style: bool = False
    ) -> Any:
        endpoint = getattr(backend, "endpoint", backend)
        if not isinstance(endpoint, BatchBackend):
            return stock(program, backend, *args, generator_style=generator_style)
        states = run_programs(program, endpoint, *args)
        return states if generator_style else list(states)

    run_program_batch.serves_batch_backend = True  # type: ignore[attr-defined]
    interpreter.run_program_batch = run_program_batch


_install()
