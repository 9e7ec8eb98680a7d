import pytest
from retrieval.store.record import RECORD_FILE, Record


@pytest.fixture
def index_file(tmp_path):
    """The record of an index."""
    Record.create(tmp_path)
    return tmp_path / RECORD_FILE
