"""Options and the import path of the tests: `pytest` runs the fast ones, `pytest --slow` all."""
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also tests that take minutes; -s: prints")


def pytest_runtest_setup(item):
    if item.get_closest_marker("slow") and not item.config.getoption("--slow"):
        pytest.skip("needs --slow")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes long, runs with --slow only")
