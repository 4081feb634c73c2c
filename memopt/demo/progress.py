"""Live progress: a bar per mode in a terminal, about ten plain lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from memopt.demo.results import Result


@contextlib.contextmanager
def show_progress(
    console: Console, results: list[Result], steps: int
) -> Iterator[Callable[[Result], None]]:
    """Gives a function to call with a result after each of its steps."""
    if not console.is_terminal:
        yield _plain_lines(console, total=steps * len(results))
        return
    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeRemainingColumn(),
        console=console,
    )
    with bars:
        tasks = {
            result.mode.name: bars.add_task(result.mode.name, total=steps, loss="")
            for result in results
        }
        everything = bars.add_task("[bold]all modes", total=steps * len(results), loss="")

        def stepped(result: Result) -> None:
            bars.update(tasks[result.mode.name], advance=1, loss=f"loss {result.losses[-1]:.3f}")
            bars.update(everything, advance=1)

        yield stepped


def _plain_lines(console: Console, total: int) -> Callable[[Result], None]:
    times: list[float] = []

    def stepped(result: Result) -> None:
        times.append(time.monotonic())
        done = len(times)
        if done * 10 // total == (done - 1) * 10 // total:
            return
        left = (times[-1] - times[0]) / max(1, done - 1) * (total - done)
        console.print(
            f"{done * 100 // total:3d} %   {result.mode.name}: step {len(result.losses)}, "
            f"loss {result.losses[-1]:.3f}   about {left:.0f} s left"
        )

    return stepped
