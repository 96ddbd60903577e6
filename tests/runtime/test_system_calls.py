"""All calls on files pass one object, which whoever opens a store may choose."""

import ast
import errno
import os
from pathlib import Path

import pytest
import torch
from border import CALLS, Border, offloaded
from torch import nn

import zcompile
from zcompile.errors import CommitFailed, IOFault
from zcompile.frontend.offload import session_behind

ROOT = Path(__file__).parents[2] / "zcompile"
FIELDS = {"device": "cpu", "device_memory": "4MiB", "host_memory": "256KiB"}
BEHIND = (
    "runtime/tiers/directory_lock.py",
    "runtime/tiers/disk.py",
    "runtime/durable/index.py",
    "runtime/durable/files.py",
    "runtime/durable/directory.py",
    "runtime/durable/check.py",
    "runtime/durable/recover.py",
    "runtime/durable/tier.py",
    "runtime/durable/commit.py",
    "runtime/io/files.py",
    "runtime/io/trial.py",
    "runtime/io/engine.py",
    "checkpoint/checkpoint.py",
    "checkpoint/directory.py",
    "checkpoint/durable.py",
    "checkpoint/file.py",
    "checkpoint/block_files.py",
    "checkpoint/safetensors.py",
    "checkpoint/stream.py",
    "checkpoint/weights.py",
    "cli/disk.py",
)
"""What makes no call on a file by itself."""
HARMLESS = {"getpid", "geteuid", "urandom", "strerror", "register_at_fork", "fsencode"}
OF_PATHS = {
    "exists",
    "is_file",
    "is_dir",
    "is_symlink",
    "iterdir",
    "glob",
    "rglob",
    "read_bytes",
    "read_text",
    "write_bytes",
    "write_text",
    "touch",
    "lstat",
    "samefile",
    "hardlink_to",
}
"""What a `Path` asks the kernel by itself."""


def stepped(model: nn.Module, steps: int = 1) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        model(torch.ones(2, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("file", BEHIND)
def test_nothing_behind_the_border_calls_the_kernel_by_itself(file):
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    called = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = {
        f"{func.value.id}.{func.attr}"
        for func in called
        if isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name)
    }
    direct = {
        name
        for name in names
        if name.partition(".")[0] in ("os", "fcntl", "shutil")
        and name.partition(".")[2] not in HARMLESS
    }
    opens = {func.id for func in called if isinstance(func, ast.Name) and func.id == "open"}
    of_paths = {func.attr for func in called if isinstance(func, ast.Attribute)} & OF_PATHS
    assert not direct | opens | of_paths


@pytest.mark.parametrize("durable", [False, True])
def test_every_call_of_a_training_passes_the_border(tmp_path, durable):
    seen: list[tuple[str, str | None]] = []

    def around(call, go):
        seen.append((call.name, None if call.of is None else call.of.name))
        return go()

    border = Border(around)
    model = offloaded(nn.Linear(256, 256), border, disk=tmp_path, durable=durable, **FIELDS)
    stepped(model)
    zcompile.save(tmp_path.with_name("checkpoint"), model)
    session_behind(model).close()
    assert border.paths == {}, "descriptors that were not closed"
    names = {name for name, _ in seen}
    never = {"dup2", "punch", "clone", "exchange", "flags", "set_flags", "fdatasync"}
    of_others = {"readlink", "symlink", "chmod", "utime", "rmdir"}  # in a checkpoint
    never |= of_others | {"attributes", "attribute", "set_attribute"}
    assert {*CALLS, "ring", "ring_write", "ring_read"} - never <= names
    if durable:
        commit = ["fdatasync", "fsync", "rename"]
        assert [name for name, _ in seen if name in commit][:1] == ["fsync"], "the header"
        assert ("fdatasync", "zinf.tier") in seen
        assert seen.index(("fsync", "zinf.index.new")) < seen.index(("rename", "zinf.index.new"))
    assert names <= {*CALLS, "ring", "ring_read", "ring_write"}


def test_a_call_that_fails_at_the_border_fails_the_commit(tmp_path):
    def around(call, go):
        if call.name == "fdatasync":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return go()

    model = offloaded(nn.Linear(256, 256), Border(around), disk=tmp_path, durable=True, **FIELDS)
    with pytest.raises(CommitFailed, match="Input/output error"):
        stepped(model)
    session_behind(model).close()


def test_a_request_that_fails_or_falls_short_at_the_border_is_the_rings_outcome(tmp_path):
    failing, short = False, 0

    def around(call, go):
        nonlocal short
        if call.name == "ring_read" and failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if call.name == "ring_write" and call.arguments["nbytes"] > 4096:
            short += 1
            return go(4096)
        return go()

    torch.manual_seed(0)
    plain = nn.Linear(256, 256)
    torch.manual_seed(0)
    model = offloaded(nn.Linear(256, 256), Border(around), disk=tmp_path, **FIELDS)
    assert torch.equal(stepped(model).weight.on_host(), stepped(plain).weight)
    assert short
    failing = True
    with pytest.raises(IOFault, match="read of 'weight' failed: Input/output error"):
        model.weight.on_host()
    session_behind(model).close()
