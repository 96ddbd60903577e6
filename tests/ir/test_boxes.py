"""Ranges of elements as boxes: each element once, in the order of storage."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from zcompile.ir.boxes import boxes_of


@given(st.data())
def test_boxes_hold_each_element_once_in_order(data):
    size = data.draw(st.lists(st.integers(1, 5), max_size=4))
    order = data.draw(st.permutations(range(len(size))))
    numel = 1
    for length in size:
        numel *= length
    first = data.draw(st.integers(0, numel))
    last = data.draw(st.integers(first, numel))
    whole = torch.arange(numel).view(size).permute(order)
    found = boxes_of(whole.size(), whole.stride(), first, last)
    assert len(found) <= max(1, 2 * len(size) - 1)
    seen, at = [], first
    for box in found:
        assert box.first == at
        part = whole
        for dim, (offset, length) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            part = part.narrow(dim, offset, length)
        elements = sorted(part.flatten().tolist())
        assert elements == list(range(at, at + box.numel)), "consecutive in storage"
        seen += elements
        at += box.numel
    assert seen == list(range(first, last))
