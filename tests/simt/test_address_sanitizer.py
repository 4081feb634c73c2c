"""The kernels read nothing but their buffers: test_memory_accesses.py under AddressSanitizer.

In a process of its own: AddressSanitizer must be loaded before Python starts, and ends the process
that it finds an error in. That it does find errors here is shown by test_faults.py.
"""

from __future__ import annotations

import pytest

from . import build


@pytest.mark.slow
@pytest.mark.skipif(
    build.address_sanitizer() is None, reason="the compiler has no AddressSanitizer"
)
def test_no_access_out_of_bounds() -> None:
    result = build.run_sanitized(["-m", "pytest", "-q", "-x", "tests/simt/test_memory_accesses.py"])
    assert result.returncode == 0, result.stdout + result.stderr
