"""A function exchanged in one thread: other threads call the original, whichever order they end in,
and what others put in its place lives on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import torch

from memopt.memory.backwards import no_backward, weighted_backward
from memopt.memory.exchanged import exchanged


def plus(number: int) -> Callable[..., int]:
    return lambda original, *args: original(*args) + number


def in_a_thread(run: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(run()))
    thread.start()
    thread.join()
    return found[0]


def test_this_thread_alone_and_the_inner_one_calls_the_outer_one() -> None:
    owner = SimpleNamespace(one=lambda: 1)
    original = owner.one
    with exchanged(owner, "one", plus(10)), exchanged(owner, "one", lambda old: old() * 3):
        assert owner.one() == 33
        assert in_a_thread(lambda: owner.one()) == 1
    assert owner.one is original


def test_threads_that_overlap_end_in_any_order() -> None:
    owner = SimpleNamespace(one=lambda: 1)
    original = owner.one
    here, there = ExitStack(), ExitStack()
    here.enter_context(exchanged(owner, "one", plus(10)))
    in_a_thread(lambda: there.enter_context(exchanged(owner, "one", plus(100))))
    assert owner.one() == 11
    here.close()  # before the other, which began later
    assert owner.one() == 1
    there.close()
    assert owner.one is original


def test_what_others_put_in_its_place_lives_on() -> None:
    owner = SimpleNamespace(one=lambda: 1)
    with exchanged(owner, "one", plus(10)):
        ours = owner.one
        theirs = owner.one = lambda: ours() + 0.5
        assert owner.one() == 11.5
        with exchanged(owner, "one", plus(100)):
            assert owner.one() == 111.5
        assert owner.one is theirs
    assert owner.one is theirs
    assert owner.one() == 1.5


def test_a_class_inherits_again() -> None:
    class Base:
        def one(self) -> int:
            return 1

    class Derived(Base):
        pass

    with exchanged(Derived, "one", plus(10)):
        assert (Derived().one(), Base().one()) == (11, 1)
    assert "one" not in vars(Derived)


def test_a_thread_that_trains_gets_its_gradients_while_another_predicts() -> None:
    engine: Any = torch.autograd
    before = engine._engine_run_backward

    def gradient() -> float | None:
        x = torch.ones(1, requires_grad=True)
        (3 * x).sum().backward()
        return None if x.grad is None else x.grad.item()

    inner, outer = ExitStack(), ExitStack()
    outer.enter_context(no_backward())
    assert gradient() == 0
    assert in_a_thread(gradient) == 3
    in_a_thread(lambda: inner.enter_context(weighted_backward("test", 0.5)))
    outer.close()
    assert gradient() == 3
    inner.close()
    assert engine._engine_run_backward is before
