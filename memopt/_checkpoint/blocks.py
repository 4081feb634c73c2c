"""Finds the blocks of a model where no batch shows what a step holds: nothing is called.

Blocks are modules of one class beside each other: what a list holds, or children of a module whose
children hold no blocks. The outermost ones count, since a list inside a block (of experts, of
attention heads) would make small regions of what one region covers. But stages (of Swin, ConvNeXt,
ResNet), which differ from one another and consist of lists of blocks, are looked into. Single
layers are no blocks: a region around one keeps its input as the layer does. Outside of lists layers
with a norm and an activation are none either: they are the parts of blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator

from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from memopt._checkpoint.wrapper import has_forward
from memopt._class_patch import original_class

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def find_blocks(model: nn.Module) -> frozenset[nn.Module]:
    """The blocks of `model`, never itself: see `apply_activation_checkpointing`. Maybe none."""
    search = _Search()
    blocks = search.inside(model)
    while len(blocks) == 1 and (inside := search.inside(blocks[0])):
        blocks = inside  # one region around all that runs lowers nothing
    inner = {m for block in set(blocks) for m in block.modules() if m is not block}
    return frozenset(blocks) - inner  # also where a second path leads there


class _Search:
    def __init__(self) -> None:
        self._inside: dict[nn.Module, list[nn.Module]] = {}
        self._in_no_list: set[nn.Module] = set()

    def inside(self, module: nn.Module) -> list[nn.Module]:
        """The blocks inside `module`, if it is not one itself."""
        if module not in self._inside:
            self._inside[module] = []  # for one that holds itself
            self._inside[module] = self._found(module)
        return self._inside[module]

    def _found(self, module: nn.Module) -> list[nn.Module]:
        if isinstance(module, ParametrizationList):
            return []
        groups = _by_class(m for m in _called(module) if not is_layer(m))
        if isinstance(module, _CONTAINERS) and (
            len(groups) == 1 or any(len(g) > 1 for g in groups)
        ):
            return self._of_list([element for group in groups for element in group])
        groups = _by_class(m for m in module.children() if not _has_one_weight(m))
        alike = {m for group in groups if len(group) > 1 for m in group if not self.inside(m)}
        self._in_no_list |= alike
        return [
            block
            for child in module.children()
            for block in ([child] if child in alike else self.inside(child))
        ]

    def _of_list(self, elements: list[nn.Module]) -> list[nn.Module]:
        """The elements, or where they are stages the blocks inside."""
        looks = len(set(map(_look, elements)))
        if looks == 1 < len(elements):
            return elements
        unlike = looks == len(elements) > 2  # each wider than the one before, say
        stages = {element for element in elements if self._is_stage(element, unlike)}
        if len(stages) < len(elements):  # a block may hold a list of its own, a container is one
            stages = {stage for stage in stages if isinstance(stage, _CONTAINERS)}
        return [
            block
            for element in elements
            for block in (self.inside(element) if element in stages else [element])
        ]

    def _is_stage(self, module: nn.Module, unlike: bool) -> bool:
        """Whether most of the module's parameters belong to blocks of lists inside, and these
        repeat, or need not.
        """
        blocks = [block for block in self.inside(module) if block not in self._in_no_list]
        looks = Counter(map(_look, blocks))
        alike = sum(number for number in looks.values() if number > 1)
        may_differ = unlike or len(blocks) == 1 or isinstance(module, _CONTAINERS)
        return (may_differ or 2 * alike > len(blocks)) and (
            2 * sum(map(_size, blocks)) > _size(module)
        )


def _called(holder: nn.Module) -> Iterator[nn.Module]:
    """Yields its children; in place of lists in a list, which nobody calls, their elements."""
    for child in holder.children():
        if has_forward(child):
            yield child
        elif isinstance(holder, _CONTAINERS):
            yield from _called(child)


def _by_class(modules: Iterable[nn.Module]) -> list[list[nn.Module]]:
    """Groups those with parameters, without what computes a layer's weight."""
    groups: dict[type[nn.Module], list[nn.Module]] = {}
    for module in modules:
        if _size(module) and has_forward(module) and not isinstance(module, ParametrizationList):
            groups.setdefault(original_class(type(module)), []).append(module)
    return list(groups.values())


def _has_one_weight(module: nn.Module) -> bool:
    """Whether it is a single layer, or one with a norm and an activation, or less."""
    weights = sum(is_lazy(p) or p.ndim > 1 for p in module.parameters())
    return weights - sum(map(_made_of_others, module.modules())) <= 1


def _look(module: nn.Module) -> Hashable:
    return tuple((name, None if is_lazy(p) else p.shape) for name, p in module.named_parameters())


def _size(module: nn.Module) -> int:
    """The number of elements of its parameters, and not 0 if it has any."""
    return sum(1 if is_lazy(p) else max(p.numel(), 1) for p in module.parameters())


def is_layer(module: nn.Module) -> bool:
    """A Linear, a convolution, a norm, and others with a weight and a bias, also as the only module
    in another one. Two parameters that make one weight (weight_norm) are one.
    """
    children = [c for name, c in module.named_children() if name != "parametrizations"]
    if len(children) > 1 or not all(map(is_layer, children)):
        return False
    inside = {p for child in children for p in child.parameters()}
    own = [p for p in module.parameters() if p not in inside]
    return len(own) + len(inside) - _made_of_others(module) <= 2 or (len(children) == 1 and not own)


def _made_of_others(module: nn.Module) -> int:
    """How many parameters more than weights it has, since PyTorch's weight_norm and
    parametrizations compute a weight of several.
    """
    lists = getattr(module, "parametrizations", {})
    more = sum(
        len(list(made.parameters())) - 1
        for made in (lists.values() if isinstance(lists, nn.ModuleDict) else ())
        if isinstance(made, ParametrizationList)
    )
    names = {getattr(hook, "name", None) for hook in module._forward_pre_hooks.values()}
    return more + sum({f"{name}_g", f"{name}_v"} <= set(module._parameters) for name in names)
