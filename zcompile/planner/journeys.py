"""What travels in simulated time: from when to when, over which links, and who waits for it."""

from collections.abc import Sequence

from zcompile.machine.model import Link


class Journey:
    """One transfer: `nbytes` over the links of `route`.

    over_after  how many links until its memory on the device is free, or filled
    begin_s     when its first piece set out; None before
    queued_s    when the last piece set out on the link to, or from, the device
    over_s      when its memory was free or filled
    home_s      when all of it was done
    disk_nbytes what a disk moves for it: whole granules
    unseen      a link that it passes in no time
    seconds     what it takes, if it is compute; it follows other compute by being told so
    adds        it is added to what rests there: on the host, half of each buffer for either
    blockers    how much must still happen before it sets out
    over_left   pieces whose memory on the device is not yet free or filled; home_left: not yet done
    after_over  journeys that wait for `over_s`; after_home: for `home_s`
    """

    __slots__ = ("adds", "after_home", "after_over", "begin_s", "blockers", "disk_nbytes",
                 "home_left", "home_s", "nbytes", "over_after", "over_left", "over_s", "queued_s",
                 "route", "seconds", "unseen")  # fmt: skip

    def __init__(self, nbytes: int, route: Sequence[Link] = (), over_after: int = 0,
                 seconds: float = 0.0) -> None:  # fmt: skip
        self.seconds = seconds
        self.adds = False
        self.nbytes = self.disk_nbytes = nbytes
        self.unseen: str | None = None
        self.route = route
        self.over_after = over_after
        self.begin_s: float | None = None
        self.queued_s: float | None = None
        self.over_s: float | None = None
        self.home_s: float | None = None
        self.blockers = 1
        self.over_left = self.home_left = 0
        self.after_over: list[Journey] = []
        self.after_home: list[Journey] = []

    @property
    def staged(self) -> bool:
        """Whether its pieces lie in the staging ring."""
        return self.adds or len(self.route) > 1

    @property
    def cut_in(self) -> int:
        """Times its bytes that they take of the ring."""
        return 2 if self.adds else 1

    @property
    def arrives(self) -> bool:
        """Whether it goes to the device; else from there."""
        return self.over_after == len(self.route) and not self.adds
