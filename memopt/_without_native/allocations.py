"""Events of the CPU's allocator, by PyTorch's profiler, which notes much else as well."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

_MARK = "memopt: mark"


class _Event(NamedTuple):
    ns: int
    address: int
    nbytes: int
    operator: int


class Allocations:
    """See csrc/python/allocations.cpp."""

    def start(self) -> None:
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profile.__enter__()
        self.mark()

    def mark(self) -> None:
        """Notes this moment."""
        with record_function(_MARK):
            pass

    def stop(self) -> tuple[list[_Event], list[int]]:
        """Returns the events, and the moments: the beginning, and the marks."""
        self._profile.__exit__(None, None, None)
        profiler = self._profile.profiler
        assert profiler is not None
        assert profiler.kineto_results is not None
        self._events: list[_Event] = []
        self._marks: list[int] = []
        self._visit(profiler.kineto_results.experimental_event_tree())
        return self._events, sorted(self._marks)

    def _visit(self, events: list[Any], operator: int = 0) -> None:
        for event in events:
            kind, fields = event.typed
            around = operator
            if kind == _EventType.Allocation:
                self._events.append(
                    _Event(event.start_time_ns, fields.ptr, fields.alloc_size, operator)
                )
            elif kind == _EventType.TorchOp:
                if event.name == _MARK:
                    self._marks.append(event.start_time_ns)
                elif event.name.startswith(("memopt::_", "aten::")):
                    around = operator or event.id
            self._visit(event.children, around)
