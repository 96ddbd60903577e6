"""What work of the host tells when it fails, to whom."""

import gc
import weakref
from functools import partial

import pytest
import torch

from zcompile.errors import UpdateBroken
from zcompile.runtime.device.cores import Cores
from zcompile.runtime.host_updates import _broken
from zcompile.runtime.transfer.host_work import HostLane, HostWork, Lent
from zcompile.runtime.transfer.ticket import Promise


class Use:
    """Of bytes that are lent, or not."""

    def __init__(self, writes, lends=True):
        self.writes, self.lends, self.home = writes, lends, Promise()

    def done(self):
        return self.home.done()

    def lend(self):
        if not self.lends:
            raise MemoryError
        return Lent(torch.zeros(8, dtype=torch.uint8), ())

    def finish(self, error):
        self.home.finish(error)


@pytest.fixture
def lane():
    made = HostLane(Cores(), pytest.fail)
    yield made
    made.stop()


def told(lane, compute, before=None, lends=True):
    uses = [Use(True), Use(False, lends)]
    work = HostWork(uses, compute, 0, partial(_broken, "a.weight", 3), lambda seconds: None)
    lane.begin(work, before)
    for use in uses:
        use.home.wait_finished()
    assert uses[1].home.error is None  # what is read only is as good as before
    return uses[0].home.error


def test_work_that_broke_off_is_told_from_work_that_never_began(lane):
    lost, ran = [], []

    def out_of_luck(memory):
        ran.append(1)
        lost.append(weakref.ref(memory[0]))
        raise RuntimeError("out of luck")

    before = OSError("no gradient")
    broke_off = told(lane, out_of_luck)
    assert ran == [1]
    never = [told(lane, out_of_luck, before), told(lane, out_of_luck, lends=False)]
    assert ran == [1]
    for error, cause in zip((broke_off, *never), (RuntimeError, OSError, MemoryError), strict=True):
        assert isinstance(error, UpdateBroken)
        assert isinstance(error.__cause__, cause)
        assert "'a.weight' by optimizer step 3" in str(error)
        assert f"{cause.__name__}: {error.__cause__}" in str(error)
        assert ("broke off" in str(error)) == (error is broke_off)
        assert ("was not computed" in str(error)) == (error is not broke_off)
    assert never[0].__cause__ is before
    gc.collect()
    assert lost[0]() is None
    assert told(lane, lambda memory: None) is None
