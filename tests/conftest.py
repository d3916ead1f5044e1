"""Import path and small numbers of the tests. `pytest` runs the fast ones, `pytest --slow` all."""
import pathlib
import sys

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
import eval as evaluation
import train

evaluation.TEST_TRIALS = train.LOG_TRIALS = 50
train.REPORT_EVERY = 3
torch.set_num_threads(1)  # faster for small models, above all beside other jobs


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also tests that take minutes; -s: prints")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes long, runs with --slow only")


def pytest_runtest_setup(item):
    if item.get_closest_marker("slow") and not item.config.getoption("--slow"):
        pytest.skip("needs --slow")
