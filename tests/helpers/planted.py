"""What others may put under a name that is ours, and how that is told.

Each makes it at `path`; `victim` is what a link leads to.
"""

import os
import socket
from pathlib import Path

import pytest


def link(path: Path, victim: Path) -> None:
    path.symlink_to(victim)


def hard_link(path: Path, victim: Path) -> None:
    path.hardlink_to(victim)


def fifo(path: Path, victim: Path) -> None:
    os.mkfifo(path)


def directory(path: Path, victim: Path) -> None:
    path.mkdir()


def nothing_behind(path: Path, victim: Path) -> None:
    path.symlink_to(victim.with_name("nowhere"))


def unix_socket(path: Path, victim: Path) -> None:
    bound, home = socket.socket(socket.AF_UNIX), Path.cwd()
    os.chdir(path.parent)  # the names of sockets are short
    try:
        bound.bind(path.name)
    finally:
        os.chdir(home)
        bound.close()


def device(path: Path, victim: Path) -> None:
    try:
        os.mknod(path, 0o600 | 0o020000, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("only root makes devices")


PLANTED = {
    link: "is a symbolic link",
    nothing_behind: "is a symbolic link",
    hard_link: "is known by 2 names",
    fifo: "is a FIFO",
    directory: "is a directory",
    unix_socket: "is a socket",
    device: "is a device",
}
