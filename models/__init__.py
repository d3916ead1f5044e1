"""The models by name: every file in this folder that defines Model."""
import sys
import types
from pathlib import Path

PAPER = "rnn gru sstfmr dstfmr crossattn perceiver".split()  # in the paper's order
ALL = [*PAPER, "mlp", "hypertfmr", "looptfmr", "looktfmr", "findtfmr"]  # of --model all


def available():
    """Name -> path of all models, those of ALL first. Other files that systems and editors leave
    here are passed over."""
    found = {}
    for folder in __path__:
        for path in sorted(Path(folder).glob("*.py")):
            if path.stem.isidentifier() and b"\nclass Model" in path.read_bytes():
                found[path.stem] = path
    names = [name for name in ALL if name in found]
    names += [name for name in found if name not in ALL]
    return {name: found[name] for name in names}


def module_of(name, folder=None):
    """The module models/<name>.py, or the copy of it in a run's folder. It is read anew each time:
    a notebook trains what stands in the file now."""
    path = Path(folder) / f"{name}.py" if folder else available()[name]
    module = types.ModuleType(f"models.{name}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # where dataclass, typing and pickle look for it
    exec(compile(path.read_bytes(), path, "exec"), vars(module))
    return module
