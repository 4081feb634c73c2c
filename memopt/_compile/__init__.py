"""The fates of eager mode as a policy for compiled graphs.

    api         `memopt.compile` and `memopt.compile.options`
    graph       reads the joint graph of forward and backward
    ops         what a node of it is
    policy      what is kept and what is made again: a minimum cut
    steps       the ops that run, for such a cut
    kernels     which of them are one kernel, and which tensors are in memory
    timeline    how much is allocated when
    budget      what else is run again, so that the peak fits
    _inductor   hands the policy to torch.compile; the only file that knows its internals

The last is imported when something is compiled.
"""

from memopt._compile import api
from memopt._public import P, PublicFunction, R_co

__all__ = ["compile"]


class _Compile(PublicFunction[P, R_co]):
    options = staticmethod(api.compile_options)


compile = _Compile(api.compile)
