"""Offloading: the engine and its backends, in C++ and on models."""
