"""Finds the blocks of a model. Only its structure is looked at: nothing is called.

Blocks are what nn.ModuleLists, nn.Sequentials and nn.ModuleDicts hold: layers of a transformer,
residual blocks of a convolutional network. The outermost ones count, since a list inside a block
(of experts, of attention heads) would make small regions of what one region covers. But stages (of
Swin, ConvNeXt, ResNet), which differ from one another and consist of such lists, are looked into.
A stage may also hold its blocks as children b1, b2, ... over which its forward loops (timm's
RegNet); layers and heads that a forward calls by their names are none. Lists of single layers hold
no blocks: a region around one keeps its input as the layer does.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from typing import NamedTuple

from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from memopt._checkpoint.wrapper import has_forward
from memopt._class_patch import original_class
from memopt._function_code import codes_in

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


class Blocks(NamedTuple):
    """The blocks of a model, and what a user should know about the choice (or an empty string)."""

    modules: frozenset[nn.Module]
    note: str


def find_blocks(model: nn.Module) -> Blocks:
    """The blocks of `model`, never itself: see `apply_activation_checkpointing`. Maybe none."""
    search = _Search(model)
    modules = frozenset(_outermost(search.inside(model)))
    loops = [path for path, parts in search.loops.items() if modules.intersection(parts)]
    if not loops:
        return Blocks(modules, "")
    return Blocks(
        modules,
        f"the elements of {', '.join(loops)} hold modules but are never called themselves, so that "
        "these modules are regions one by one; check_fn (in convert: checkpoint) chooses others",
    )


def _outermost(blocks: list[nn.Module]) -> list[nn.Module]:
    """The blocks that are not inside another one, also where a second path leads there."""
    inner = {m for block in set(blocks) for m in block.modules() if m is not block}
    return [block for block in blocks if block not in inner]


class _Search:
    def __init__(self, model: nn.Module) -> None:
        self.loops: dict[str, list[nn.Module]] = {}
        """Paths of lists whose elements are never called, and the modules that are."""
        self._root = model
        self._paths = {module: path for path, module in model.named_modules()}
        self._inside: dict[nn.Module, list[nn.Module]] = {}
        self._mixtures: set[nn.Module] = set()
        self._looks: dict[nn.Module, Hashable] = {}
        self._loops_over_children = {
            original_class(type(m)) for m in self._paths if _loops_over_children(m)
        }

    def inside(self, module: nn.Module) -> list[nn.Module]:
        """The blocks inside `module`, if it is not one itself."""
        if module not in self._inside:
            self._inside[module] = []  # for one that holds itself
            is_container = isinstance(module, _CONTAINERS)
            found = self._elements(module) if is_container else self._numbered(module)
            self._inside[module] = self._of_children(module) if found is None else found
        return self._inside[module]

    def _of_children(self, holder: nn.Module) -> list[nn.Module]:
        """The blocks inside its children. A mixture of experts is one itself, unless others are
        beside its experts, which are none.
        """
        found = {child: self.inside(child) for child in holder.children()}
        if holder is not self._root and has_forward(holder):
            experts = [c for c, blocks in found.items() if _is_mixture(holder, c, blocks)]
            others = [b for c, blocks in found.items() if c not in experts for b in blocks]
            if experts and not others:
                self._mixtures.add(holder)
                return [holder]
            if experts:
                return others
        return [block for blocks in found.values() for block in blocks]

    def _elements(self, container: nn.Module) -> list[nn.Module] | None:
        """The elements of a container that are blocks, or the blocks inside them; None if it is not
        a container of blocks.
        """
        elements = [child for child in container.children() if _size(child)]
        if any(isinstance(element, ParametrizationList) for element in elements):
            return []
        runs = [has_forward(element) for element in elements]
        if elements and not any(runs):
            elements = list(_callables(elements))
            blocks = [b for alike in _by_class(elements).values() for b in self._of_alike(alike)]
            self.loops[self._paths[container]] = blocks
            return blocks or None
        if not all(runs):
            return None
        groups = _by_class(elements)
        if len(groups) == 1 and not any(map(is_layer, elements)):
            return self._of_alike(elements)
        # Blocks of several kinds, perhaps between single layers.
        sequentials = groups.pop(nn.Sequential, [])
        repeated = sum(len(alike) for alike in groups.values() if len(alike) > 1)
        if repeated == 0 or 2 * repeated < len(elements):
            return None
        blocks = [block for alike in groups.values() for block in self._of_alike(alike)]
        return blocks + [block for sequential in sequentials for block in self.inside(sequential)]

    def _numbered(self, module: nn.Module) -> list[nn.Module] | None:
        """The children of a module that runs them in a loop, if they are blocks. Of its class, one
        that has a single child is no other.
        """
        if original_class(type(module)) not in self._loops_over_children:
            return None
        children = _numbered_children(module)
        return children if not any(map(self.inside, children)) else None

    def _of_alike(self, group: list[nn.Module]) -> list[nn.Module]:
        """The modules of one class, or if they are stages the blocks inside."""
        kinds = len({self._look(module) for module in group})
        if kinds == 1 and len(group) > 1:
            return group
        holding = [self._holds_blocks(module) for module in group]
        if original_class(type(group[0])) is nn.Sequential:
            are_stages = any(holding)
        elif kinds == len(group) > 2:  # each wider than the one before, say
            are_stages = all(holding)
        else:
            depths = {len(self.inside(module)) for module in group}
            are_stages = (
                all(holding)
                and (len(group) <= 2 or len(depths) > 1)
                and all(self._repeats(module) for module in group)
            )
        if not are_stages:
            return group
        return [block for module in group for block in self.inside(module)]

    def _holds_blocks(self, module: nn.Module) -> bool:
        """Whether most of the module's parameters belong to blocks inside, none to experts."""
        blocks = [block for block in self.inside(module) if block not in self._mixtures]
        return 2 * sum(map(_size, blocks)) > _size(module)

    def _repeats(self, module: nn.Module) -> bool:
        """Whether most of the blocks inside have their like among them, or there is only one."""
        looks = Counter(map(self._look, self.inside(module)))
        alike = sum(number for number in looks.values() if number > 1)
        return 2 * alike > looks.total() or looks.total() == 1

    def _look(self, module: nn.Module) -> Hashable:
        if module not in self._looks:
            self._looks[module] = tuple(
                (name, None if is_lazy(p) else p.shape) for name, p in module.named_parameters()
            )
        return self._looks[module]


