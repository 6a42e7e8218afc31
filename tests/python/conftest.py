import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

SOURCE = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def source():
    """The root of the source tree."""
    return SOURCE
