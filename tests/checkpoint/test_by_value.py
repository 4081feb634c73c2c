"""Proves: modules of classes that cloudpickle pickles by value, as notebooks, Ray and joblib do,
take their regions along: into another process, and into the one that has the class.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.forks import run_in_forks

pytest.importorskip("cloudpickle")

BEGIN = """
from pathlib import Path
import cloudpickle, torch
from torch import nn
import memopt
path = Path({path!r})

def forwards(module):
    seen = []
    hook = module.linear.register_forward_hook(lambda *_: seen.append(1))
    module(torch.ones(2, 4)).sum().backward()
    hook.remove()
    return len(seen)
"""

CLASSES = """
class Base(nn.Module):
    def forward(self, x):
        return x + 1

class Block(Base):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return super().forward(self.linear(x).tanh())
"""

WRITE = """
module = memopt.checkpoint_wrapper(Block())
path.write_bytes(cloudpickle.dumps(module))
print(forwards(cloudpickle.loads(path.read_bytes())), forwards(module))
del module
print(forwards(cloudpickle.loads(path.read_bytes())))
"""

READ = """
first, second = (cloudpickle.loads(path.read_bytes()) for _ in range(2))
print(forwards(first), forwards(second))
del first
print(forwards(second))
compiled = torch.compile(second, backend="eager", fullgraph=True)
assert torch.equal(compiled(torch.ones(2, 4)), second(torch.ones(2, 4)))
"""

CLASS_ALONE = """
module = memopt.checkpoint_wrapper(Block())
path.write_bytes(cloudpickle.dumps(Block))
"""

READ_CLASS = """
print(forwards(cloudpickle.loads(path.read_bytes())()))
"""


@pytest.mark.parametrize(
    ("write", "read", "written", "found"),
    [(WRITE, READ, "2 2\n2", "2 2\n2"), (CLASS_ALONE, READ_CLASS, "", "1")],
    ids=["module", "class"],
)
def test_regions_of_a_class_pickled_by_value(
    write: str,
    read: str,
    written: str,
    found: str,
    tmp_path: Path,
    child_environment: dict[str, str],
) -> None:
    """Twice each forward where there is a region, once where there is none."""
    begin = BEGIN.format(path=str(tmp_path / "pickle"))
    (said,) = run_in_forks(begin + CLASSES + write, [{}], child_environment)
    assert said.strip() == written
    (said,) = run_in_forks(begin + read, [{}], child_environment)
    assert said.strip() == found
