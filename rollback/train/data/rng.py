"""Reads, restores and splits the random states of a process.

A training process draws from four kinds of generators: Python's `random`, NumPy's global one, torch's CPU one, and one
for each CUDA device. `capture` returns their states as a tree of JSON values and CPU tensors for a checkpoint. NumPy is
optional: a process that has not imported it has no NumPy state.
"""

import hashlib
import importlib
import random
import sys
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from rollback.errors import UsageError


class CpuStates(NamedTuple):
    """The CPU random states in the form of the libraries: quick to swap, not for a file."""

    python: tuple[Any, ...]
    numpy: tuple[Any, ...] | None
    torch: torch.Tensor


def capture(cuda: bool = True) -> dict[str, Any]:
    """The random states of this process, as a tree of JSON values and CPU tensors that nothing else refers to.

    Keys: `python`, `numpy` (None where NumPy has not been imported), `torch` (uint8 tensor) and `cuda` (one uint8
    tensor for each visible device; empty when `cuda` is False or CUDA was never initialised); where that is not empty,
    `device`, the number of the one that the process works on.
    """
    tree = {**_to_tree(cpu_states()), "cuda": []}
    if cuda and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        tree |= {"cuda": torch.cuda.get_rng_state_all(), "device": torch.cuda.current_device()}
    return tree


def restore(state: dict[str, Any]) -> None:
    """Restore the states from `capture`, in this process or another."""
    _set_cpu_states(_from_tree(state))
    for device, cuda_state in _by_device(state["cuda"], state.get("device")).items():
        torch.cuda.set_rng_state(cuda_state, device)


def _by_device(states: list[torch.Tensor], before: int | None) -> dict[int, torch.Tensor]:
    """The states of devices for those that are here, by number. Another machine, or another CUDA_VISIBLE_DEVICES, may
    have fewer, and may number otherwise the one that the process works on: it gets the state of the one from before.

    before: its number then; None: of a checkpoint that does not tell.
    """
    if not states:
        return {}
    found = dict(enumerate(states[: torch.cuda.device_count()]))
    if before is not None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found[torch.cuda.current_device()] = states[before]
    return found


@contextmanager
def preserved() -> Iterator[None]:
    """The CPU random states after the block are those before it, whatever is drawn or seeded inside."""
    before = cpu_states()
    try:
        yield
    finally:
        _set_cpu_states(before)


def drawn_since(before: CpuStates) -> bool:
    """Whether this process has drawn or seeded anything since `before` was read."""
    return not _same(before, cpu_states())


class RandomStream:
    """CPU random states besides those of the process. Draws inside `with stream:` come from the stream.

    Data that are drawn during training have their own stream, so that batch b is the same whatever the model has drawn
    before. If the block raises, the stream stays as it was.
    """

    def __init__(self, states: CpuStates) -> None:
        self._states = states
        self._outside: CpuStates | None = None
        self._left: CpuStates | None = None

    @property
    def drawn_beside(self) -> bool:
        """Whether the process has drawn or seeded anything outside since the last block of the stream."""
        return self._left is not None and drawn_since(self._left)

    def copy(self) -> "RandomStream":
        """Another stream with the same state."""
        return RandomStream(self._states)

    @classmethod
    def take_over(cls) -> "RandomStream":
        """A stream with the process's states. The process itself goes on with seeds drawn from a copy of them.

        Draws in the stream get the same numbers as without a guard, as long as nothing else draws. They never get the
        numbers that the process draws from now on.
        """
        stream = cls(cpu_states())
        _reseed()
        return stream

    @classmethod
    def split_off(cls) -> "RandomStream":
        """A stream with seeds drawn from a copy of the process's states. The process's states do not change."""
        with preserved():
            _reseed()
            return cls(cpu_states())

    def __enter__(self) -> None:
        self._outside = cpu_states()
        _set_cpu_states(self._states)

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        assert self._outside is not None
        if error is None:
            self._states = cpu_states()
        _set_cpu_states(self._outside)
        self._left = self._outside

    @classmethod
    def of_process(cls) -> "RandomStream":
        """A copy of the process's states, for work that is done ahead: see `hand_over`."""
        return cls(cpu_states())

    def hand_over(self) -> None:
        """Set the process's states to the stream's, as if the process had done the stream's work."""
        _set_cpu_states(self._states)

    def state_dict(self) -> dict[str, Any]:
        """The stream's states in the form of `capture`."""
        return {**_to_tree(self._states), "cuda": []}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> "RandomStream":
        return cls(_from_tree(state))


