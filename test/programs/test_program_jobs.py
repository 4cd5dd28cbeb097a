"""Frontend programs with a named job, which later runs resume."""

from __future__ import annotations

import errno
import logging
import math
import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from wave_server import WAIT_S, WaveServer

from sglang_batch.errors import ConfigError, StoreError, StoreWriteError
from sglang_batch.lang.program_log import ProgramJob

with warnings.catch_warnings():
    # Importing SGLang without an accelerator raises warnings.
    warnings.simplefilter("ignore")
    import sglang as sgl

    from sglang_batch.lang import BatchBackend, EarlierError, RequestError

NIGHT = 40


@pytest.fixture
def server() -> Iterator[WaveServer]:
    with WaveServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.gate.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def backend(server: WaveServer, tmp_path: Path) -> BatchBackend:
    return job(server, tmp_path)


def job(server: WaveServer, tmp_path: Path, **options: Any) -> BatchBackend:
    return BatchBackend(server.url, job="night-1", job_dir=tmp_path, **options)


@sgl.function
def ask(s: Any, question: str) -> None:
    s += question
    s += sgl.gen("answer", max_tokens=8)


def questions(*names: str) -> list[dict[str, str]]:
    return [{"question": name} for name in names]


def texts(states: Any) -> list[str]:
    return [state.text() for state in states]


# Resuming ------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_killed_run_is_resumed_and_repeats_nothing(
    server: WaveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [f"{('quick', 'slow')[i % 2]} {i:03}" for i in range(NIGHT)]

    def run() -> list[Any]:
        return ask.run_batch(questions(*asked), backend=job(server, tmp_path))

    log = tmp_path / "night-1.jsonl"
    # A fork, since importing SGLang anew takes seconds.
    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    try:
        deadline = time.monotonic() + WAIT_S
        while not log.exists() or log.read_bytes().count(b"\n") < NIGHT // 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        process.kill()
        process.join()
    assert process.exitcode == -signal.SIGKILL
    server.gate.set()

    states = run()

    # The others were called before too, but were in flight at the kill.
    quick = [call for call in server.calls if "quick" in call]
    assert sorted(quick) == [question for question in asked if "quick" in question]
    assert texts(states) == [f"{q} [{q[-9:]}]" for q in asked]
    assert [s["answer"] for s in states] == [f" [{q[-9:]}]" for q in asked]
    assert "job night-1: 20 of 40 programs were finished before" in (
        capsys.readouterr().err
    )


@sgl.function
def rich(s: Any, topic: str, tags: Any = ("a",)) -> Any:
    s += sgl.user(f"About {topic}.")
    s += sgl.assistant(sgl.gen("plan", max_tokens=4))
    branches = s.fork(2)
    for branch in branches:
        branch += " part " + sgl.gen("part", max_tokens=4)
    branches.join()
    s += sgl.select("verdict", choices=["yes", "no"])
    s["mixed"] = [(1, b"\0"), {2: None, "$x": math.inf}, {"$tuple": 1.5}, True]
    s["big"] = 2**70
    return (s["plan"], tags)


def looks(state: Any) -> list[Any]:
    names = ("plan", "part", "verdict", "mixed", "big")
    return [
        state.text(),
        state.messages(),
        [state[name] for name in names],
        [state.get_meta_info(name) for name in names],
        state.ret_value,
        list(state.text_iter()),
        list(state.text_iter("plan")),
        state.error(),
        "plan" in state,
        "other" in state,
    ]


def test_a_restored_state_equals_the_original(
    backend: BatchBackend, server: WaveServer, tmp_path: Path
) -> None:
    topics = [{"topic": "sun"}, {"topic": "sea", "tags": ("b",)}]
    fresh = rich.run_batch(topics, backend=backend)
    assert [s.error() for s in fresh] == [None, None]
    num_calls = len(server.calls)

    again = job(server, tmp_path)
    for states in (
        rich.run_batch(topics, backend=again),
        rich.run_batch([["sun", ("a",)], ["sea", ("b",)]], backend=again),
        rich.bind(tags=("b",)).run_batch([{"topic": "sea"}], backend=again) * 2,
    ):
        assert looks(states[1]) == looks(fresh[1])
    assert looks(rich.run_batch(topics, backend=again)[0]) == looks(fresh[0])
    assert len(server.calls) == num_calls and not again.wave_sizes
    with pytest.raises(KeyError):
        states[0]["other"]
    # A restored state can be extended.
    states[0] += sgl.user("More?") + sgl.gen("more", max_tokens=4)
    assert states[0].text().endswith(states[0]["more"])


def test_the_same_arguments_twice_are_two_programs(
    backend: BatchBackend, server: WaveServer
) -> None:
    def numbers(*names: str) -> list[int]:
        states = ask.run_batch(questions(*names), backend=backend)
        return [state.get_meta_info("answer")["number"] for state in states]

    first = numbers("x", "y", "x")
    assert len(set(first)) == 3
    assert numbers("x", "x", "y") == [first[0], first[2], first[1]]
    assert set(numbers("x", "x", "x")) > {first[0], first[2]}
    assert len(server.calls) == 4


