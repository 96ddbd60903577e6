"""Reading a commit back leaves no file open, whatever the disk refuses."""

import errno
import os
from contextlib import ExitStack
from pathlib import Path

import pytest
from border import Border, Call
from committed import read_index
from durable_runs import Run

from zcompile.errors import DurableDamaged
from zcompile.runtime.durable.check import check_all
from zcompile.runtime.io.files import Directory


@pytest.fixture(scope="module")
def disks(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """What a run of one step left in two directories."""
    paths = [tmp_path_factory.mktemp(name) for name in "ab"]
    Run(tuple(paths)).train(0, 1).close()
    return paths


def checked(disks: list[Path], refused: dict[str, int], first: Path) -> Border:
    """`check_all`, where calls on the data file in `first` fail: name -> errno."""

    def around(call: Call, go):
        code = refused.get(call.name) if call.of == first / "zinf.tier" else None
        if code is None:
            return go()
        if call.name == "close":
            go()  # Linux gives the descriptor back, whatever it says
        raise OSError(code, os.strerror(code))

    border = Border(around)
    index, _ = read_index(disks[0])
    with ExitStack() as stack:
        directories = [stack.enter_context(Directory(path, border)) for path in disks]
        try:
            check_all(index, directories)
        finally:
            kept = [path for path in border.paths.values() if path.name == "zinf.tier"]
            assert kept == []
    return border


def test_files_are_closed_though_the_first_says_that_it_was_not(disks, caplog):
    checked(disks, {"close": errno.EIO}, disks[0])
    assert (
        f"{disks[0] / 'zinf.tier'} could not be closed or unlocked, which loses no data: "
        "Input/output error" in caplog.text
    )


@pytest.mark.parametrize("call", ["open", "pread", "dup2"])
def test_no_file_stays_open_where_one_cannot_be_read(disks, call):
    """Nor one that was to take its place, through the page cache."""
    refused = {"pread": errno.EINVAL, call: errno.EINVAL if call == "pread" else errno.EMFILE}
    with pytest.raises((DurableDamaged, OSError), match=str(disks[1])):
        checked(disks, refused, disks[1])
