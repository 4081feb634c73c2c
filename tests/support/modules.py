"""What every module of memopt.nn shares with the torch.nn module whose place it takes."""

from __future__ import annotations

import copy
import inspect
import pickle

import torch
from torch import Tensor, nn


def assert_same_state(module: nn.Module, twin: nn.Module, x: Tensor) -> None:
    """`module` has `twin`'s state_dict keys, order and shapes, and each loads the other's,
    strictly.
    """
    ours, theirs = module.state_dict(), twin.state_dict()
    assert list(ours) == list(theirs)
    assert [t.shape for t in ours.values()] == [t.shape for t in theirs.values()]
    assert [t.dtype for t in ours.values()] == [t.dtype for t in theirs.values()]
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.normal_()
    module.load_state_dict(twin.state_dict())
    torch.testing.assert_close(module(x), twin(x))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    twin.load_state_dict(module.state_dict())
    torch.testing.assert_close(module(x), twin(x))


def assert_copies(module: nn.Module, x: Tensor) -> None:
    """deepcopy and pickle give an equal, independent module of the same class."""
    expected = module(x)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert type(twin) is type(module)
        assert repr(twin) == repr(module)
        assert list(twin.state_dict()) == list(module.state_dict())
        assert torch.equal(twin(x), expected)
        for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
            assert ours.data_ptr() != theirs.data_ptr()


def constructor_parameters(module: type[nn.Module]) -> list[str]:
    """Names of the constructor's parameters, in order."""
    return list(inspect.signature(module.__init__).parameters)[1:]
