"""Proves that `import memopt` imports no compiler, which would take more than a second."""

from __future__ import annotations

import subprocess
import sys

COMPILER = ("torch._dynamo", "torch._inductor", "torch._functorch.partitioners")


def test_no_compiler_is_imported() -> None:
    code = (
        "import sys, memopt; memopt.build_info(); "
        f"print([name for name in {COMPILER!r} if name in sys.modules])"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert child.stdout == "[]\n", child.stderr
