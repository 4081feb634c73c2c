"""Other libraries' names for what memopt does, at their module paths, for code that moves here.

    fairscale   checkpoint_wrapper and its contexts
    deepspeed   deepspeed.checkpointing

With one import changed such code runs on memopt's regions. `docs/compat.md` says what differs.
Nothing here is imported by `import memopt`.
"""
