"""The fates of eager mode as a policy for compiled graphs.

    api         memopt.compile and memopt.compile_options
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

from memopt._compile.api import compile, compile_options

__all__ = ["compile", "compile_options"]
