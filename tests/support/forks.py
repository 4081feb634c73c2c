"""Runs a program under several sets of environment variables that memopt reads once per process.

In forks of one child process: they share the seconds that PyTorch takes to import.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence

_FORKS = """
import json, os, sys, torch, memopt, tests.support.cases
torch.set_num_threads(1)
program, settings = json.loads(sys.stdin.read())
for variables in settings:
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.environ.update(variables)
        os.dup2(writing, 1)
        exec(program, {"__name__": "__main__"})
        sys.stdout.flush()
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        printed = pipe.read()
    if os.wait()[1] != 0:
        sys.exit(f"with {variables}")
    print(json.dumps(printed))
"""


def run_in_forks(
    program: str, settings: Sequence[Mapping[str, str]], environment: Mapping[str, str]
) -> list[str]:
    """What `program` prints under each of the settings. In `environment` a child Python finds
    memopt; torch and memopt are imported already, and compute on one thread.
    """
    child = subprocess.run(
        [sys.executable, "-c", _FORKS],
        input=json.dumps([program, [dict(variables) for variables in settings]]),
        env=environment,
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stderr
    return [json.loads(line) for line in child.stdout.splitlines()]
