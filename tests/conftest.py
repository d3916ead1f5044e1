"""Import path and small numbers of the tests. `pytest` runs the fast ones, `pytest --slow` all."""
import pathlib
import signal
import sys

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
import models
import train

train.LOG_TRIALS, train.EARLY = 50, 3
torch.set_num_threads(1)  # faster for small models, above all beside other jobs
signal.signal(signal.SIGINT, signal.default_int_handler)  # a script's & had it ignored


@pytest.fixture
def student(tmp_path, monkeypatch):
    """A function that writes models/<name>.py, as a student would."""
    folder = tmp_path / "models"
    folder.mkdir()
    monkeypatch.setattr(models, "__path__", [*models.__path__, str(folder)])
    return lambda name, text: (folder / f"{name}.py").write_text(text)


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also tests that take minutes; -s: prints")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes long, runs with --slow only")


def pytest_runtest_setup(item):
    if item.get_closest_marker("slow") and not item.config.getoption("--slow"):
        pytest.skip("needs --slow")
