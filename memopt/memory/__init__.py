"""The memory of a step: how it is counted and predicted, and how everything is put back afterwards.

A step
    step         one training step under a ledger
    batches      a batch and its parts
    depth        steps of random depth, at their deepest
    draws        random numbers at an end of their range
    parallel     models in DDP and FSDP2
    arguments    an operator's arguments by name
    objects      tensors in objects that PyTorch cannot take apart
    work, speed  kinds of operators, their operations and bytes, and how long they take

What it holds
    ledger       every piece of memory of a step, from its birth to its end
    totals       the bytes alive at each line of its log
    pieces       pieces of memory, their categories and fates
    places       where something was made: a module, a line of user code
    trace        a ledger's summary: moments, timeline, shares
    saved        the bytes that autograd keeps for backward
    attribution  the modules and nodes of the graph that keep them
    allocator    allocators' figures: live bytes, peaks, free bytes, on every device
    peak         the peak of a step that runs
    exchanged    functions of modules and classes, exchanged for a while
    search       the largest size whose peak is within a budget
    sizes        sizes in bytes as memopt reads and says them
    scratch/     memory that CPU kernels allocate inside themselves
    predicted/   a step that computes nothing
    calls/       the calls of its modules, as a tree: what each takes, keeps and does

Put back
    unchanged    whatever runs inside, everything is afterwards as it was
    reach        all that a call can be seen to use
    containers   Python's objects, and how each is put back
    tensors      tensors and the bytes in them
    writes       a mode that copies a storage before it is written first
    generators   random numbers, and what PyTorch has set for the thread
    storages     the storages behind tensors
"""