def _numbered_children(module: nn.Module) -> list[nn.Module]:
    """A module's children with parameters, if they are of one class, more than layers, and their
    names differ in a number that counts them; else none.
    """
    children = {name: child for name, child in module.named_children() if _size(child)}
    found = [re.fullmatch(r"(.*?)(\d+)", name) for name in children]
    numbers = [int(match[2]) for match in found if match is not None]
    is_alike = (
        len({original_class(type(child)) for child in children.values()}) == 1
        and len(numbers) == len(children)
        and len({match[1] for match in found if match is not None}) == 1
        and numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        and all(map(has_forward, children.values()))
        and not any(is_layer(child) or not list(child.children()) for child in children.values())
    )
    return list(children.values()) if is_alike else []


def _loops_over_children(module: nn.Module) -> bool:
    """Whether it has several such children and none of its methods calls them by their names."""
    cls = original_class(type(module))
    if isinstance(module, _CONTAINERS) or not has_forward(module):
        return False
    children = _numbered_children(module)
    if len(children) < 2:
        return False
    named = {
        named
        for base in cls.__mro__
        if base is not nn.Module and issubclass(base, nn.Module)
        for name, method in vars(base).items()
        if name != "__init__"
        for code in codes_in(method)
        for named in code.co_names
    }
    return not any(name in named for name, _ in module.named_children())


def _by_class(modules: Iterable[nn.Module]) -> dict[type[nn.Module], list[nn.Module]]:
    """The modules by class, without single layers, for which a region saves nothing."""
    groups: dict[type[nn.Module], list[nn.Module]] = {}
    for module in modules:
        if not is_layer(module):
            groups.setdefault(original_class(type(module)), []).append(module)
    return groups


def _callables(containers: Iterable[nn.Module]) -> Iterator[nn.Module]:
    for container in containers:
        for child in container.children():
            if has_forward(child):
                yield child
            else:
                yield from _callables([child])


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


def _size(module: nn.Module) -> int:
    """The number of elements of its parameters, and not 0 if it has any."""
    return sum(1 if is_lazy(p) else max(p.numel(), 1) for p in module.parameters())


def _is_mixture(holder: nn.Module, child: nn.Module, found: list[nn.Module]) -> bool:
    """Whether `child` holds experts: beside it, `holder` has a layer or a parameter that gives each
    of them a number.
    """
    if len(found) < 2 or found != list(child.children()):
        return False
    widths = {size for parameter in found[0].parameters() for size in _shape(parameter)}
    beside = [
        list(m.parameters())
        for m in holder.children()
        if m is not child and not isinstance(m, nn.Embedding)  # tokens for each, as SAM's masks
    ]
    beside += [[parameter] for parameter in holder._parameters.values() if parameter is not None]
    routers = [
        {_shape(parameter) for parameter in parameters}
        for parameters in beside
        if all(len(found) in _shape(parameter) for parameter in parameters)
    ]
    return any(
        len(shape) == 2 and sum(shape) - len(found) in widths
        for shapes in routers
        for shape in shapes
    )


def _shape(parameter: nn.Parameter) -> tuple[int, ...]:
    return () if is_lazy(parameter) else tuple(parameter.shape)
