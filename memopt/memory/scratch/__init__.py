"""Scratch: the memory that kernels allocate and free inside themselves, by an operator's arguments.

rules          which operator has how much
size           how much scratch a call has, and what a copy of an argument takes
contractions   of matrix products and convolutions
onednn         where oneDNN computes
"""
