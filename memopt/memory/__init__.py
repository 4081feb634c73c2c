"""The ground: memory that a step finds, and how it is put back.

storages     the storages behind tensors
containers   Python's objects, and how each is made what it was
reach        all that a call can be seen to use
tensors      tensors and the bytes in them
generators   random numbers, and what PyTorch has set for the thread
writes       a mode that copies a storage before it is written first
unchanged    whatever runs inside, everything is afterwards as it was
"""
