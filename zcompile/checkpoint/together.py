"""Where the ranks of one save meet: whatever fails on one of them is known to all when they meet
next, raises on all of them, and the run can go on.

Between two meetings a rank waits for no other, unless the code says so: a failure in the middle of
what ranks do together cannot be told at the next meeting, and ends the session of all, as one in
the middle of a step does.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from zcompile.checkpoint.directory import unwritable
from zcompile.errors import CheckpointUnwritable, RankFailed, RanksDiffer, ZinfError
from zcompile.runtime.ranks.fabric import DIGEST_BYTES, Fabric

SAVING = "save"
WELL, BLIND, FAILED = (bytes([n]) + bytes(DIGEST_BYTES - 1) for n in range(3))
"""What a rank says where ranks meet; BLIND: it does not see the directory."""


class Together:
    """The meetings of one save, and what each rank says there.

    path   as this rank has it
    named  what all ranks call it; None: the path, which is the same for all
    """

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
                raise CheckpointUnwritable(
                    errno.EIO,
                    self.path,
                    f"rank {rank} on {self.fabric.hosts[rank]} could not do its part: {text}",
                    "mend that, and save again: what stood there stands, and the run can go on",
                )
        return [rank for rank, (said, _) in enumerate(told) if said == BLIND]

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
        except (ZinfError, OSError) as error:
            if self._last:
                self.fabric.failed_here(error)
                raise
            if not self._ended:
                self._tell_failed(error)
            if isinstance(error, ZinfError):
                raise
            raise unwritable(self.path, error) from error
        except BaseException as error:
            self.fabric.failed_here(error)
            raise

    def _tell_failed(self, error: Exception) -> None:
        """Say that this rank has failed; what others have failed at is added to `error`."""
        self._ended = True
        with suppress(ZinfError):  # the session has ended, which its ranks know
            told = self._tell(FAILED, f"{type(error).__name__}: {error}")
            for rank, (said, text) in enumerate(told):
                if said == FAILED and rank != self.fabric.rank:
                    error.add_note(f"rank {rank} on {self.fabric.hosts[rank]} failed too: {text}")

    def _tell(self, says: bytes, text: str) -> list[tuple[bytes, str]]:
        return self.fabric.tell(SAVING, says, self._named, text=text)
