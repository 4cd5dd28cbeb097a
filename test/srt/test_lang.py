"""Frontend programs as waves, against an offline server and an engine in process."""

from __future__ import annotations

import asyncio
import atexit
import json
import multiprocessing
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sglang as sgl
from prompts import MAX_TOKENS, Case
from servers import Server
from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint
from sglang.lang.chat_template import get_chat_template

from sglang_batch.errors import ConfigError, EngineError
from sglang_batch.lang import BatchBackend, RequestError, batch_backend
from sglang_batch.lang.program_log import ProgramJob

pytestmark = [
    # Raised by SGLang when it loads a model in this process without a GPU.
    pytest.mark.filterwarnings("ignore:Only .* support:UserWarning"),
    pytest.mark.filterwarnings("ignore:Triton is not supported:UserWarning"),
]
TOO_LONG = "x" * 3000  # the demo model reads 2048
WAIT_S = 60


@sgl.function
def answer(s: Any, prompt: str) -> None:
    s += prompt
    s += sgl.gen("answer", max_tokens=MAX_TOKENS, temperature=0)


@sgl.function
def tree(s: Any, topic: str, bad_branch: str = "") -> None:
    s += sgl.user(f"Write about {topic}.")
    s += sgl.assistant(sgl.gen("plan", max_tokens=6, temperature=0))
    branches = s.fork(3)
    for number, branch in enumerate(branches):
        branch += f" Part {number}{bad_branch if number == 1 else ''}: "
        branch += sgl.gen("part", max_tokens=5, temperature=0)
        branch += " and so on"
    branches.join()
    for part in s["part"]:
        s += part
    with s.copy() as judged:
        judged += " Good? "
        judged += sgl.select("verdict", choices=["yes", "no", "who knows"])
        s += judged["verdict"]


@pytest.fixture(scope="module")
def engine(demo_model: Path) -> Iterator[Any]:
    handlers = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGQUIT)}
    engine = sgl.Engine(
        offline_batch=True,
        model_path=str(demo_model),
        dtype="float32",
        mem_fraction_static=0.3,
        max_total_tokens=20000,
        log_level="error",
    )
    yield engine
    end(engine)
    for signum, handler in handlers.items():
        signal.signal(signum, handler)


def end(engine: Any) -> None:
    """End the engine. Its own shutdown() would also end the servers of other tests."""
    atexit.unregister(engine.shutdown)
    manager = engine.tokenizer_manager
    manager._subprocess_watchdog.stop()
    pids = engine.get_all_child_pids()
    for process in multiprocessing.active_children():
        if process.pid in pids:
            process.kill()
            process.join()
    for task in manager.asyncio_tasks:
        task.cancel()
    engine.loop.run_until_complete(asyncio.sleep(0))
    for socket in (engine.send_to_rpc, manager.recv_from_detokenizer):
        socket.context.destroy(linger=0)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Interrupts raise, even if a shell started the tests in its background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(params=["server", "engine"])
def backend(request: pytest.FixtureRequest) -> BatchBackend:
    if request.param == "engine":
        return BatchBackend(request.getfixturevalue("engine"))
    return BatchBackend(request.getfixturevalue("offline_server").url)


@pytest.fixture
def http(offline_server: Server) -> BatchBackend:
    return BatchBackend(offline_server.url)


def errors(states: Any) -> list[Exception]:
    return [error for state in states if (error := state.error()) is not None]


# Waves ---------------------------------------------------------------------------


