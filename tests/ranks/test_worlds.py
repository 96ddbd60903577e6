"""Directories of ranks are found by the names that are there, whatever these tell of."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from zcompile.errors import DurableDamaged
from zcompile.runtime.durable import worlds
from zcompile.runtime.durable.worlds import Sharing, newest_in, sharing_of
from zcompile.runtime.io.system_calls import KERNEL


def test_as_many_directories_are_looked_at_as_there_are(tmp_path, monkeypatch):
    """One rank of a shape, though that has 10^12; none whose rank is not of its shape."""
    for name in ("rank-0-of-999999x999999", "rank-2-of-2", "rank-4-of-2x2", "rank-3-of-2x2"):
        (tmp_path / name).mkdir()
    looked_at = []

    def held_at(path, system):
        looked_at.append(path.name)

    monkeypatch.setattr(worlds, "_held_at", held_at)
    assert newest_in(tmp_path, KERNEL) is None
    assert looked_at == ["rank-3-of-2x2", "rank-0-of-999999x999999"]


@pytest.mark.parametrize(("owner", "is_sound"), [(1, True), (2, False), (-1, False), (True, False)])
def test_who_owns_a_tensor_is_a_rank_of_a_group(owner, is_sound):
    told = Sharing(3, 4, "a0", frozenset({"w"}), (), {"w": owner}, replicas=2)
    index = SimpleNamespace(meta=told.to_meta(), tensors=[SimpleNamespace(name="w")])
    if is_sound:
        assert sharing_of(index, Path("index")) == told
        return
    with pytest.raises(DurableDamaged, match="whose share it is of"):
        sharing_of(index, Path("index"))
