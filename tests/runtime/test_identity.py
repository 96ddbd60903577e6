"""Where a tiered tensor says it lies: what can be compared, and what cannot be read by."""

import copy
import ctypes
import pickle
import weakref

import numpy
import pytest
import torch
from host_copies import Copies
from pairs import mlp, on_disk, parameter_pair
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zcompile.errors import Unsupported
from zcompile.runtime.eager import identity, tensor

REFUSED = (Unsupported, ctypes.ArgumentError, TypeError, ValueError, RuntimeError)


def where(tiered):
    return tiered.untyped_storage().data_ptr()


def test_tensors_of_one_entry_lie_in_one_storage_and_others_do_not(tmp_path):
    model = on_disk(mlp(), tmp_path)
    first, second = model[0].weight, model[2].weight
    assert where(first) == where(first.detach()) == where(first.data) == where(first[3:])
    assert where(first) != where(second)
    assert len({where(p) for p in model.parameters()}) == 4
    assert first.untyped_storage().nbytes() == first.untyped_storage().size() == first.nbytes
    assert len(first.untyped_storage()) == first.nbytes
    assert first.untyped_storage().device == first.device
    assert where(first) != 0
    other = on_disk(mlp(), tmp_path)
    assert not {where(p) for p in model.parameters()} & {where(p) for p in other.parameters()}


def test_parts_lie_as_the_parts_of_a_plain_tensor_do(tmp_path):
    plain, tiered = parameter_pair(lambda: torch.randn(6, 5, dtype=torch.float64), tmp_path)
    for part in (
        lambda x: x[2:],
        lambda x: x.t()[1],
        lambda x: x.view(-1)[-1],
        lambda x: x[2:2],
        lambda x: x.detach(),
    ):
        ours, theirs = part(tiered), part(plain)
        if not theirs.numel():
            assert ours.data_ptr() == theirs.data_ptr() == 0
            continue
        assert ours.data_ptr() == where(tiered) + (theirs.data_ptr() - plain.data_ptr())
    begin, end = tiered[1].data_ptr(), tiered[2].data_ptr()
    assert begin + 40 == end
    assert begin < end
    assert end >= begin
    assert sorted([end, begin]) == [begin, end]
    assert {begin: 1}[tiered[1].data_ptr()] == 1
    assert begin != 0
    with pytest.raises(TypeError):
        _ = begin < 7


def test_an_entry_without_bytes_lies_nowhere_as_in_torch(tmp_path):
    plain, tiered = parameter_pair(lambda: torch.randn(0, 4), tmp_path)
    assert where(plain) == where(tiered) == tiered.data_ptr() == 0


@pytest.mark.parametrize(
    "use",
    [
        lambda p: ctypes.cast(p, ctypes.POINTER(ctypes.c_ubyte)),
        lambda p: ctypes.memmove(p, b"abcd", 4),
        lambda p: ctypes.string_at(p, 4),
        ctypes.c_void_p,
        lambda p: ctypes.c_ubyte.from_address(p),
        int,
        hex,
        lambda p: numpy.uintp(p),
        lambda p: torch.tensor([p]),
        lambda p: torch.frombuffer(p, dtype=torch.uint8),
        lambda p: ctypes.CDLL(None).memset(p, 0, 4),
        lambda p: p - 1,
    ],
    ids=lambda use: getattr(use, "__name__", None),
)
def test_nobody_reads_or_writes_by_an_address(use, tmp_path):
    _, tiered = parameter_pair(lambda: torch.randn(4, 4), tmp_path)
    for address in (tiered.data_ptr(), where(tiered), tiered.data_ptr() + 8):
        with pytest.raises(REFUSED):
            use(address)


def test_who_reads_by_an_address_is_told_what_to_do(tmp_path):
    _, tiered = parameter_pair(lambda: torch.randn(4, 4), tmp_path)
    told = r"a tiered tensor has no memory of its own; use tensor.cpu\(\)"
    with pytest.raises(Unsupported, match=r"data_ptr\(\) as a number: " + told):
        int(tiered.data_ptr())
    with pytest.raises(ctypes.ArgumentError, match=r"data_ptr\(\) as a pointer: " + told):
        ctypes.cast(tiered.data_ptr(), ctypes.c_void_p)


