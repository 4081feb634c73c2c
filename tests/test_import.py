"""Proves that `import memopt` imports no compiler, which would take more than a second, and none of
the names of other libraries.
"""

from __future__ import annotations

import subprocess
import sys

NOT_IMPORTED = (
    "torch._dynamo",
    "torch._inductor",
    "torch._functorch.partitioners",
    "memopt.compat",
)


def test_what_is_not_imported() -> None:
    code = (
        "import sys, memopt; memopt.build_info(); "
        f"print([name for name in {NOT_IMPORTED!r} if name in sys.modules])"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert child.stdout == "[]\n", child.stderr
