"""The tolerance for values from an earlier tier: an allowed deviation there must not exceed the bound of the next tier."""

import numpy as np
import pytest

from kvref_conformance.oracle.formats import (
    AFFINE_FORMATS,
    FORMATS_IN_GROUPS,
    ROTATED_FORMATS,
    SYMMETRIC_FORMATS,
    dim_of,
    group_of,
)
from kvref_conformance.oracle.token_storage import expected_tokens, restored_values

SMALL_GROUPS = tuple(name for name in FORMATS_IN_GROUPS if group_of(name) <= 32)


def moved(format: str, rng: np.random.Generator, before: float) -> float:
    """The largest share of its tolerance that a token uses if an earlier tier left it anywhere within its own tolerance."""
    dim, worst = dim_of(format, 1), 0.0
    for _ in range(30):
        token = rng.standard_normal((1, 2, dim), np.float32)
        said = restored_values(token, np.full(token.shape, before), format)
        for off in (rng.uniform(-before, before, token.shape), before * rng.choice([-1.0, 1.0], token.shape)):
            read = expected_tokens((token + off).astype(np.float32), format).values
            worst = max(worst, float((abs(read - said.values) / (said.slack + 1e-6)).max()))
    return worst


@pytest.mark.parametrize("format", [*SYMMETRIC_FORMATS, *AFFINE_FORMATS, *SMALL_GROUPS, *ROTATED_FORMATS])
def test_what_was_off_in_one_tier_is_within_the_room_of_the_next(format):
    rng = np.random.default_rng(0)
    for before in (2.0**-9, 2.0**-5, 0.3):
        assert moved(format, rng, before) <= 1.0
