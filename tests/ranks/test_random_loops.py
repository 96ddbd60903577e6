"""Ranks do what one process of plain PyTorch does, whatever a loop does besides training.

A seed that fails is drawn again by its number: pytest tests/ranks/test_random_loops.py -k 17.
"""

import pytest
from random_loops import drawn, trained


@pytest.mark.slow  # a compilation for each size, and for each set of frozen parameters
@pytest.mark.parametrize("seed", range(24))
def test_a_random_loop_over_ranks_has_the_bits_of_one_process(pool, seed):
    program = drawn(seed)
    losses, told, values = trained(None, program)
    for rank, (own, seen, found) in enumerate(pool.run(trained, program.ranks, program)):
        assert own == {key: loss for key, loss in losses.items() if key[2] == rank}, program
        assert seen == told, program
        assert found == values, program
