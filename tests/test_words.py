"""Numbers with their nouns."""

import pytest

from t2r.words import counted, duration


@pytest.mark.parametrize(
    ("number", "words"), [(0, "0 steps"), (1, "1 step"), (2, "2 steps"), (1.0, "1.0 steps"), (12_345, "12,345 steps")]
)
def test_one_is_singular(number, words):
    assert counted(number, "step") == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.2, "1 second"),
        (2, "2 seconds"),
        (119, "119 seconds"),
        (150, "2.5 minutes"),
        (7200, "2.0 hours"),
        (2e5, "2.3 days"),
    ],
)
def test_durations(seconds, words):
    assert duration(seconds) == words
