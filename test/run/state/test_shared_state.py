"""Jobs that machines take over from each other through a state at a URL."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from example_counts import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_batch.errors import InputError, StoreError
from sglang_batch.fleet.head_state import CRASHES, CrashCounts
from sglang_batch.request import Usage
from sglang_batch.run.job_directory import JobDirectory, JobRecord
from sglang_batch.run.outputs import Outputs
from sglang_batch.run.shared_state import StateUrl, TakenOver
from sglang_batch.run.summary import Counts, Summary
from sglang_batch.store.result_log import ResultLog

NUM_LINES = 12


class Head:
    """A run of the job on a machine, which has a folder of its own."""

    def __init__(
        self, machine: Path, *, overwrite: bool = False, sha: str = "0"
    ) -> None:
        machine.mkdir(exist_ok=True, parents=True)
        state = StateUrl(str(machine.parent / "state"))
        state.check()
        outputs = Outputs.of(str(machine / "out.jsonl"), None, None)
        self.directory = JobDirectory(outputs, state)
        self._exit = ExitStack()
        with ExitStack() as stack:
            stack.enter_context(self.directory)
            if not overwrite:
                self.directory.restore()
            record = JobRecord(input_sha256=sha, model="m", num_requests=NUM_LINES)
            self.directory.begin(record, overwrite=overwrite)
            self.log: ResultLog = self.directory.open_log()
            self._exit = stack.pop_all()

    def answer(self, *lines: int) -> None:
        for line in lines:
            text = json.dumps({"line": line, "by": self.directory.epoch()}).encode()
            self.log.put(line, text, ok=True, usage=Usage(1, 0, 1))

    def share(self) -> None:
        assert self.directory.shared is not None
        self.log.commit()
        self.directory.shared.share()

    def end(self) -> None:
        self._exit.close()

    def finish(self) -> list[int]:
        """Answer the rest, and end the job. The lines of the output."""
        self.answer(*map(int, self.log.unfinished()))
        self.share()
        before = Counts.of(self.log)
        self.directory.finish(Summary.of_log(self.log, before, seconds=1.0))
        self.directory.upload()
        self.end()
        output = self.directory.outputs.output.path.read_text().splitlines()
        return [json.loads(line)["line"] for line in output]


def test_another_machine_resumes_the_job(tmp_path: Path) -> None:
    first = Head(tmp_path / "a")
    first.answer(0, 1, 2)
    CrashCounts(first.directory.path / "crashes.json").add(["rid-1"])
    first.share()
    first.answer(3)  # and the machine is gone
    second = Head(tmp_path / "b")
    assert second.directory.job_id == first.directory.job_id
    assert second.directory.epoch() > first.directory.epoch()
    assert second.log.unfinished().tolist() == list(range(3, NUM_LINES))
    assert CrashCounts(second.directory.path / "crashes.json")["rid-1"] == 1
    with pytest.raises(TakenOver):
        first.share()
    first.end()
    assert second.finish() == list(range(NUM_LINES))
    assert not list((tmp_path / "state" / "parts").glob("*"))
    with pytest.raises(InputError, match="is complete, and its output is not here"):
        Head(tmp_path / "c")


def test_the_same_machine_keeps_what_it_had_not_shared(tmp_path: Path) -> None:
    first = Head(tmp_path / "a")
    first.answer(0, 1)
    first.share()
    first.answer(2)
    first.end()
    again = Head(tmp_path / "a")
    assert again.log.unfinished().tolist() == list(range(3, NUM_LINES))
    again.end()
    # Also where another machine ran the job in between, which did not have it.
    between = Head(tmp_path / "b")
    between.answer(2, 3)
    between.share()
    between.end()
    again = Head(tmp_path / "a")
    assert again.log.unfinished().tolist() == list(range(4, NUM_LINES))
    assert again.log.usage.output_tokens == 4
    assert again.finish() == list(range(NUM_LINES))


def test_a_job_that_had_no_state_gets_one(tmp_path: Path) -> None:
    head = Head(tmp_path / "a")
    head.answer(0, 1)
    head.end()
    (tmp_path / "state").rename(tmp_path / "gone")
    (tmp_path / "a" / "out.jsonl.job" / "state.json").unlink()
    Head(tmp_path / "a").end()
    other = Head(tmp_path / "b")
    assert other.log.num_done == 2
    other.end()


def test_overwriting_leaves_nothing_of_the_job(tmp_path: Path) -> None:
    head = Head(tmp_path / "a")
    head.answer(0, 1)
    head.share()
    head.end()
    Head(tmp_path / "b", overwrite=True).end()
    other = Head(tmp_path / "c")
    assert other.log.num_done == 0
    assert other.finish() == list(range(NUM_LINES))


def test_a_complete_job_is_not_run_again(tmp_path: Path) -> None:
    assert len(Head(tmp_path / "a").finish()) == NUM_LINES
    message = "is complete, and its output is not here: there is no .*b/out.jsonl"
    with pytest.raises(InputError, match=message):
        Head(tmp_path / "b")


def test_a_directory_with_another_job_is_kept(tmp_path: Path) -> None:
    Head(tmp_path / "a", sha="1").end()
    (tmp_path / "state").rename(tmp_path / "gone")
    Head(tmp_path / "b", sha="2").end()
    with pytest.raises(InputError, match="input_sha256 is '1' here and '2' there"):
        Head(tmp_path / "a")


@pytest.mark.parametrize("junk", [b"{", b"[]", b"[" * 100_000, b"7"])
def test_a_record_that_is_none_is_named(tmp_path: Path, junk: bytes) -> None:
    first = Head(tmp_path / "a")
    first.answer(0)
    first.share()
    first.end()
    (tmp_path / "state/job.json").write_bytes(junk)
    with pytest.raises(StoreError, match="is no record of a job"):
        Head(tmp_path / "b")


@pytest.mark.parametrize("junk", [b"{", b"[]", b"[" * 100_000, b'{"a":"b"}'])
def test_counts_of_crashes_that_are_none_are_named(tmp_path: Path, junk: bytes) -> None:
    (tmp_path / CRASHES).write_bytes(junk)
    with pytest.raises(StoreError, match=CRASHES):
        CrashCounts(tmp_path / CRASHES)


def test_a_log_larger_than_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang_batch.run.shared_state.PART_BYTES", 100)
    head = Head(tmp_path / "a")
    head.answer(*range(NUM_LINES))
    long = b'"' + b"x" * 300 + b'"'
    head.share()
    head.end()
    assert len(list((tmp_path / "state" / "parts").glob("*"))) > NUM_LINES // 3
    head = Head(tmp_path / "b", overwrite=True)
    head.log.put(0, long, ok=True, usage=Usage(1, 0, 1))
    head.answer(1)
    head.share()
    head.end()
    other = Head(tmp_path / "c")
    assert other.log.num_done == 2
    other.end()


@settings(
    max_examples=examples(30),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_a_shared_result_is_never_lost_or_doubled(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Heads come, share, vanish and are overtaken on three machines."""
    folder = tmp_path_factory.mktemp("job")
    running: dict[str, Head] = {}
    shared: dict[int, str] = {}
    for _ in range(data.draw(st.integers(1, 12))):
        machine = data.draw(st.sampled_from("abc"))
        if (head := running.get(machine)) is None:
            head = running[machine] = Head(folder / machine)
            assert not set(shared) & set(head.log.unfinished().tolist())
            continue
        left = head.log.unfinished().tolist()
        head.answer(*data.draw(st.sets(st.sampled_from(left))) if left else ())
        if data.draw(st.booleans()):
            try:
                head.share()
                done = set(range(NUM_LINES)) - set(head.log.unfinished().tolist())
                shared |= dict.fromkeys(done, machine)
            except TakenOver:
                running.pop(machine).end()
                continue
        if data.draw(st.booleans()):
            running.pop(machine).end()
    for head in running.values():
        head.end()
    last = Head(folder / data.draw(st.sampled_from("abcd")))
    assert not set(shared) & set(last.log.unfinished().tolist())
    assert last.finish() == list(range(NUM_LINES))


