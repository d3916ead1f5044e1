"""Options and the import path of the tests. `pytest` runs the fast ones, `pytest --slow -s` adds the slow ones."""
import os
import pathlib
import sys

import pytest

# Threads that wait must sleep: spinning makes small tensor operations many times slower wherever cores are shared.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is imported
sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow (minutes); with -s they print")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes long, runs with --slow only")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--slow"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="needs --slow"))
