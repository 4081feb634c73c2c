from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

def build_info() -> dict[str, Any]: ...
def cpu_capability() -> str: ...

class RegionSettings:
    def __init__(
        self,
        *,
        preserve_rng_state: bool = True,
        check_metadata: bool = True,
        early_stop: bool = True,
        offload_to_cpu: bool = False,
        on_pass: Callable[[nn.Module | None, int], None] | None = None,
        on_saved: Callable[[Tensor], None] | None = None,
        again: Callable[..., Any] | None = None,
        diagnose: Callable[[], str] | None = None,
    ) -> None: ...

class Handle: ...
class Stop(BaseException): ...

# Positional only.
def run_region(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    settings: RegionSettings,
    owner: nn.Module | None,
    /,
) -> Any: ...
def flags() -> tuple[bool, bool, bool]: ...
def set_disabled(disabled: bool) -> bool: ...
def modules_reached(*roots: object) -> list[nn.Module]: ...
def live_regions() -> int: ...
def link_traffic() -> tuple[int, int, int, int]: ...
def pretend_accelerator(device_type: str | None) -> None: ...
