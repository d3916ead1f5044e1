"""The models by name: every file in this folder that defines Model."""
import importlib
import sys
from pathlib import Path

PAPER = "rnn gru sstfmr dstfmr crossattn perceiver".split()  # in the paper's order
ALL = [*PAPER, "mlp", "hypertfmr", "looptfmr"]  # of --model all


def available():
    """The names of all models, those of ALL first. Other files that systems and editors leave here
    are passed over."""
    found = sorted(path.stem for folder in __path__ for path in Path(folder).glob("*.py")
                   if path.stem.isidentifier() and path.is_file()
                   and b"\nclass Model" in path.read_bytes())
    return [*ALL, *(name for name in found if name not in ALL)]


def module_of(name):
    """The module models/<name>.py, read anew: a notebook trains what stands in the file now."""
    sys.modules.pop(f"models.{name}", None)
    importlib.invalidate_caches()  # finds a file that is a moment old
    return importlib.import_module(f"models.{name}")
