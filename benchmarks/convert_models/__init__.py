"""Models of transformers, and formulas for what they keep for backward before convert and after.

models        the models, at sizes for a test
sizes         other sizes of them
byte_terms    a term: bytes a token, as a sum of multiples of symbols
terms         the terms of what models are made of
model_terms   those of each model, and the count to compare with
"""
