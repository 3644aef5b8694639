"""Files of the repository that tests use. The source distribution does not contain the large ones."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def example(name: str) -> Path:
    """Return a file or folder in examples/. The test is skipped if the source distribution does not contain it."""
    path = ROOT / "examples" / name
    if not path.exists() and (ROOT / "PKG-INFO").exists():  # exists only in a source distribution
        pytest.skip(f"the source distribution leaves out examples/{name}")
    return path
