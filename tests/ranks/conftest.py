"""One pool of ranks for all tests that leave it whole."""

from collections.abc import Iterator

import pytest
import torch
from rank_pool import RankPool


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """What ranks are compared with computes with as many threads as each of them: sums of matmuls
    are not the same with more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    made = RankPool(4)
    yield made
    made.close()
