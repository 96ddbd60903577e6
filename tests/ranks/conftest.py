"""One pool of ranks for all tests that leave it whole."""

from collections.abc import Iterator

import pytest
from rank_pool import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    made = RankPool(4)
    yield made
    made.close()
