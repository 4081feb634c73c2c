"""Scratch: the memory that kernels allocate and free inside themselves, by an operator's arguments.

rules          which operator has how much
size           how much scratch a call has, and what a copy of an argument takes
contractions   of matrix products and convolutions
maps           of pooling, padding, resampling and shuffles of images
losses         of losses and softmaxes
indices        of what reads, writes and sorts by place
matrices       of decompositions, solvers and distances
transforms     of Fourier transforms and matrix exponentials
head           of memopt's loss in chunks
ours           of memopt's other kernels
measured       where oneDNN or memopt computes, measured by a call
onednn         where oneDNN computes, by formulas and bounds
"""