@pytest.mark.parametrize(
    "use",
    [
        lambda s: s[0],
        lambda s: s.__setitem__(0, 1),
        lambda s: s.fill_(0),
        lambda s: s.copy_(torch.ones(4).untyped_storage()),
        lambda s: s.resize_(0),
        lambda s: s.tolist(),
        lambda s: s.clone(),
        lambda s: s.cpu(),
        lambda s: s._cdata,
        lambda s: s._weak_ref(),
        lambda s: s.share_memory_(),
        list,
        copy.copy,
        copy.deepcopy,
        pickle.dumps,
    ],
)
def test_all_else_of_a_storage_is_refused(use, tmp_path):
    _, tiered = parameter_pair(lambda: torch.randn(4, 4), tmp_path)
    with pytest.raises(Unsupported, match="a tiered tensor has no memory of its own"):
        use(tiered.untyped_storage())


def test_torch_takes_no_such_storage(tmp_path):
    _, tiered = parameter_pair(lambda: torch.randn(4, 4), tmp_path)
    mine, storage = torch.zeros(4, 4), tiered.untyped_storage()
    for use in (lambda: mine.set_(storage), lambda: mine.untyped_storage().copy_(storage)):
        with pytest.raises((TypeError, Unsupported)):
            use()
    assert not hasattr(storage, "no_such_thing")


def as_array(tensor):
    """An array over the values, as if they were memory."""
    pointer = ctypes.cast(tensor.data_ptr(), ctypes.POINTER(ctypes.c_float))
    return numpy.ctypeslib.as_array(pointer, (tensor.numel(),))


def with_a_list(tensor, keep_alive_buffer):
    return as_array(tensor)


def with_the_tensor_alone(tensor, kept):
    kept.append(tensor)
    return as_array(tensor)


@pytest.mark.parametrize("read", [with_a_list, with_the_tensor_alone])
def test_the_copy_that_is_read_lives_as_long_as_safetensors_keeps_it(read, monkeypatch, tmp_path):
    monkeypatch.setattr(identity, "READER", __name__)
    copies = Copies(monkeypatch)
    plain, tiered = parameter_pair(lambda: torch.randn(4, 4), tmp_path)
    kept = []
    array = read(tiered.detach()[1], kept)
    tiered.detach().zero_()
    assert torch.equal(torch.from_numpy(array.copy()), plain[1].detach())
    assert copies.live_bytes() == plain.nbytes
    kept.clear()
    assert copies.left_bytes() == 0


def test_nobody_reads_a_part_that_nobody_holds(monkeypatch, tmp_path):
    monkeypatch.setattr(identity, "READER", __name__)
    _, tiered = parameter_pair(lambda: torch.randn(4, 4), tmp_path)
    address = tiered[1].data_ptr()
    with pytest.raises(ctypes.ArgumentError, match="a tiered tensor has no memory of its own"):
        ctypes.cast(address, ctypes.POINTER(ctypes.c_float))


def test_an_address_keeps_no_tensor_alive(tmp_path):
    model = on_disk(mlp(), tmp_path)
    found = model[0].weight.detach()
    kept, died = found.data_ptr(), weakref.ref(found)
    del found
    assert died() is None
    assert kept == model[0].weight.data_ptr()


def test_only_those_who_ask_for_the_parts_to_find_memory_see_none(monkeypatch, tmp_path):
    model = on_disk(nn.Linear(4, 4), tmp_path)
    assert model.weight.__tensor_flatten__()[0] == ["_handle"]
    monkeypatch.setattr(tensor, "FLATTENS", __name__)
    parts, _ = model.weight.__tensor_flatten__()
    assert parts == ["_whole"]
    whole = model.weight._whole
    assert not is_traceable_wrapper_subclass(whole)
    assert where(whole) == where(model.weight)
    assert whole.data_ptr() == model.weight.data_ptr()
    assert torch.equal(whole.cpu(), model.weight.detach().cpu())
