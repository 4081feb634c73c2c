"""The commands of `python -m memopt` that are about a step of a model: anatomy and plan."""
