"""The fates of eager mode as a policy for compiled graphs.

    api         `memopt.compile` and `memopt.compile.options`
    graph       reads the joint graph of forward and backward
    ops         the kind of a node of it
    policy      which tensors are kept and which are recomputed: a minimum cut
    steps       the ops that run, for such a cut
    kernels     which of them are one kernel, and which tensors are in memory
    timeline    how many bytes are allocated when, and the work that is done
    candidates  ways to divide a graph, and the choice among them
    budget      the minimum cuts among them, also with contractions recomputed
    _inductor   hands the policy to torch.compile
    _inductor_code  counts the bytes of the code that is generated
    _inductor_sizes  the largest sizes that a graph with symbols was compiled for
    _inductor_head  has heads compute their losses in chunks of rows

The last four alone know PyTorch's internals, and are imported when something is compiled.
"""

from memopt._compile import api
from memopt._public import P, PublicFunction, R_co

__all__ = ["compile"]


class _Compile(PublicFunction[P, R_co]):
    options = staticmethod(api.compile_options)


compile = _Compile(api.compile)
