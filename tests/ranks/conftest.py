"""One pool of ranks for all tests that leave it whole."""

from collections.abc import Iterator

import pytest
import torch
from rank_pool import RankPool


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """What ranks are compared with is computed as they compute: sums round as threads cut them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    made = RankPool(4)
    yield made
    made.close()
