"""The two ends of a session: every command and event once, whatever the network does."""

from __future__ import annotations

from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sglang_batch.fleet.messages import (
    AbortLine,
    Exchange,
    Leaving,
    Reply,
    Session,
    SessionRefused,
)
from sglang_batch.fleet.session_ends import MAX_PER_CALL, HeadEnd, WorkerEnd

LEASE_S = 8.0


class Network(RuleBasedStateMachine):
    """Calls and replies that are delivered late, never, twice and in any order."""

    @initialize()
    def begin(self) -> None:
        self.now = 0.0
        self.number = 0
        self.worker = WorkerEnd(LEASE_S)
        self.to_worker: list[Exchange] = []
        self.to_head: list[Reply | SessionRefused] = []
        self.attach()

    @rule()
    def attach(self) -> None:
        self.number += 1
        session = Session(1, self.number)
        assert self.worker.attach(session, self.now) is True
        self.head = HeadEnd(session)
        self.sent = self.applied = self.emitted = self.received = 0

    @rule(count=st.integers(1, 3))
    def command(self, count: int) -> None:
        for _ in range(count):
            self.sent += 1
            self.head.add(AbortLine(f"{self.number}:{self.sent}"))

    @rule(count=st.integers(1, 3))
    def event(self, count: int) -> None:
        for _ in range(count):
            self.emitted += 1
            self.worker.add(Leaving(f"{self.number}:{self.emitted}"))

    @rule(waiting=st.booleans())
    def call(self, waiting: bool) -> None:
        self.to_worker.append(
            self.head.waiting_call(1.0) if waiting else self.head.call()
        )

    @rule()
    def repeat(self) -> None:
        self.head.repeat()

    @rule(data=st.data(), twice=st.booleans())
    def deliver_call(self, data: st.DataObject, twice: bool) -> None:
        if not self.to_worker:
            return
        call = data.draw(st.sampled_from(self.to_worker))
        if not twice:
            self.to_worker.remove(call)
        commands = self.worker.receive(call, self.now)
        if isinstance(commands, SessionRefused):
            assert call.session != self.worker.session
            self.to_head.append(commands)
            return
        for command in commands:
            self.applied += 1
            assert command == AbortLine(f"{self.number}:{self.applied}")
        self.to_head.append(self.worker.reply())

    @rule(data=st.data(), twice=st.booleans())
    def deliver_reply(self, data: st.DataObject, twice: bool) -> None:
        if not self.to_head:
            return
        reply = data.draw(st.sampled_from(self.to_head))
        if not twice:
            self.to_head.remove(reply)
        if isinstance(reply, SessionRefused):
            return
        for event in self.head.receive(reply):
            self.received += 1
            assert event == Leaving(f"{self.number}:{self.received}")

    @rule()
    def lose_all(self) -> None:
        self.to_worker.clear()
        self.to_head.clear()

    @rule()
    def arrives_once_the_network_works(self) -> None:
        self.head.repeat()
        for _ in range(2):
            call = self.head.call()
            commands = self.worker.receive(call, self.now)
            assert not isinstance(commands, SessionRefused)
            self.applied += len(commands)
            self.received += len(self.head.receive(self.worker.reply()))
        assert self.applied == self.sent
        assert self.received == self.emitted
        assert not self.head.has_unsent

    @invariant()
    def nothing_is_doubled(self) -> None:
        assert self.applied <= self.sent
        assert self.received <= self.emitted


TestNetwork = Network.TestCase
TestNetwork.settings = settings(
    max_examples=examples(200), stateful_step_count=40, deadline=None
)


def attached(session: Session) -> WorkerEnd:
    worker = WorkerEnd(LEASE_S)
    assert worker.attach(session, 0.0) is True
    return worker


def call_of(session: Session) -> Exchange:
    return HeadEnd(session).call()


def test_attaching_twice_with_one_session_keeps_what_it_has() -> None:
    worker = attached(Session(1, 1))
    worker.add(Leaving("soon"))
    assert worker.attach(Session(1, 1), 1.0) is False
    assert worker.has_events


def test_a_later_head_ends_the_session_of_an_earlier_one() -> None:
    worker = attached(Session(1, 7))
    worker.add(Leaving("soon"))
    assert worker.attach(Session(2, 1), 1.0) is True
    assert not worker.has_events
    assert worker.receive(call_of(Session(1, 7)), 1.0) == SessionRefused(Session(2, 1))
    assert worker.attach(Session(1, 8), 1.0) == SessionRefused(Session(2, 1))


@given(st.floats(0.0, 20.0))
def test_without_calls_the_session_ends_with_its_lease(silence_s: float) -> None:
    worker = attached(Session(1, 1))
    assert worker.lapse(silence_s) is (silence_s >= LEASE_S)
    refused = worker.receive(call_of(Session(1, 1)), silence_s)
    assert isinstance(refused, SessionRefused) is (silence_s >= LEASE_S)


def test_a_session_that_has_ended_does_not_begin_again() -> None:
    worker = attached(Session(1, 1))
    assert worker.lapse(LEASE_S)
    assert isinstance(worker.attach(Session(1, 1), LEASE_S), SessionRefused)
    assert worker.attach(Session(1, 2), LEASE_S) is True


def test_every_call_renews_the_lease() -> None:
    worker = attached(Session(1, 1))
    for now in range(1, 30, 7):
        assert not isinstance(
            worker.receive(call_of(Session(1, 1)), now), SessionRefused
        )
        assert not worker.lapse(now + LEASE_S - 1)


def test_a_worker_that_has_started_anew_refuses_without_a_session() -> None:
    assert WorkerEnd(LEASE_S).receive(call_of(Session(3, 1)), 0.0) == SessionRefused(
        None
    )


def test_one_call_has_so_many_commands_and_events_at_most() -> None:
    worker, head = attached(Session(1, 1)), HeadEnd(Session(1, 1))
    for i in range(2 * MAX_PER_CALL + 1):
        head.add(AbortLine(str(i)))
        worker.add(Leaving(str(i)))
    found, received = 0, 0
    for _ in range(3):
        commands = worker.receive(head.call(), 0.0)
        assert not isinstance(commands, SessionRefused)
        assert len(commands) <= MAX_PER_CALL
        found += len(commands)
        received += len(head.receive(worker.reply()))
    assert found == received == 2 * MAX_PER_CALL + 1
