"""`Sight` with numbers of any size and type: what a query sees does not depend on the type of its position."""

import numpy as np
import pytest

from kvref.attention import Sight, attention


@pytest.mark.parametrize("window", [100, 2**62, 2**63 - 1])
def test_a_window_of_any_length_that_is_longer_than_all_is_none(window):
    """Including queries before the first token, which see nothing."""
    tokens = np.arange(3, dtype=np.float32).reshape(3, 1, 1)
    query = np.zeros((6, 1, 1), np.float32)
    got = attention(query, tokens, tokens, causal=True, sight=Sight(window))
    assert got.ravel().tolist() == attention(query, tokens, tokens, causal=True).ravel().tolist() == [0, 0, 0, 0, 0.5, 1]


@pytest.mark.parametrize("kind", [int, np.int8, np.uint8, np.int32, np.uint64])
def test_positions_of_any_type_see_the_same(kind):
    sight = Sight(3, sinks=1, chunk=4)
    seen = [[token for token in range(9) if sight.sees(kind(query), kind(token))] for query in range(9)]
    assert seen == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 4], [0, 4, 5], [0, 4, 5, 6], [0, 5, 6, 7], [0, 8]]
