import pytest
from tiny import write_tiny


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A random llama checkpoint of a few thousand parameters."""
    return write_tiny(tmp_path_factory.mktemp("tiny"))
