"""The task of a training command, chosen by the texts that were given."""

from __future__ import annotations

from typing import Any

from t2r.errors import T2RError


def check_texts(train: Any, valid: Any, documents: bool, pairs: tuple[Any, ...]) -> bool:
    """Return whether this is a translation: parallel text was given. Raises T2RError if both kinds of text were."""
    translates = any(given is not None for given in pairs)
    if translates and (train is not None or valid is not None or documents):
        raise T2RError("give a text (train, valid, documents) or parallel text (source, target), not both")
    return translates
