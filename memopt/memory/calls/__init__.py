"""The calls of modules in a step, as a tree, each with what it takes, keeps and does.

tree      the calls and the storages that pass between them: plain dataclasses
record    the tree of a step that runs under a ledger
measure   a step of a model, predicted or real, and its tree
"""