def derived(state: dict[str, Any], key: str) -> dict[str, Any]:
    """Other random states, in the form of `capture`: a pure function of `state` and `key`. Draws nothing."""
    if state["numpy"] is not None:
        importlib.import_module("numpy")  # seeding leaves out a library that nobody has imported yet
    with preserved():
        seed_all(f"{_sha256_of(state)}/{key}")
        other = capture(cuda=False)
        seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())
    other["numpy"] = other["numpy"] if state["numpy"] is not None else None
    other["cuda"] = [torch.Generator(device="cuda").manual_seed(seed).get_state() for _ in state["cuda"]]
    return {**other, "device": state["device"]} if "device" in state else other


def digest_of(state: dict[str, Any], place: str) -> int:
    """A hash of a place and of the CPU states in `state` (from `capture`): 64 bits, never 0."""
    return int(hashlib.sha256(f"{_sha256_of(state)}/{place}".encode()).hexdigest()[:16], 16) or 1


def _sha256_of(state: dict[str, Any]) -> str:
    digest = hashlib.sha256(state["torch"].numpy().tobytes())
    for library in ("python", "numpy"):
        if state[library] is not None:
            digest.update(state[library]["words"].numpy().tobytes() + str(state[library].get("position")).encode())
    return digest.hexdigest()


def seed_all(key: str) -> None:
    """Seed the CPU random states as a pure function of `key`, the same in every process and on every platform."""
    source = random.Random(key)
    random.seed(source.getrandbits(64))
    torch.default_generator.manual_seed(source.getrandbits(63))
    words = [source.getrandbits(32) for _ in range(4)]
    if numpy := _numpy():
        numpy.random.seed(words)


def _reseed() -> None:
    """Seed each library from its own next numbers, so that a library that was seeded alone stays reproducible."""
    random.seed(random.getrandbits(64))
    torch.default_generator.manual_seed(int(torch.empty((), dtype=torch.int64, device="cpu").random_().item()))
    if numpy := _numpy():
        numpy.random.seed(numpy.random.randint(0, 2**32, size=4, dtype=numpy.uint32))


def _numpy() -> Any:
    """The numpy module, if this process has imported it."""
    return sys.modules.get("numpy")


def cpu_states() -> CpuStates:
    """The present states of this process. Raises UsageError where NumPy's global generator is not the usual one."""
    return CpuStates(random.getstate(), numpy_state(), torch.default_generator.get_state())


def numpy_state() -> tuple[Any, ...] | None:
    """NumPy's part of `cpu_states`."""
    if (numpy := _numpy()) is None:
        return None
    if (kind := type(numpy.random.get_bit_generator()).__name__) != "MT19937":
        raise UsageError(
            f"NumPy's global generator is a {kind} (np.random.set_bit_generator), and a checkpoint "
            "keeps the usual one alone, an MT19937",
            hint="draw from a np.random.default_rng(seed) of your own: one that is an attribute of the data set or "
            "sampler is kept, and one with state_dict and load_state_dict can be handed to the guard",
        )
    state: tuple[Any, ...] = numpy.random.get_state()
    return state


def _same(one: CpuStates, other: CpuStates) -> bool:
    if not torch.equal(one.torch, other.torch) or one.python != other.python:
        return False
    if one.numpy is None or other.numpy is None:
        return True  # NumPy was imported meanwhile
    return one.numpy[2:] == other.numpy[2:] and bool((one.numpy[1] == other.numpy[1]).all())


def _set_cpu_states(states: CpuStates) -> None:
    random.setstate(states.python)
    torch.default_generator.set_state(states.torch)
    if states.numpy is not None:
        import numpy as np

        np.random.set_state(states.numpy)


def _to_tree(states: CpuStates) -> dict[str, Any]:
    version, words, gauss_next = states.python
    tree: dict[str, Any] = {
        "python": {"version": version, "words": _int64(array("q", words)), "gauss_next": gauss_next},
        "numpy": None,
        "torch": states.torch.clone(),
    }
    if states.numpy is not None:
        algorithm, words, position, has_gauss, gauss = states.numpy
        tree["numpy"] = {
            "algorithm": str(algorithm),
            "words": _int64(array("q", words)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "gauss": float(gauss),
        }
    return tree


def _int64(words: "array[int]") -> torch.Tensor:
    """The words as a tensor, without a loop over them: a snapshot waits for this."""
    return torch.frombuffer(words, dtype=torch.int64)


def _from_tree(tree: dict[str, Any]) -> CpuStates:
    python, numpy = tree["python"], tree["numpy"]
    return CpuStates(
        (python["version"], tuple(python["words"].tolist()), python["gauss_next"]),
        numpy
        and (
            numpy["algorithm"],
            numpy["words"].tolist(),
            numpy["position"],
            numpy["has_gauss"],
            numpy["gauss"],
        ),
        tree["torch"],
    )
