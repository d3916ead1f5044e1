"""Options and the import path of the tests. `pytest` runs the fast ones, `pytest --slow -s` adds the slow ones."""
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
import data  # noqa: E402, F401  before torch: it says how torch's threads wait


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow (minutes); with -s they print")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes long, runs with --slow only")


def pytest_runtest_setup(item):
    if item.get_closest_marker("slow") and not item.config.getoption("--slow"):
        pytest.skip("needs --slow")
