"""Where ranks that save, or read a checkpoint, meet: whatever fails on one of them is known to all
when they meet next, raises on all of them, and the run can go on.

Between two meetings a rank waits for no other, unless the code says so: a failure in the middle of
what ranks do together cannot be told at the next meeting, and ends the session of all, as one in
the middle of a step does.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeGuard

from zcompile.checkpoint.directory import unwritable
from zcompile.errors import (
    CheckpointInvalid,
    CheckpointUnwritable,
    RankFailed,
    RanksDiffer,
    ZinfError,
)
from zcompile.runtime.progress import working
from zcompile.runtime.ranks.fabric import DIGEST_BYTES, Fabric

SAVING = "save"
WELL, BLIND, FAILED = (bytes([n]) + bytes(DIGEST_BYTES - 1) for n in range(3))
"""What a rank says where ranks meet; BLIND: it does not see the directory."""


class Together:
    """The meetings of one save, and what each rank says there.

    path   as this rank has it
    named  what all ranks call it; None: the path, which is the same for all
    """

    DOING = SAVING
    """What ranks agree that they do."""
    TOLD: tuple[type[Exception], ...] = (ZinfError, OSError)
    """Errors that are told at the next meeting; others end the session."""

    def __init__(self, fabric: Fabric, path: Path, named: str | None = None) -> None:
        self.fabric, self.path = fabric, path
        self._named = str(path) if named is None else named
        self._ended = False
        self._last = False

    def meet(self, says: bytes = WELL) -> list[int]:
        """Wait until all ranks have come here; returns the ranks that are blind.

        raises  CheckpointUnwritable, if a rank has failed; RanksDiffer, RankFailed
        """
        told = self._tell(says, self._named)
        for rank, (said, text) in enumerate(told):
            if said == FAILED:
                self._ended = True
                raise self._refusal(f"rank {rank} on {self.fabric.hosts[rank]}", text)
        return [rank for rank, (said, _) in enumerate(told) if said == BLIND]

    @property
    def met_last(self) -> bool:
        """Whether the last meeting is over."""
        return self._last

    def meet_last(self) -> None:
        """As `meet`; what follows is told to the ranks as a failure in the middle of a step is."""
        self.meet()
        self._last = True

    @contextmanager
    def telling(self) -> Iterator[None]:
        """A context in which this rank does its part: where it fails, all ranks are told, before
        what they may still use is removed by who is around the context.

        raises  CheckpointUnwritable too, for errors of the system
        """
        try:
            yield
        except (RankFailed, RanksDiffer):
            raise
        except self.TOLD as error:
            if self._last:
                self.fabric.failed_here(error)
                raise
            if not self._ended:
                self._tell_failed(error)
            if (shown := self._shown(error)) is error:
                raise
            raise shown from error
        except BaseException as error:
            self.fabric.failed_here(error)
            raise

    def _refusal(self, who: str, why: str) -> ZinfError:
        """The error of a rank whose own part was well. who: rank and host"""
        return CheckpointUnwritable(
            errno.EIO,
            self.path,
            f"{who} could not do its part: {why}",
            "mend that, and save again: what stood there stands, and the run can go on",
        )

    def _shown(self, error: Exception) -> Exception:
        """What the rank raises that has failed."""
        return unwritable(self.path, error) if _is_of_the_system(error) else error

    def _tell_failed(self, error: Exception) -> None:
        """Say that this rank has failed; what others have failed at is added to `error`."""
        self._ended = True
        with suppress(ZinfError):  # the session has ended, which its ranks know
            told = self._tell(FAILED, f"{type(error).__name__}: {error}")
            for rank, (said, text) in enumerate(told):
                if said == FAILED and rank != self.fabric.rank:
                    error.add_note(f"rank {rank} on {self.fabric.hosts[rank]} failed too: {text}")

    def _tell(self, says: bytes, text: str) -> list[tuple[bytes, str]]:
        return self.fabric.tell(self.DOING, says, self._named, text=text)


def _is_of_the_system(error: Exception) -> TypeGuard[OSError]:
    return isinstance(error, OSError) and not isinstance(error, ZinfError)


class _ReadTogether(Together):
    """The meetings of ranks that read a checkpoint; nothing has changed before the last of them."""

    DOING = "read a checkpoint"
    TOLD = (Exception,)

    def _refusal(self, who: str, why: str) -> ZinfError:
        return CheckpointInvalid(
            self.path,
            f"was not read, since {who} cannot read its part: {why}",
            "mend that, and call it again on all ranks: nothing has changed, and the run can go on",
        )

    def _shown(self, error: Exception) -> Exception:
        return error


ENDED = (
    "the ranks cannot go on after it, since some of them may have new values: close the model on "
    "all, offload it again, and read again"
)


class Meetings:
    """The two meetings of ranks that read a checkpoint; of one process alone, which meets nobody.

    raises  CheckpointInvalid, if another rank has failed; RanksDiffer, RankFailed
    """

    def found(self) -> None:
        """This rank has found what it is to read."""

    def ready(self) -> None:
        """It has found nothing to refuse; from here on things change."""


class _MeetingsOfRanks(Meetings):
    def __init__(self, together: _ReadTogether) -> None:
        self._together = together

    def found(self) -> None:
        self._together.meet()

    def ready(self) -> None:
        self._together.meet_last()


@contextmanager
def reading(fabric: Fabric | None, where: str) -> Iterator[Meetings]:
    """A context in which ranks read a checkpoint; all of them call `found`, and then `ready`.

    What fails on one rank before that raises on all, and the run can go on; what fails after it
    ends the session of all, as a failure in the middle of a step does. At the end all are known to
    have read theirs. Ranks wait for each other for as long as one reads or checks.

    fabric  None: one process reads
    where   the checkpoint, for people; ranks may have it under different names
    raises  CheckpointInvalid, if another rank has found something; RankFailed, RanksDiffer
    """
    if fabric is None:
        yield Meetings()
        return
    together = _ReadTogether(fabric, Path(where), "")
    with working(f"reading {where}"), together.telling():
        try:
            yield _MeetingsOfRanks(together)
            fabric.agree("have read a checkpoint")
        except BaseException as error:
            if _ends_ranks(error, together) and ENDED not in getattr(error, "__notes__", ()):
                error.add_note(ENDED)
            raise


def _ends_ranks(error: BaseException, together: _ReadTogether) -> bool:
    """Whether the ranks cannot go on after an error."""
    told_at_the_next_meeting = isinstance(error, together.TOLD) and not together.met_last
    return isinstance(error, (RankFailed, RanksDiffer)) or not told_at_the_next_meeting
