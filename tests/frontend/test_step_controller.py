"""The step controller: what becomes of a plan, in every state, whatever happens."""

import signal
from itertools import product
from unittest.mock import MagicMock

import pytest

from zcompile.errors import Unsupported
from zcompile.frontend.replan import TRANSITIONS, Event, State, StepController

IN_FORCE = {State.PLANNED, State.OUTDATED}
EVERY_PAIR = list(product(State, Event))


class Controller(StepController):
    """A controller whose plans are words, and for which there is a plan only if `plannable`."""

    def __init__(self, session, state, plannable):
        super().__init__(session)
        self.state, self.plannable = state, plannable
        self.plan = "the first" if state in IN_FORCE else None
        self.tried = 0

    def planned(self, step):
        self.tried += 1
        if not self.plannable:
            raise Unsupported("no plan", "nothing")
        return "another"

    def apply(self, plan):
        self.plan = plan


@pytest.fixture
def session():
    made = MagicMock()
    made.entries.return_value = []
    return made


def after(session, state, event, plannable=True):
    controller = Controller(session, state, plannable)
    controller.handle(event)
    return controller


@pytest.mark.parametrize("plannable", [True, False])
@pytest.mark.parametrize(("state", "event"), EVERY_PAIR)
def test_the_state_says_whether_a_plan_is_in_force(session, state, event, plannable):
    controller = after(session, state, event, plannable)
    assert (controller.plan is not None) == (controller.state in IN_FORCE)


def test_only_a_step_without_news_is_ignored_and_only_where_the_plan_was_withdrawn(session):
    ignored = set(EVERY_PAIR) - TRANSITIONS.keys()
    assert ignored == {(State.WITHDRAWN, Event.SAME_STEP)}
    controller = after(session, *ignored.pop())
    assert (controller.state, controller.tried) == (State.WITHDRAWN, 0)


@pytest.mark.parametrize("state", State)
def test_a_step_with_news_is_planned_in_every_state(session, state):
    controller = after(session, state, Event.NEW_STEP)
    assert (controller.state, controller.plan) == (State.PLANNED, "another")


@pytest.mark.parametrize("state", State)
def test_a_plan_that_cannot_be_made_leaves_things_as_they_are(session, state):
    controller = after(session, state, Event.NEW_STEP, plannable=False)
    assert controller.tried == 1
    assert controller.plan == ("the first" if state in IN_FORCE else None)
    controller.handle(Event.SAME_STEP)
    assert controller.tried == 1, "the same step is not tried again"


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("event", [Event.ROOM_NEEDED, Event.ARENA_RESIZES])
def test_what_rests_on_the_device_goes_back_and_the_next_step_is_planned(session, state, event):
    controller = after(session, state, event)
    assert controller.plan is None
    controller.handle(Event.SAME_STEP)
    assert controller.plan == "another"


@pytest.mark.parametrize("state", State)
def test_where_room_is_needed_too_often_only_news_bring_another_plan(session, state):
    controller = after(session, state, Event.ROOM_NEEDED_OFTEN)
    controller.handle(Event.SAME_STEP)
    assert controller.plan is None
    controller.handle(Event.NEW_STEP)
    assert controller.plan == "another"


@pytest.mark.parametrize("state", State)
def test_gradients_in_the_way_cost_no_plan_until_the_next_step_has_another(session, state):
    controller = after(session, state, Event.GRADIENTS_IN_THE_WAY)
    assert controller.plan == ("the first" if state in IN_FORCE else None)
    controller.handle(Event.SAME_STEP)
    assert controller.plan == "another"


@pytest.mark.parametrize("interrupted", ["apply", "planned", "withdraw"])
@pytest.mark.parametrize(("state", "event"), TRANSITIONS)
def test_what_breaks_off_leaves_a_true_state_and_the_next_step_is_planned(
    session, monkeypatch, state, event, interrupted
):
    """An interrupt is delivered behind what was done, or in the middle of planning."""
    controller = Controller(session, state, plannable=True)
    if interrupted == "withdraw":
        session.homes.device.open_window.side_effect = KeyboardInterrupt
    else:
        doing = getattr(controller, interrupted)
        ends = MagicMock(side_effect=lambda plan: (doing(plan), signal.raise_signal(signal.SIGINT)))
        monkeypatch.setattr(controller, interrupted, ends)
    broke_off = False
    try:
        controller.handle(event)
    except KeyboardInterrupt:
        broke_off = True
    monkeypatch.undo()
    assert (controller.plan is not None) == (controller.state in IN_FORCE)
    if broke_off:
        controller.handle(Event.SAME_STEP)
        assert (controller.state, controller.plan) == (State.PLANNED, "another")
