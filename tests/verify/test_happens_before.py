"""The order of transfers and compute, beside a closure over all events."""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from zcompile.verify.happens_before import BEGUN, Transfer, start


@dataclass
class Closure:
    """Events by number: for compute and for the end of a transfer, all that surely came before."""

    computes: list[set[int]] = field(default_factory=list)
    starts: list[set[int]] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    """Event of the end of each transfer."""
    events: int = 0

    def compute(self, waits: int | None) -> int:
        before = set(self.computes[-1]) if self.computes else set()
        if waits is not None:
            before |= {*self.starts[waits], self.ends[waits]}
        self.events += 1
        self.computes.append({*before, self.events})
        return self.events

    def transfer(self, moments: list[int], others: list[int]) -> None:
        before = set[int]()
        for moment in moments:
            before |= self.computes[moment]
        for other in others:
            before |= {*self.starts[other], self.ends[other]}
        self.events += 1
        self.starts.append(before)
        self.ends.append(self.events)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("compute"), st.none() | st.integers(0, 20), st.just(())),
        st.tuples(
            st.just("transfer"),
            st.lists(st.integers(0, 20), max_size=2).map(tuple),
            st.lists(st.integers(0, 20), max_size=2).map(tuple),
        ),
    ),
    max_size=40,
)


@settings(deadline=None, derandomize=True, max_examples=200)
@given(STEPS)
def test_every_order_of_two_events_is_that_of_the_closure(steps):
    closure = Closure()
    transfers: list[Transfer] = []
    event_at: list[int] = []
    for kind, first, second in steps:
        if kind == "compute":
            waits = first if first is not None and first < len(transfers) else None
            event_at.append(closure.compute(waits))
            if waits is not None:
                transfers[waits].wait_at(len(event_at) - 1)
        else:
            moments = [m for m in first if m < len(event_at)]
            others = [t for t in second if t < len(transfers)]
            closure.transfer(moments, others)
            transfers.append(start(moments, [transfers[t] for t in others]))
        agree(closure, transfers, event_at)


def agree(closure: Closure, transfers: list[Transfer], event_at: list[int]) -> None:
    for n, transfer in enumerate(transfers):
        for moment, event in enumerate(event_at):
            assert transfer.starts_after(moment) == (event in closure.starts[n])
            known = closure.ends[n] in closure.computes[moment]
            assert transfer.ended_by(moment) == known
        for k, other in enumerate(transfers):
            follows = closure.ends[k] in closure.starts[n]
            assert transfer.starts_after_end_of(other) == follows


def test_what_waits_for_nothing_does_not_even_follow_the_beginning():
    assert not start([], []).starts_after(BEGUN)
    assert start([BEGUN], []).starts_after(BEGUN)


def test_a_long_chain_keeps_only_what_is_under_way():
    """So that a proof takes time in proportion to the length of the list."""
    last = start([BEGUN], [])
    for moment in range(1000):
        last.wait_at(moment)
        last = start([moment], [last])
        assert len(last.after) == 0
