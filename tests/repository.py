"""Files of the repository that tests use. The source distribution leaves out the large ones."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def example(name: str) -> Path:
    """A file or folder in examples/; where the source distribution leaves it out, the test is skipped."""
    path = ROOT / "examples" / name
    if not path.exists() and (ROOT / "PKG-INFO").exists():  # only a source distribution has that
        pytest.skip(f"the source distribution leaves out examples/{name}")
    return path
