"""An assignment says which modules of a model get what: kept, recomputed, a region, offloaded.

It is data alone. `memopt/applied.py` puts one on a model and takes it off again; `plan`, `convert`
and the options of `anatomy` and `largest_batch` are ways to make one.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from memopt.place import Place

Paths: TypeAlias = tuple[str, ...]
"""The address of a choice: the path of a module, or of several that are called in turn and that are
treated as one. The empty path is the model itself.
"""

Segments: TypeAlias = int | Literal["sqrt", "optimal"]


@dataclass(frozen=True)
class Choice:
    """The fate of the activations of one module, or of several that are treated as one."""

    recipes: bool = False
    """Norms, activations and dropouts are recomputed from recipes (memopt.convert)."""
    checkpoint: bool = False
    """The call is a region: its inputs are kept, and it is recomputed in backward."""
    offload: float = 0.0
    """The share of what is kept that waits elsewhere, from 0 to 1; of a region all of it."""
    segments: Segments = 1
    """How many regions several modules are. Of more than one, the last segment runs plainly, see
    `memopt.checkpoint_sequential`.
    """
    chunks: int | None = None
    """The number of chunks of rows that regions run in; None: they run whole."""
    in_chunks: tuple[str, ...] = ("",)
    """The regions that run in `chunks` chunks, by their paths from the address: the module itself,
    or some of `parts`.
    """
    keep_decisions: bool = False
    """The region keeps from forward what it chooses by values."""
    parts: tuple[str, ...] = ()
    """Modules in each one of the address, by their paths from there, that are regions of their own;
    the empty path is the module itself. With `checkpoint` they are regions inside the region, and
    backward runs them again twice.
    """
    head: bool = False
    """The module is a linear whose logits are computed with their loss, in chunks of rows, where
    nothing else asks for them (memopt.convert).
    """

    def __post_init__(self) -> None:
        """Raises ValueError for numbers out of their range, as a file that was edited may hold."""
        if not 0 <= self.offload <= 1:
            raise ValueError(f"offload must be from 0 to 1, got {self.offload}")
        for name, number in (("chunks", self.chunks), ("segments", self.segments)):
            if isinstance(number, int) and number < 1:
                raise ValueError(f"{name} must be at least 1, got {number}")

    def without_parts(self) -> Choice:
        """The choice without regions inside, and whole: no region of it runs in chunks."""
        return replace(self, parts=(), chunks=None, in_chunks=("",))

    def __str__(self) -> str:
        if self.head:
            return "in chunks, with its loss"
        mine = self.in_chunks if self.chunks is not None else ()
        chunks = f" in {self.chunks} chunks"
        inside = [f"{path or 'each'}{chunks if path in mine else ''}" for path in self.parts]
        alone = "" in mine and "" not in self.parts
        region = f"checkpoint{chunks}" if alone else "checkpoint"
        region += f" ({', '.join(inside)} inside)" if inside else ""
        words = ["recipes"] * self.recipes + [region] * self.checkpoint
        if inside and not self.checkpoint:
            words.append(f"checkpoint {', '.join(inside)}")
        share = "" if self.offload == 1 else f" {self.offload:.0%}"
        words += [f"offload{share}"] if self.offload else []
        return " + ".join(words) or "keep"


KEEP = Choice()


class Assignment:
    """A choice for each of some modules of a model, addressed by their paths.

    Modules that are not named keep what autograd saves; but where any has recipes, so has all that
    no choice is about.

    Args:
        choices: by path, or by several paths that share one choice.
        place: where what is offloaded waits; None: nothing leaves.
        in_step: whether each module waits at the end of its call until what it offloads has left.
    """

    def __init__(
        self,
        choices: Mapping[str, Choice] | Mapping[Paths, Choice],
        place: Place | None = None,
        in_step: bool = False,
    ) -> None:
        self.choices: dict[Paths, Choice] = {
            (at,) if isinstance(at, str) else at: choice for at, choice in choices.items()
        }
        self.place = place
        self.in_step = in_step

    def of(self, path: str) -> Choice:
        """The choice that names this module; without one it keeps what autograd saves."""
        alone = self.choices.get((path,))
        return alone or next((c for at, c in self.choices.items() if path in at), KEEP)

    def where(self, chosen: Callable[[Choice], bool]) -> tuple[str, ...]:
        """The paths of the modules whose choice is such a one."""
        return tuple(path for at, c in self.choices.items() if chosen(c) for path in at)

    @property
    def recipes(self) -> bool:
        return any(choice.recipes for choice in self.choices.values())

    @property
    def offloads(self) -> bool:
        return any(choice.offload for choice in self.choices.values())

    @property
    def heads(self) -> tuple[str, ...]:
        """The linears whose logits are computed in chunks, with their loss."""
        return self.where(lambda choice: choice.head)

    def staying(self) -> Assignment:
        """An assignment that differs in offloading nothing."""
        return Assignment({at: replace(c, offload=0.0) for at, c in self.choices.items()})

    def without_regions(self, paths: Container[str]) -> Assignment:
        """An assignment in which these modules, which cannot be regions, are none."""
        choices = {
            at: replace(choice.without_parts(), checkpoint=False)
            if any(p in paths for p in at)
            else choice
            for at, choice in self.choices.items()
        }
        return Assignment(choices, self.place, self.in_step)