def test_one_wave_of_all_programs_answers_as_transformers(
    backend: BatchBackend, cases: list[Case], demo_model: Path
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    asked = [cases[i % len(cases)] for i in range(500)]

    states = answer.run_batch([{"prompt": c.prompt} for c in asked], backend=backend)

    assert list(backend.wave_sizes) == [500]
    assert errors(states) == []
    for case, state in zip(asked, states, strict=True):
        text = tokenizer.decode(case.output_ids, skip_special_tokens=True)
        assert (state["answer"], state.text()) == (text, case.prompt + text)
        meta = state.get_meta_info("answer")
        assert meta["completion_tokens"] == len(case.output_ids)


def test_forks_and_selects_as_with_the_stock_backend(
    backend: BatchBackend, offline_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    topics = [{"topic": f"{word} {i}"} for i in range(8) for word in ("sun", "sea")]
    states = tree.run_batch(topics, backend=backend)
    assert errors(states) == []

    # The stock backend does not use our runner, though its module is imported.
    monkeypatch.setattr(batch_backend, "run_programs", None)
    stock = RuntimeEndpoint(offline_server.url, chat_template_name="default")
    # The prefix of all programs is cached before they run: one call.
    assert list(backend.wave_sizes)[:2] in ([16, 16], [1, 16])
    stock.support_concate_and_append = False
    expected = tree.run_batch(topics, backend=stock)
    assert [s.text() for s in states] == [s.text() for s in expected]
    assert [s["part"] for s in states] == [s["part"] for s in expected]
    assert states[3].messages() == expected[3].messages()


def test_select_where_the_prompt_ends_in_a_double_letter(
    backend: BatchBackend,
) -> None:
    @sgl.function
    def pick(s: Any, n: int) -> None:
        s += f"{n} plus 1 is 100"
        s += sgl.select("sign", choices=[".", "!?"])

    states = pick.run_batch([{"n": n} for n in range(3)], backend=backend)
    assert errors(states) == []
    assert {s["sign"] for s in states} <= {".", "!?"}


def test_a_program_continues_when_its_own_answer_arrives(backend: BatchBackend) -> None:
    finished: list[str] = []

    @sgl.function
    def two_steps(s: Any, name: str, length: int) -> None:
        s += name
        s += sgl.gen("a", max_tokens=length, temperature=0, ignore_eos=True)
        finished.append(name)
        s += sgl.gen("b", max_tokens=length, temperature=0, ignore_eos=True)
        finished.append(name)

    states = two_steps.run_batch([["slow", 300], ["fast", 4]], backend=backend)
    assert errors(states) == []
    assert finished == ["fast", "fast", "slow", "slow"]


def test_num_threads_caps_the_live_programs(http: BatchBackend) -> None:
    prompts = [{"prompt": f"Number {i}"} for i in range(9)]
    states = answer.run_batch(prompts, backend=http, num_threads=4)
    assert [s.text()[:8] for s in states] == [p["prompt"] for p in prompts]
    assert max(http.wave_sizes) <= 4 and http.wave_sizes[0] == 4

    with pytest.raises(ConfigError, match="num_threads=0"):
        answer.run_batch(prompts, backend=http, num_threads=0)


# Failures ------------------------------------------------------------------------


def test_a_failing_program_leaves_the_others_unaffected(
    backend: BatchBackend, cases: list[Case]
) -> None:
    @sgl.function
    def fragile(s: Any, prompt: str) -> None:
        if prompt == "raise":
            raise LookupError(prompt)
        s += prompt
        s += sgl.gen("answer", max_tokens=MAX_TOKENS, temperature=0)

    prompts = [case.prompt for case in cases[:6]]
    prompts[1], prompts[4] = "raise", TOO_LONG
    states = fragile.run_batch([[p] for p in prompts], backend=backend)

    good = [state for i, state in enumerate(states) if i not in (1, 4)]
    assert errors(good) == [] and all(s["answer"] in s.text() for s in good)
    assert isinstance(states[1].error(), LookupError)
    rejected = states[4].error()
    assert isinstance(rejected, RequestError) and rejected.status_code == 400
    assert "context length" in rejected.message
    for state in (states[1], states[4]):
        with pytest.raises(KeyError):
            state["answer"]


def test_a_failing_fork_fails_its_program(backend: BatchBackend) -> None:
    states = tree.run_batch([["a", ""], ["b", TOO_LONG], ["c", ""]], backend=backend)
    first, failed, last = states
    assert first.error() is None and last.error() is None
    assert isinstance(failed.error(), RequestError)
    assert failed["plan"] in failed.text()


def test_a_program_may_continue_after_a_failed_generation(http: BatchBackend) -> None:
    @sgl.function
    def fallback(s: Any, parameter: Any) -> None:
        try:
            s += sgl.gen("a", max_tokens=4, stop=parameter)
        except Exception as error:
            s["reason"] = error
        s += "Then: " + sgl.gen("b", max_tokens=4, temperature=0)

    for parameter, reason in ((object(), "cannot be sent"), (7, "")):
        (state,) = fallback.run_batch([{"parameter": parameter}], backend=http)
        assert state.error() is None and state["b"] in state.text()
        assert reason in str(state["reason"])


class _CutOff(BaseHTTPRequestHandler):
    """A server that answers the first request of a wave and hangs up."""

    def do_GET(self) -> None:
        known = self.path == "/get_model_info"
        self.send_response(200 if known else 405)
        self.end_headers()
        self.wfile.write(json.dumps({"model_path": "demo"}).encode() if known else b"")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        body = {"text": "fine", "meta_info": {}}
        line = {"index": 0, "status_code": 200, "body": body}
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(json.dumps(line).encode() + b"\n")

    def log_message(self, *args: Any) -> None:
        pass


def test_a_lost_connection_fails_the_unanswered_only() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _CutOff) as server:
        threading.Thread(target=server.serve_forever).start()
        url = f"http://127.0.0.1:{server.server_port}"
        backend = BatchBackend(url)
        states = answer.run_batch(
            [{"prompt": str(i)} for i in range(5)], backend=backend
        )
        server.shutdown()
    lost = errors(states)
    assert len(lost) == 4 and all(isinstance(e, EngineError) for e in lost)
    assert f"the connection to {url} was lost with 4 answers missing" in str(lost[0])
    assert [s["answer"] for s in states if s.error() is None] == ["fine"]


@pytest.mark.parametrize("generator_style", [False, True])
@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_aborts_and_frees_the_backend(
    backend: BatchBackend, generator_style: bool
) -> None:
    @sgl.function
    def endless(s: Any, i: int) -> None:
        s += f"{i}: " + sgl.gen("a", max_tokens=1900, ignore_eos=True)
        interrupted.append(i)

    def interrupt() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    interrupted: list[int] = []
    threading.Timer(0.5, interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        list(
            endless.run_batch(
                [{"i": i} for i in range(20)],
                backend=backend,
                generator_style=generator_style,
            )
        )
    assert interrupted == []
    assert not [t for t in threading.enumerate() if "sglang-" in t.name]
    assert answer.run(prompt="Still there?", backend=backend)["answer"]


# Other calls ------------------------------------------------------------------------


def test_a_generator_yields_in_order_without_waiting_for_all(
    backend: BatchBackend,
) -> None:
    seen = threading.Event()

    @sgl.function
    def last_waits(s: Any, i: int) -> None:
        s += f"Number {i} " + sgl.gen("a", max_tokens=4, temperature=0)
        s["seen"] = i < 299 or seen.wait(WAIT_S)

    states = last_waits.run_batch(
        [{"i": i} for i in range(300)], backend=backend, generator_style=True
    )
    for i, state in enumerate(states):
        seen.set()
        assert state.text().startswith(f"Number {i} ") and state["seen"]
    assert i == 299


def test_a_job_restores_finished_programs(
    backend: BatchBackend, tmp_path: Path
) -> None:
    backend.job = ProgramJob("trees", tmp_path)
    topics = [{"topic": "sun"}, {"topic": "sea"}]
    fresh = tree.run_batch(topics, backend=backend)
    waves = len(backend.wave_sizes)
    for state, kept in zip(fresh, tree.run_batch(topics, backend=backend), strict=True):
        assert kept.error() is None
        assert (kept.text(), kept.messages()) == (state.text(), state.messages())
        assert (kept["plan"], kept["part"]) == (state["plan"], state["part"])
        assert kept.get_meta_info("plan") == state.get_meta_info("plan")
    assert len(backend.wave_sizes) == waves


def test_progress_bar_and_default_backend(
    http: BatchBackend, capsys: pytest.CaptureFixture[str]
) -> None:
    sgl.set_default_backend(http)
    try:
        states = answer.bind(prompt="Same").run_batch([{}] * 7, progress_bar=True)
    finally:
        sgl.set_default_backend(None)
    assert len({s["answer"] for s in states}) == 1
    assert "7/7" in capsys.readouterr().err


def test_single_runs_and_the_engine_itself(
    backend: BatchBackend, cases: list[Case], request: pytest.FixtureRequest
) -> None:
    state = answer.run(prompt=cases[0].prompt, backend=backend)
    several = tree.run(topic="rain", backend=backend)
    assert len(several["part"]) == 3
    engine = request.getfixturevalue("engine")
    params = {"max_new_tokens": MAX_TOKENS, "temperature": 0}
    stock = engine.generate(cases[0].prompt, params)
    assert stock["text"] == state["answer"]
    assert stock["output_ids"] == cases[0].output_ids


def test_several_answers_to_one_prompt(http: BatchBackend) -> None:
    @sgl.function
    def draw(s: Any) -> None:
        s += "Draw: " + sgl.gen("lots", n=3, max_tokens=4, temperature=0)

    (state,) = draw.run_batch([{}], backend=http)
    assert len(state["lots"]) == 3 and state.text() == "Draw: " + state["lots"][0]


def test_streams_from_a_server_only(http: BatchBackend, engine: Any) -> None:
    state = answer.run(prompt="Stream", backend=http, stream=True)
    assert "".join(state.text_iter("answer")) == state["answer"]
    with pytest.raises(EngineError, match="needs a server"):
        BatchBackend(engine).generate_stream(None, None)


def test_servers_without_offline_batches_are_refused(
    demo_model: Path, engine: Any
) -> None:
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:9 .*--offline-batch"):
        BatchBackend("http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="server=42"):
        BatchBackend(42)
    args = SimpleNamespace(model_path=str(demo_model))
    stock = SimpleNamespace(server_args=args, tokenizer_manager=None)
    with pytest.raises(EngineError, match="offline_batch=True"):
        BatchBackend(stock)
    for option in ({"max_live_programs": 0}, {"quiet_s": 0}):
        with pytest.raises(ConfigError, match=next(iter(option))):
            BatchBackend(engine, **option)
    template = BatchBackend(engine, chat_template_name="chatml").get_chat_template()
    assert template is get_chat_template("chatml")
