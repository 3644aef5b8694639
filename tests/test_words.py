"""Numbers with their nouns."""

import pytest

from t2r.words import counted


@pytest.mark.parametrize(
    ("number", "words"), [(0, "0 steps"), (1, "1 step"), (2, "2 steps"), (1.0, "1.0 steps"), (12_345, "12,345 steps")]
)
def test_one_is_singular(number, words):
    assert counted(number, "step") == words
