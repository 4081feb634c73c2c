"""Benchmarks: one harness, one file per claim, results as JSON. Start with NOTES.md.

Run from the repository's root: `python -m benchmarks.ops layer_norm --help`.
"""

import os

# The profiler behind memory.peak_bytes() logs two lines for every use, unless this is set before
# torch is imported.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
