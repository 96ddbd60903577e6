"""Memory formulas, each worked out for a shape small enough to check by hand."""

import pytest

from zcompile.errors import ConfigInvalid, UnknownOption
from zcompile.planner.analytic.model import Transformer, read_shape

SMALL = Transformer(layers=2, hidden=8, heads=4, batch=3, seq=16)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("parameters", 2 * 12 * 64),
        ("model_state_bytes", 20 * 2 * 12 * 64),
        ("checkpoint_bytes", 2 * 3 * 16 * 8 * 2),
        ("model_working_bytes", 4 * 8 * 32),
        ("activation_working_bytes", 3 * 16 * (16 * 8 + 2 * 4 * 16)),
        ("step_flops", 8 * 3 * 16 * 2 * 12 * 64),
    ],
)
def test_formulas_of_a_small_shape(name, expected):
    assert getattr(SMALL, name) == expected


def test_fewer_checkpoints_are_smaller_and_need_more_to_work_with():
    dense = Transformer(8, 64, 4, batch=2)
    sparse = Transformer(8, 64, 4, batch=2, blocks_per_checkpoint=4)
    assert sparse.checkpoint_bytes * 4 == dense.checkpoint_bytes
    assert sparse.activation_working_bytes == 4 * dense.activation_working_bytes
    assert sparse.activation_bytes == dense.activation_bytes


def test_a_shape_is_read_from_texts():
    options = {"layers": "2", "hidden": "8", "heads": "4", "bsz": "1.25", "seq": "16", "ci": "2"}
    assert read_shape(options) == Transformer(2, 8, 4, 1.25, 16, 2)


def test_an_unknown_key_of_a_shape_names_the_nearest():
    with pytest.raises(UnknownOption, match="did you mean 'hidden'"):
        read_shape({"hiden": "8"})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"layers": "2", "hidden": "8"}, "lacks heads="),
        ({"layers": "two", "hidden": "8", "heads": "4"}, "is not a number"),
        ({"layers": "0", "hidden": "8", "heads": "4"}, "must be more than zero"),
        ({"layers": "2", "hidden": "8", "heads": "4", "batch": "nan"}, "must be more than zero"),
        ({"layers": "2", "hidden": "8", "heads": "4", "batch": "inf"}, "must be finite"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(options, said):
    with pytest.raises(ConfigInvalid, match=said):
        read_shape(options)
