"""memopt in trainers: one callback or one call. Each module needs the library that it is named for.

wanted         what a user asks for, and how it is put on a model
transformers   `MemoptCallback` for transformers' Trainer, and those of TRL
lightning      `MemoptLightningCallback`
accelerate     `apply_memopt`, for loops around an Accelerator
"""