def test_a_part_between_restore_and_claim_runs_again(tmp_path: Path) -> None:
    first = Head(tmp_path / "a")
    first.answer(0, 1)
    first.share()
    late = StateUrl(str(tmp_path / "state"))
    claim = late.last_claim()
    assert claim is not None
    real = JobDirectory.restore

    def restore(directory: JobDirectory) -> None:
        real(directory)
        first.answer(2)
        first.share()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JobDirectory, "restore", restore)
        second = Head(tmp_path / "b")
    first.end()
    assert list(map(int, second.log.unfinished())) == list(range(2, NUM_LINES))
    second.answer(2, 3)
    second.share()
    second.end()
    third = Head(tmp_path / "c")
    assert list(map(int, third.log.unfinished())) == list(range(4, NUM_LINES))
    assert third.finish() == list(range(NUM_LINES))


def test_a_head_that_was_taken_over_finishes_nothing(tmp_path: Path) -> None:
    first = Head(tmp_path / "a")
    first.answer(*range(NUM_LINES))
    first.share()
    second = Head(tmp_path / "b")
    assert first.directory.shared is not None
    with pytest.raises(TakenOver):
        first.directory.shared.finish()
    first.end()
    second.end()
    third = Head(tmp_path / "c")
    assert not list(third.log.unfinished())
    third.end()


_HEAD = """
import sys, time
from pathlib import Path
from test_shared_state import NUM_LINES, Head
from sglang_batch.run.shared_state import TakenOver

head = Head(Path(sys.argv[1]))
print("began", flush=True)
try:
    for line in map(int, head.log.unfinished()):
        if line <= int(sys.argv[2]):
            head.answer(line)
            head.share()
            print(line, flush=True)
    for _ in range(1200):  # a minute
        head.share()
        time.sleep(0.05)
except TakenOver:
    print("taken over", flush=True)
    sys.exit(3)
"""


@pytest.mark.slow
def test_of_two_live_processes_the_later_one_runs_the_job(tmp_path: Path) -> None:
    def start(name: str, last: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", _HEAD, str(tmp_path / name), str(last)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )

    with start("a", 2) as first:
        assert first.stdout is not None
        while first.stdout.readline() != "2\n":
            assert first.poll() is None
        with start("b", 8) as second:
            assert second.stdout is not None
            assert second.stdout.readline() == "began\n"
            said = first.stdout.read().splitlines()
            assert first.wait(30) == 3 and said[-1] == "taken over"
            while second.stdout.readline() != "8\n":
                assert second.poll() is None
            second.send_signal(signal.SIGKILL)
    third = Head(tmp_path / "c")
    assert min(map(int, third.log.unfinished())) == 9
    assert third.finish() == list(range(NUM_LINES))
