"""A step's memory without running it.

hollow    tensors without values, and a ledger that computes nothing
int8      meta kernels for bitsandbytes' operators on 8 bits
outcome   what an operator returns, by its arguments alone
on_cuda   where CUDA would do otherwise than the CPU, imitated on the CPU
predict   a step that computes nothing, on copies
"""
