"""SGLang's frontend programs (``@sgl.function``) as offline batches.

::

    backend = BatchBackend("http://127.0.0.1:30000")  # or BatchBackend(engine)
    states = program.run_batch([{"text": t} for t in texts], backend=backend)
    failed = [state for state in states if state.error() is not None]

Programs need no change. All of them are live at once and the engine gets their calls
in whole waves, so it can plan; each program goes on when its own answer is there.
A program that fails is a state with an ``error()``; the others are unaffected.

With ``generator_style=True`` the states come as they are done, in the order of the
arguments; with a ``job`` they are kept, and what was finished is never run again::

    backend = BatchBackend("http://127.0.0.1:30000", job="night-1")
    for state in program.run_batch(rows, backend=backend, generator_style=True):
        print(state["answer"] if state.error() is None else state.error())

Run the same script again, after a crash or with more rows, and it takes up the rest.
"""

from __future__ import annotations

import functools
from collections import deque
from pathlib import Path
from typing import Any, NoReturn

from sglang.lang import interpreter
from sglang.lang.backend.base_backend import BaseBackend
from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint
from sglang.lang.chat_template import get_chat_template, get_chat_template_by_model_path
from sglang.lang.global_config import global_config
from sglang.utils import http_request

from .engine import WAVE_PATH
from .errors import ConfigError, EngineError
from .program_log import ProgramJob
from .program_results import EarlierError
from .program_run import run_programs
from .wave_client import EngineTransport, HttpTransport, RequestError, WaveClient

__all__ = ["BatchBackend", "EarlierError", "RequestError"]

# Each live program is a thread: its memory is small, but not nothing.
MAX_LIVE_PROGRAMS = 2048
LOGPROB_OPTIONS = (
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "return_text_in_logprobs",
)
PREFILL_ONLY = {"max_new_tokens": 0}


