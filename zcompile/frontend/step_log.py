"""Writes what a run says of its steps while it goes (`zinf watch`), and samples what was measured.

A line takes some tens of microseconds, and there are ten a second at most: short steps share one.
Nothing that the process computes hangs on the log. Where it cannot be written any more (a full
disk), one warning says so, and that is all.
"""

import logging
import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from zcompile.errors import ZinfError
from zcompile.frontend.replan import plan_in_force, why_unplanned
from zcompile.frontend.session_plan import costs_of
from zcompile.ir import step_log as form
from zcompile.ir.version import VERSION
from zcompile.planner.simulator import step_seconds
from zcompile.planner.step_plan import StepPlan
from zcompile.runtime.probe import machine_for
from zcompile.runtime.session import Session

log = logging.getLogger(__name__)

EVERY_S = 0.1
"""Least seconds between two lines."""
MOST_BYTES = 4 << 20
"""Size at which the log is written anew, with the newest lines alone."""


class Sampler:
    """Takes what was measured of a session since the sample before.

    whole_steps  of the session's clocks, by the last sample
    """

    def __init__(self, session: Session) -> None:
        self._all, self._traffic = session.meter.in_all(), session.meter.traffic()
        clocks = session.executor.clocks
        self.whole_steps, self._whole_s = clocks.whole_steps, clocks.whole_s

    def take(self, session: Session, step: int, count: int) -> form.Stepped:
        """What happened in the last `count` steps, of which `step` is the number of the last. Waits
        for nothing: what the device has not done yet is of the next sample."""
        meter, clocks, before, then = (
            session.meter,
            session.executor.clocks,
            self._all,
            self._traffic,
        )
        now, traffic = meter.in_all(), meter.traffic()
        spent = {name: _us(s - before.seconds[name]) for name, s in now.seconds.items()}
        timed = clocks.whole_steps > self.whole_steps
        busy_s = {link: _us(s - then.get(link, (0, 0.0))[1]) for link, (_, s) in traffic.items()}
        made = form.Stepped(
            step=step,
            count=count,
            time=time.time(),
            seconds=_us(clocks.whole_s - self._whole_s) if timed else None,
            compute_s=spent["compute"],
            stall_s=spent["stall"],
            optimizer_s=spent["optimizer"],
            nbytes={link: n - before.nbytes[link] for link, n in now.nbytes.items()},
            busy_s=busy_s,
            used={"device": meter.together.now, "host": meter.host.now, "disk": meter.disk.now},
            peak={"device": meter.together.peak, "host": meter.host.peak, "disk": meter.disk.peak},
        )
        self._all, self._traffic = now, traffic
        self.whole_steps, self._whole_s = clocks.whole_steps, clocks.whole_s
        return made


class Prediction:
    """What a step should take: made when a plan comes into force, and after 2, 4, 8, ... steps at
    what was measured by then.

    plan     the one in force
    number   how many there have been
    seconds  of a step; None without a plan
    """

    def __init__(self) -> None:
        self.plan: StepPlan | None = None
        self.number = 0
        self.seconds: float | None = None
        self._made_at = 1

    def renew(self, session: Session, steps: int) -> bool:
        """Make it anew if it is time, after so many steps; whether it was."""
        plan = plan_in_force(session)
        if plan is self.plan and steps.bit_length() <= self._made_at.bit_length():
            return False
        self.number += plan is not None and plan is not self.plan
        self.plan, self.seconds, self._made_at = plan, None, max(1, steps)
        if plan is not None:
            self.seconds = step_seconds(plan.step, costs_of(session), plan.placement.homes)
        return True


def _us(seconds: float) -> float:
    """Seconds to the microsecond, which is short to write."""
    return round(seconds, 6)


def write_steps(session: Session, run: Path) -> None:
    """Write the steps of `session` to the run from here on."""
    clocks = session.executor.clocks
    if not clocks.has_listener:
        writer = _Writer(session, run)
        clocks.listen(writer)
        weakref.finalize(session, writer.end)  # called at the end of the process too


class _Writer:
    """Writes the steps of one session, which it does not keep alive."""

    def __init__(
        self, session: Session, run: Path, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._session = weakref.ref(session)
        self._path = form.log_file(run)
        self._clock = clock
        self._pid = os.getpid()
        self._file: int | None = None
        self._size = 0
        self._kept: deque[bytes] = deque(maxlen=form.KEPT)
        self._steps = self._written = 0
        self._unfinished = False
        """An optimizer is done, and the next step has not begun."""
        self._wrote = clock()
        self._sampler, self._prediction = Sampler(session), Prediction()
        root = session.root() if session.root is not None else None
        begun = form.Begun(
            form.FORMAT,
            VERSION,
            type(root).__name__ if root is not None else "a model",
            str(session.device.torch_device),
            form.this_process(),
            time.time(),
        )
        self._begun = form.line(begun)
        self._planned = form.line(self._in_force(session))
        self._open(self._begun + self._planned)

    # What happens.

    def stepped(self) -> None:
        self._unfinished = True

    def over(self) -> None:
        self._unfinished = False
        self._steps += 1
        now = self._clock()
        if self._file is None or (self._steps > 1 and now - self._wrote < EVERY_S):
            return
        session = self._session()
        if session is None or os.getpid() != self._pid:
            return
        self._wrote = now
        count = self._steps - self._written
        self._written = self._steps
        line = form.line(self._sampler.take(session, self._steps, count))
        self._kept.append(line)
        if self._prediction.renew(session, self._steps):
            self._planned = form.line(self._in_force(session))
            line += self._planned
        self._write(line)

    def end(self) -> None:
        """The session is gone, or the process ends."""
        if self._file is None or os.getpid() != self._pid:
            return
        error = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
        why = "" if error is None else f"{type(error).__name__}: {error}"[:200]
        step = self._steps + self._unfinished
        self._write(form.line(form.Ended(step, time.time(), why)))
        self._close()

    # What is told.

    def _in_force(self, session: Session) -> form.Planned:
        prediction = self._prediction
        plan, links = prediction.plan, {}
        if self._steps > 1:  # by now rates were measured for planning: they are looked up
            with suppress(ZinfError):
                machine = machine_for(session.config, session.device)
                links = {
                    name: form.Capacity(link.bytes_per_s, link.shares)
                    for name, link in machine.links.items()
                }
        binding = plan.placement.binding if plan is not None else {}
        return form.Planned(
            prediction.number if plan is not None else 0,
            why_unplanned(session),
            prediction.seconds,
            {phase.value: by for phase, by in binding.items()},
            links,
            session.budgets,
        )

    # The file.

    def _open(self, text: bytes) -> None:
        """Put `text` in the place of the file, at once."""
        beside = self._path.with_suffix(".tmp")
        try:
            self._close()
            file = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
            self._file, self._size = file, 0
            os.replace(beside, self._path)
        except OSError as error:
            self._fail(error)
        else:
            self._write(text)

    def _write(self, text: bytes) -> None:
        if self._file is None:
            return
        if self._size + len(text) > MOST_BYTES:
            self._open(b"".join((self._begun, self._planned, *self._kept)))
            return
        try:
            written = os.write(self._file, text)
        except OSError as error:
            self._fail(error)
            return
        self._size += written
        if written < len(text):
            self._fail(OSError("the disk is full"))

    def _fail(self, error: OSError) -> None:
        """Training goes on: nothing that it computes hangs on the log."""
        log.warning("%s takes no steps any more: %s", self._path, error.strerror or error)
        self._close()

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                os.close(file)
