"""Whatever runs inside, everything is afterwards as it was.

    with unchanged(model, batch, loss):
        loss(model(batch)).backward()

Not a list of what to save: the walk of reach.py notes every object that the roots hold, and the
bytes of tensors are copied before they are written first (writes.py). Where a mode would change
what is measured, the tensors that an earlier run wrote are copied beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager

from torch import Tensor

from memopt.memory.generators import kept_random
from memopt.memory.histories import Histories
from memopt.memory.iterators import LentIterators
from memopt.memory.reach import reached
from memopt.memory.settings import kept_settings
from memopt.memory.storages import storages, storages_of
from memopt.memory.tensors import Contents, KeptTensor, restore_versions, unseen
from memopt.memory.writes import Exports, Writes

# Up to so many bytes a storage is copied at once: a kernel that does not say what it writes writes
# these, if any.
_SMALL = 1 << 16


class _Attempts:
    """Calls that restore something: each is made, whatever those before it raised."""

    def __init__(self) -> None:
        self._error: Exception | None = None

    def __call__(self, restore: Callable[..., object], *args: object) -> None:
        try:
            restore(*args)
        except Exception as error:
            self._error = self._error or error

    def end(self) -> None:
        """Raise the first error that there was."""
        if self._error is not None:
            raise self._error


class Written:
    """The tensors from before a run that the run wrote."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._keys: set[object] = set()

    def add(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            keys = storages([tensor]).keys()
            if not self._keys.issuperset(keys):
                self._keys.update(keys)
                self.tensors.append(tensor)


class Before:
    """Everything as it is now.

    Args:
        roots: modules, functions, batches, optimizers; with all that they hold.
        written: tensors that may be written unseen. Their bytes are copied now.
        at_once: storages of so many bytes are copied now, too.
        waits: also those of other devices than the CPU.
    """

    def __init__(
        self,
        roots: Iterable[object],
        written: Iterable[Tensor] = (),
        at_once: int = _SMALL,
        waits: bool = True,
    ) -> None:
        with unseen():
            found = reached(roots)
            self._objects, self._iterators = found.objects, found.iterators
            self._tensors = {id(tensor): KeptTensor(tensor) for tensor in found.tensors}
            self.histories = Histories(found.tensors)
            devices = {tensor.device for tensor in found.tensors}
            self._random = [*kept_random(devices), *found.generators]
            self._is_sharded = found.is_sharded
            self._is_compiled = found.is_compiled
            self._contents = Contents()
            for tensor in found.tensors:
                self._contents.adopt(tensor)
                is_copied = _fits(tensor, at_once) and (waits or tensor.device.type == "cpu")
                if found.is_compiled or found.steps_in_backward or is_copied:
                    self._contents.keep(tensor)
            for tensor in written:
                self.about_to_write(tensor)
        self._settings = kept_settings({device.type for device in devices})
        self.written = Written()

    def see(self, tensor: Tensor) -> None:
        """Notes a tensor that was not reached, and existed before, before it changes."""
        if tensor.is_leaf and tensor.requires_grad and id(tensor) not in self._tensors:
            one = self._keep_while_alive(tensor)
            if one.gradient is not None:
                self.see(one.gradient)

    def about_to_write(self, tensor: Tensor) -> None:
        """Notes a tensor's bytes before an operator writes them."""
        if self._is_sharded and id(tensor) not in self._tensors:
            return  # gathered for a time, by what knows of it
        if id(tensor) not in self._tensors:
            self._keep_while_alive(tensor)
        with unseen():
            self._contents.keep(tensor)

    def _keep_while_alive(self, tensor: Tensor) -> KeptTensor:
        """Notes a tensor that was not reached: if it existed before, something else holds it.

        A tensor that no operator made (it came back from where it was offloaded to) looks the same,
        and ends inside.
        """
        key = id(tensor)
        tensors = self._tensors
        tensors[key] = one = KeptTensor(tensor, ended=lambda: tensors.pop(key, None))
        return one

    def _alive(self) -> list[tuple[KeptTensor, Tensor]]:
        kept = list(self._tensors.values())
        return [(one, tensor) for one in kept if (tensor := one.tensor) is not None]

    def computed(self) -> list[Tensor]:
        """The tensors that were reached and are results of autograd."""
        return [tensor for _, tensor in self._alive() if not tensor.is_leaf]

    def without_gradients(self) -> None:
        """Removes gradients: what is accumulated is new memory, as in a first step."""
        for one, tensor in self._alive():
            if one.gradient is not None and tensor.is_leaf:
                tensor.grad = None

    def lend(self) -> None:
        """Whatever runs from now on, until all is restored, moves copies of iterators, and goes
        back no further than to the tensors that are there.
        """
        self._iterators.lend()
        with unseen():
            self.histories.cut()

    def rehearse(self, run: Callable[[], object]) -> None:
        """Run something, and put everything back. In later runs no mode has to see it."""
        with self.watching():
            run()
        self.restore()
        self.lend()
        self.without_gradients()

    def rehearse_or_without_cut(self, run: Callable[[], object]) -> None:
        """Rehearse what may differentiate something from before, which needs its history."""
        try:
            self.rehearse(run)
        except RuntimeError:
            if not len(self.histories):
                raise
            self.restore()
            self.histories = Histories(())
            self.lend()
            self.without_gradients()
            self.rehearse(run)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A scope in which operators are seen, and what they write is copied before."""

        def about_to_write(tensor: Tensor) -> None:
            self.about_to_write(tensor)
            self.written.add([tensor])

        with ExitStack() as stack:
            if not self._is_compiled:  # all is copied already, and Dynamo would guard on the mode
                stack.enter_context(Exports(about_to_write))
            stack.enter_context(Writes(self.see, about_to_write))
            yield

    def restore(self) -> None:
        """Everything is as it was then, also after an error in the middle.

        Raises:
            The first error that putting something back raised, when all was tried.
        """
        attempt = _Attempts()
        with unseen():
            attempt(self._iterators.take_back)
            for restore in self._objects:
                attempt(restore)
            for restore in self.histories.restores():
                attempt(restore)
            tensors = self._alive()
            for one, tensor in tensors:
                attempt(one.restore, tensor)
            for restore in self._contents.restores():
                attempt(restore)
            for one, tensor in tensors:
                attempt(one.restore_gradient, tensor)
            attempt(restore_versions, ((tensor, one.version) for one, tensor in tensors))
            for restore in self._random:
                attempt(restore)
        for restore in self._settings:
            attempt(restore)
        attempt.end()

    def forget(self) -> None:
        """Hold nothing any more, whoever holds this."""
        self._objects, self._tensors, self._random, self._settings = [], {}, [], []
        self._contents, self._iterators = Contents(), LentIterators((), ())
        self.histories = Histories(())


@contextmanager
def unchanged(
    *roots: object, written: Written | None = None, gradients: bool = False, waits: bool = True
) -> Iterator[Before]:
    """Whatever runs inside, all that `roots` hold is afterwards as it was, with generators and
    PyTorch's settings; also if it raises.

    Args:
        written: what an earlier run of the same step wrote. With it no mode is on, which would
            change what is measured; without it one is, and `Before.written` says what was written.
        gradients: whether those that are there can be seen inside. Else leaves have none at first.
        waits: whether small tensors of other devices than the CPU are copied at once too. They are
            compared in the end, for which the host waits.
    """
    before = Before(roots, () if written is None else written.tensors, waits=waits)
    with ExitStack() as stack:
        stack.callback(before.forget)
        stack.callback(before.restore)
        before.lend()
        if not gradients:
            before.without_gradients()
        if written is None:
            stack.enter_context(before.watching())
        yield before


def _fits(tensor: Tensor, nbytes: int) -> bool:
    return all(storage.nbytes() <= nbytes for storage in storages_of(tensor))