class BatchBackend(RuntimeEndpoint):  # type: ignore[misc]
    """The backend to run programs against an offline server or engine.

    Args:
        server: URL of a server launched with ``--offline-batch``, or a
            ``sglang.Engine(offline_batch=True, ...)``, best from the main thread,
            which hears the process's signals. While programs run, the engine's event
            loop is ours; use the engine before and after.
        api_key: of the server.
        verify: file of the certificate authority that signed the server's.
        chat_template_name: SGLang's name of a chat template; by default it is found
            by the model's path.
        max_live_programs: programs that ``run_batch`` runs at a time, each in a
            thread, unless it is called with a ``num_threads`` of its own.
        quiet_s: a wave leaves when no call has come for this long.
        job: keeps the result of each program that ``run_batch`` finishes under this
            name; programs that are in there are not run again but given back as they
            were. It is the same program when its code (and the texts and numbers it
            reads from its module), its arguments, its sampling parameters and the
            model are the same. Of an image given as a path, the path counts; else its
            content. One job may serve several programs; one process at a time may
            run it.
        job_dir: where jobs are kept, in a file ``<job>.jsonl`` each; by default the
            folder ``sglang-batch/programs`` among the user's data.
        retry_failed: whether a job runs programs again that failed. If not, they
            come back with their error: a RequestError as it was, any other as an
            EarlierError. What failed for the engine's sake is always run again.

    Raises:
        EngineError: the server or engine is not an offline one.
        ConfigError: an option cannot be used. ``run_batch`` raises it too, where a
            job is given arguments that cannot be compared with those of another run.
        StoreError: from ``run_batch``: another process runs the job, or its file
            cannot be read or written.
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
        job: str | None = None,
        job_dir: str | Path | None = None,
        retry_failed: bool = True,
    ) -> None:
        if max_live_programs < 1:
            raise ConfigError(
                f"max_live_programs={max_live_programs!r} must be 1 or more."
            )
        self.max_live_programs = max_live_programs
        self.job = None if job is None else ProgramJob(job, job_dir, retry_failed)
        self._engine = None if isinstance(server, str) else server
        if self._engine is None:
            url = server.rstrip("/")
            self._connect(url, api_key, verify, chat_template_name)
            self.client = WaveClient(HttpTransport(url, api_key, verify), quiet_s)
        else:
            self._attach(server, chat_template_name)
            self.client = WaveClient(EngineTransport(server), quiet_s)
        # SGLang's servers of this release have no such route: forks are joined as
        # text, and the prefix cache finds it again.
        self.support_concate_and_append = False

    def _connect(
        self, url: str, api_key: str | None, verify: str | None, template: str | None
    ) -> None:
        try:
            super().__init__(url, api_key, verify, template)
            # The route takes POST alone: 405 says that it is there, without a wave.
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
        """How many calls each of the latest waves held, in the order sent."""
        return self.client.wave_sizes

    def submit(self, body: dict[str, Any]) -> Any:
        """Run one native ``/generate`` body with the next wave; blocks.

        Raises:
            RequestError: the engine rejected the request.
            EngineError: the connection was lost, or the run was stopped.
        """
        return self.client.submit(body)

    # What StreamExecutor calls ------------------------------------------------------

    def generate(self, s: Any, sampling_params: Any) -> tuple[Any, Any]:
        """One generation; lists of ``n`` texts and meta infos where ``n`` is above 1."""
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
            self._no_http("run(stream=True)")
        return super().generate_stream(s, sampling_params)

    def commit_lazy_operations(self, s: Any) -> None:
        """Bring a program's text into the prefix cache, for its forks."""
        self._prefill(s)

    def fill_image(self, s: Any) -> None:
        """Bring a program's text and images into the prefix cache."""
        self._prefill(s)

    def cache_prefix(self, prefix_str: str) -> None:
        """Bring a text into the prefix cache."""
        self.submit({"text": prefix_str, "sampling_params": PREFILL_ONLY})

    def _prefill(self, s: Any) -> None:
        body = {"text": s.text_, "sampling_params": PREFILL_ONLY}
        self._generate_http_request(s, body)

    def _generate_http_request(self, s: Any, data: dict[str, Any]) -> Any:
        # SGLang's select() sends its requests through this method too.
        self._add_images(s, data)
        answer = self.submit(data)
        if data.get("return_text_in_logprobs"):
            _mark_unscored_tokens(answer)
        return answer

    # The server itself ---------------------------------------------------------------

    def flush_cache(self) -> Any:
        """Empty the prefix cache."""
        return (self._engine or super()).flush_cache()

    def get_server_info(self) -> Any:
        """Arguments and state of the server or engine."""
        return (self._engine or super()).get_server_info()

    def start_profile(self) -> Any:
        """Start SGLang's profiler."""
        return (self._engine or super()).start_profile()

    def stop_profile(self) -> Any:
        """Stop SGLang's profiler."""
        return (self._engine or super()).stop_profile()

    def _no_http(self, what: str) -> NoReturn:
        raise EngineError(
            f"{what} needs a server: this backend drives an engine in this process. "
            "Launch a server and use BatchBackend(url), or run without streaming."
        )


def _mark_unscored_tokens(choices: list[dict[str, Any]]) -> None:
    """Keep ``select`` from subtracting a logprob that SGLang does not give.

    The first token of each choice has none. Where the prompt ends in that token's
    text once more ("99", say), SGLang takes it for the prompt's last token and fails.
    """
    for choice in choices:
        first = choice["meta_info"]["input_token_logprobs"][0]
        if first[0] is None:
            first[-1] += "\0"


def _install() -> None:
    """Let ``run_batch`` use our runner where the backend is a BatchBackend.

    ``SglFunction.run_batch`` looks the stock runner up in its module at each call, so
    one replaced function serves every program; other backends go the stock way.
    """
    stock = interpreter.run_program_batch
    if getattr(stock, "serves_batch_backend", False):
        return

    @functools.wraps(stock)
    def run_program_batch(
        program: Any,
        backend: Any,
        batch_arguments: Any,
        default_sampling_para: Any,
        num_threads: Any,
        progress_bar: bool,
        generator_style: bool = False,
    ) -> Any:
        endpoint = getattr(backend, "endpoint", backend)
        if not isinstance(endpoint, BatchBackend):
            return stock(
                program,
                backend,
                batch_arguments,
                default_sampling_para,
                num_threads,
                progress_bar,
                generator_style=generator_style,
            )
        if num_threads == "auto":
            num_threads = endpoint.max_live_programs
        states = run_programs(
            program,
            endpoint,
            batch_arguments,
            default_sampling_para,
            num_threads,
            progress_bar,
        )
        return states if generator_style else list(states)

    run_program_batch.serves_batch_backend = True  # type: ignore[attr-defined]
    interpreter.run_program_batch = run_program_batch


_install()