def test_other_parameters_are_other_programs(
    backend: BatchBackend, server: WaveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    for temperature in (0.0, 0.5, 0.0):
        ask.run_batch(questions("x"), backend=backend, temperature=temperature)
    assert len(server.calls) == 2
    shown = capsys.readouterr().err
    assert ["0 of 1" in shown, "1 of 1" in shown] == [True, True]


# Failures ------------------------------------------------------------------------


@sgl.function
def fragile(s: Any, question: str) -> None:
    if question == "raise":
        raise LookupError(question)
    s += question
    s += sgl.gen("answer", max_tokens=8)


def test_failed_programs_run_again_by_default(
    backend: BatchBackend, server: WaveServer, tmp_path: Path
) -> None:
    asked = questions("fine", "bad", "raise")
    fragile.run_batch(asked, backend=backend)
    fragile.run_batch(asked, backend=backend)
    assert sorted(server.calls) == ["bad", "bad", "fine"]

    resigned = job(server, tmp_path, retry_failed=False)
    fine, bad, raised = fragile.run_batch(asked, backend=resigned)
    assert len(server.calls) == 3
    assert fine.error() is None
    rejected = bad.error()
    assert isinstance(rejected, RequestError) and bad.text() == "bad"
    shown = (rejected.status_code, rejected.message, rejected.param)
    assert shown == (400, "too bad", "text")
    assert isinstance(raised.error(), EarlierError)
    assert str(raised.error()) == "LookupError: raise"


def test_a_lost_connection_is_not_kept_as_a_result(
    server: WaveServer, tmp_path: Path
) -> None:
    backend = job(server, tmp_path, retry_failed=False)
    server.broken = True
    lost = ask.run_batch(questions("a", "b"), backend=backend)
    assert all(state.error() is not None for state in lost)
    server.broken = False
    states = ask.run_batch(questions("a", "b"), backend=backend)
    assert [state.error() for state in states] == [None, None]


def test_programs_failed_by_a_stop_are_not_kept(
    backend: BatchBackend, server: WaveServer
) -> None:
    @sgl.function
    def stubborn(s: Any, question: str) -> None:
        s += question
        try:
            s += sgl.gen("answer", max_tokens=8)
        except Exception:
            s["answer"] = "gave up"

    asked = questions("quick", "slow")
    states = stubborn.run_batch(asked, backend=backend, generator_style=True)
    assert next(states)["answer"] == " [quick]"
    states.close()
    server.gate.set()
    assert stubborn.run_batch(asked, backend=backend)[1]["answer"] == " [slow]"
    assert server.calls.count("quick") == 1


def test_results_that_cannot_be_kept_are_logged_and_run_again(
    backend: BatchBackend, server: WaveServer, caplog: pytest.LogCaptureFixture
) -> None:
    @sgl.function
    def odd(s: Any, question: str) -> None:
        s += question + sgl.gen("answer", max_tokens=8)
        s["odd"] = object()

    for _ in range(2):
        states = odd.run_batch(questions("a", "b"), backend=backend)
        assert [state.error() for state in states] == [None, None]
    assert len(server.calls) == 4
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == 2 and "its variable 'odd' holds a builtins.object" in said[0]


# Streamed results ------------------------------------------------------------------


def test_the_first_result_is_yielded_and_kept_while_others_run(
    backend: BatchBackend, server: WaveServer, tmp_path: Path
) -> None:
    asked = questions("quick", "slow one", "slow two")
    states = ask.run_batch(asked, backend=backend, generator_style=True)
    assert next(states)["answer"] == " [quick]"
    assert not server.gate.is_set()
    assert (tmp_path / "night-1.jsonl").read_bytes().count(b"\n") == 1
    server.gate.set()
    assert texts(states) == ["slow one [slow one]", "slow two [slow two]"]


def test_stages_of_a_pipeline_share_a_job(
    backend: BatchBackend, server: WaveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    def pipeline() -> list[str]:
        first = ask.run_batch(
            questions("a", "b"), backend=backend, generator_style=True
        )
        return [
            rich.run_batch([{"topic": s["answer"]}], backend=backend)[0]["verdict"]
            for s in first
        ]

    assert pipeline() == pipeline() == ["yes", "yes"]
    assert len(server.calls) == 2 + 2 * 3
    assert "job night-1: 2 of 2 programs" in capsys.readouterr().err


# Which programs are the same --------------------------------------------------------


def compiled(source: str, **outside: Any) -> Any:
    names = {"sgl": sgl, "__name__": "script", **outside}
    exec(source, names)
    return names["program"]


SOURCE = """
def hint(s): return HINT
@sgl.function
def program(s, q):
    s += hint(q) + q
    s += sgl.gen("a", max_tokens=4)
"""


@pytest.mark.parametrize(
    ("source", "hint", "is_same"),
    [
        (SOURCE.replace("    s += hint", "    # Why.\n\n    s += hint"), "h", True),
        (SOURCE.replace("hint(q) + q", "q + hint(q)"), "h", False),
        (SOURCE.replace("return HINT", "return HINT + '!'"), "h", False),
        (SOURCE, "Hint", False),
    ],
    ids=["comment", "code", "helper", "constant"],
)
def test_a_changed_program_is_another(
    backend: BatchBackend,
    server: WaveServer,
    caplog: pytest.LogCaptureFixture,
    source: str,
    hint: str,
    is_same: bool,
) -> None:
    asked = [{"q": "x"}, {"q": "y"}]
    compiled(SOURCE, HINT="h").run_batch(asked, backend=backend)
    compiled(source, HINT=hint).run_batch(asked, backend=backend)
    assert len(server.calls) == (2 if is_same else 4)
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(said) == (source != SOURCE and not is_same)
    assert all("holds 2 results of another version of the program" in s for s in said)


def test_arguments_are_compared_by_content(
    backend: BatchBackend, server: WaveServer
) -> None:
    from PIL import Image

    @sgl.function
    def see(s: Any, thing: Any) -> None:
        s += "Seen: " + sgl.gen("a", max_tokens=4)

    def things(value: int) -> list[dict[str, Any]]:
        image = Image.new("RGB", (2, 2), (value, 0, 0))
        array = np.full((2, 2), value, np.float32)
        shown = [image, array, array.astype(int), array[0, 0], bytes([value] * 4)]
        return [{"thing": t} for t in [*shown, Path(str(value)), {"a": [value]}]]

    see.run_batch(things(1), backend=backend)
    see.run_batch(things(1), backend=backend)
    assert len(server.calls) == len(things(1))
    see.run_batch(things(2), backend=backend)
    assert len(server.calls) == 2 * len(things(1))

    with pytest.raises(
        ConfigError, match=r"'thing' of program number 1 .*object.*job="
    ):
        see.run_batch([{"thing": 3}, {"thing": object()}], backend=backend)
    assert len(server.calls) == 2 * len(things(1))


# The file ------------------------------------------------------------------------


def test_a_torn_last_record_is_dropped_and_damage_is_reported(
    backend: BatchBackend, server: WaveServer, tmp_path: Path
) -> None:
    asked = questions("a", "b", "c")
    ask.run_batch(asked, backend=backend, num_threads=1)
    log = tmp_path / "night-1.jsonl"
    whole = log.read_bytes()

    log.write_bytes(whole[:-9])
    assert texts(ask.run_batch(asked, backend=backend)) == ["a [a]", "b [b]", "c [c]"]
    assert server.calls == ["a", "b", "c", "c"]

    log.write_bytes(b"{" + whole)
    with pytest.raises(StoreError, match=r"night-1\.jsonl: the record at byte 0"):
        ask.run_batch(asked, backend=backend)
    log.write_bytes(whole)
    assert len(ask.run_batch(asked, backend=backend)) == 3


def test_a_failing_disk_is_reported(
    backend: BatchBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "the disk is gone")

    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(StoreWriteError, match=r"night-1\.jsonl: the disk is gone"):
        ask.run_batch(questions("a"), backend=backend)
    monkeypatch.undo()
    assert texts(ask.run_batch(questions("a"), backend=backend)) == ["a [a]"]


def test_one_process_at_a_time_runs_a_job(
    backend: BatchBackend, server: WaveServer, tmp_path: Path
) -> None:
    states = ask.run_batch(questions("a", "b"), backend=backend, generator_style=True)
    next(states)
    other = job(server, tmp_path)
    with pytest.raises(StoreError, match=rf"'night-1' .* run by pid {os.getpid()};"):
        ask.run_batch(questions("a"), backend=other)
    states.close()
    assert texts(ask.run_batch(questions("a"), backend=other)) == ["a [a]"]


def test_names_and_directories_of_jobs(tmp_path: Path) -> None:
    for name in ("", "a/b", ".hidden", "x" * 201, 7):
        with pytest.raises(ConfigError, match=r"job=.*night-1"):
            ProgramJob(name, tmp_path)  # type: ignore[arg-type]
    assert ProgramJob("n").directory.parts[-2:] == ("sglang-batch", "programs")
    with (shared := ProgramJob("n", tmp_path)).open() as first, shared.open() as second:
        assert first is second
    (tmp_path / "file").touch()
    with (
        pytest.raises(StoreError, match="job_dir="),
        ProgramJob("n", tmp_path / "file").open(),
    ):
        pass


# Priority -------------------------------------------------------------------------


def test_a_backend_gives_its_waves_their_priority(server: WaveServer) -> None:
    for priority in (None, -7):
        backend = BatchBackend(server.url, priority=priority)
        ask.run_batch(questions("one"), backend=backend)
    assert set(server.priorities) == {None, -7}
    assert server.priorities[-1] == -7
    with pytest.raises(ConfigError, match="priority=1001 must be -1000 to 1000"):
        BatchBackend(server.url, priority=1001)
