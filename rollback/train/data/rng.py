"""Reads, restores and splits the random states of a process.

A training process draws from four kinds of generators: Python's `random`, NumPy's global one, torch's CPU one, and one
for each CUDA device. `capture` returns their states as a tree of JSON values and CPU tensors for a checkpoint.
`RawRandom` reads them as bytes, at each step's end, and `tree_of` makes that tree of these.
"""

import ctypes
import hashlib
import random
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from rollback.errors import UsageError

_bit_generator: Callable[[], Any] = np.random.get_bit_generator  # type: ignore[attr-defined]
_VERSION = 3  # of Python's states
_WORDS = 624
_TWISTER = 4 * (_WORDS + 1)
"""Bytes of a Mersenne twister: its words, and the number of the next one. Python has that number first."""
_TORCH = ctypes.c_char * torch.default_generator.get_state().nbytes
"""Read so, it takes half as long as by NumPy, of which nothing is in a cache behind a step."""


class CpuStates(NamedTuple):
    """The CPU random states in the form of the libraries: quick to swap, not for a file."""

    python: tuple[Any, ...]
    numpy: tuple[Any, ...]
    torch: torch.Tensor


def capture(cuda: bool = True) -> dict[str, Any]:
    """The random states of this process, as a tree of JSON values and CPU tensors that nothing else refers to.

    Keys: `python`, `numpy`, `torch` (uint8 tensor) and `cuda` (one uint8 tensor for each visible device; empty when
    `cuda` is False or CUDA was never initialised); where that is not empty, `device`, the number of the one that the
    process works on.
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
    now = cpu_states()
    same = torch.equal(before.torch, now.torch) and before.python == now.python and before.numpy[2:] == now.numpy[2:]
    return not (same and bool((before.numpy[1] == now.numpy[1]).all()))


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
    """Other random states, in the form of `capture`: a pure function of `state` and `key`. Draws nothing. Where there
    is no GPU, they have none of the GPUs' that were: `restore` would not use them."""
    with preserved():
        seed_all(f"{_sha256_of(state)}/{key}")
        other = capture(cuda=False)
        seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())
    there = state["cuda"] if torch.cuda.is_available() else ()
    other["cuda"] = [torch.Generator(device="cuda").manual_seed(seed).get_state() for _ in there]
    return {**other, "device": state["device"]} if "device" in state else other


def digest_of(state: dict[str, Any], place: str) -> int:
    """A hash of a place and of the CPU states in `state` (from `capture`): 64 bits, never 0."""
    return int(hashlib.sha256(f"{_sha256_of(state)}/{place}".encode()).hexdigest()[:16], 16) or 1


def _sha256_of(state: dict[str, Any]) -> str:
    digest = hashlib.sha256(state["torch"].numpy().tobytes())
    for library in ("python", "numpy"):
        digest.update(state[library]["words"].numpy().tobytes() + str(state[library].get("position")).encode())
    return digest.hexdigest()


def seed_all(key: str) -> None:
    """Seed the CPU random states as a pure function of `key`, the same in every process and on every platform."""
    source = random.Random(key)
    random.seed(source.getrandbits(64))
    torch.default_generator.manual_seed(source.getrandbits(63))
    np.random.seed([source.getrandbits(32) for _ in range(4)])


def _reseed() -> None:
    """Seed each library from its own next numbers, so that a library that was seeded alone stays reproducible."""
    random.seed(random.getrandbits(64))
    torch.default_generator.manual_seed(int(torch.empty((), dtype=torch.int64, device="cpu").random_().item()))
    np.random.seed(np.random.randint(0, 2**32, size=4, dtype=np.uint32))


def cpu_states() -> CpuStates:
    """The present states of this process. Raises UsageError where NumPy's global generator is not the usual one."""
    return CpuStates(random.getstate(), _numpy_state(), torch.default_generator.get_state())


def _numpy_state() -> tuple[Any, ...]:
    if (kind := type(_bit_generator()).__name__) != "MT19937":
        raise UsageError(
            f"NumPy's global generator is a {kind} (np.random.set_bit_generator), and a checkpoint "
            "keeps the usual one alone, an MT19937",
            hint="draw from a np.random.default_rng(seed) of your own: one that is an attribute of the data set or "
            "sampler is kept, and one with state_dict and load_state_dict can be handed to the guard",
        )
    state: Any = np.random.get_state()
    return tuple(state)


def _set_cpu_states(states: CpuStates) -> None:
    random.setstate(states.python)
    torch.default_generator.set_state(states.torch)
    np.random.set_state(states.numpy)


def _to_tree(states: CpuStates) -> dict[str, Any]:
    """In the form of `capture`, without what is of devices."""
    version, words, gauss_next = states.python
    algorithm, of_numpy, position, has_gauss, gauss = states.numpy
    return {
        "python": {"version": version, "words": _int64(array("q", words)), "gauss_next": gauss_next},
        "numpy": {
            "algorithm": str(algorithm),
            "words": _int64(array("q", of_numpy)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "gauss": float(gauss),
        },
        "torch": states.torch.clone(),
    }


def _int64(words: "array[int]") -> torch.Tensor:
    """The words as a tensor, without a loop over them: a snapshot waits for this."""
    return torch.frombuffer(words, dtype=torch.int64)


def _from_tree(tree: dict[str, Any]) -> CpuStates:
    python, numpy = tree["python"], tree["numpy"]
    return CpuStates(
        (python["version"], tuple(python["words"].tolist()), python["gauss_next"]),
        (numpy["algorithm"], numpy["words"].tolist(), numpy["position"], numpy["has_gauss"], numpy["gauss"]),
        tree["torch"],
    )


class RawRandom:
    """Reads the random states of this process as bytes, in microseconds: at every step's end.

    Making Python's and NumPy's states into objects takes ten times as long as all the rest. Both lie in memory as 624
    words of the Mersenne twister and the number of the next one, and are read from there. That they lie there is proved
    before it is believed: see `_python_reader`.

    `read` returns numbers for JSON and bytes; `tree_of` turns both into what `capture` would have returned at that
    moment. Call `forget` behind each `restore`. Raises UsageError as `cpu_states` does.
    """

    def __init__(self) -> None:
        self._python = _python_reader()
        self._source: object = None
        self._numpy: tuple[bytes, list[Any]] = b"", []

    def read(self) -> tuple[dict[str, Any], list[bytes]]:
        """Numbers, and the words of torch, Python, NumPy and the GPUs (where they are used).

        The state of a GPU's generator is kept by the host, so nobody waits for the GPU.
        """
        state = torch.default_generator.get_state()
        if (source := _bit_generator()) is not self._source:
            _numpy_state()  # raises where there is another kind of generator, in whose place there is less memory
            self._source, self._words = source, _twister_at(source.ctypes.state_address)
        words = self._words.raw
        before, rest = self._numpy
        if words != before or not rest or rest[1]:  # without a number in hand only a draw makes one, or a restore
            rest = _rest_of_numpy()
            self._numpy = words, rest
        parts = [_TORCH.from_address(state.data_ptr()).raw, self._python(), words]
        told: dict[str, Any] = {"gauss_next": random._inst.gauss_next, "numpy": rest}  # type: ignore[attr-defined]
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            on_gpus = [generator.get_state() for generator in torch.cuda.default_generators]
            told["cuda"], told["device"] = len(on_gpus), torch.cuda.current_device()
            parts += [state.numpy().tobytes() for state in on_gpus]
        return told, parts

    def forget(self) -> None:
        """The states were restored."""
        self._numpy = b"", []


def _rest_of_numpy() -> list[Any]:
    """What NumPy's state has beside the words: a number in hand, drawn and not given out yet, or none."""
    state: Any = np.random.get_state(legacy=False)
    return [str(state["bit_generator"]), int(state["has_gauss"]), float(state["gauss"])]


def tree_of(told: dict[str, Any], parts: list[bytes]) -> dict[str, Any]:
    """The states as `capture` returns them."""
    following, *words = array("I", parts[1])
    *of_numpy, position = array("I", parts[2])
    algorithm, has_gauss, gauss = told["numpy"]
    numpy = algorithm, of_numpy, position, has_gauss, gauss
    states = CpuStates((_VERSION, (*words, following), told["gauss_next"]), numpy, _uint8(parts[0]))
    tree = {**_to_tree(states), "cuda": [_uint8(state) for state in parts[len(parts) - told.get("cuda", 0) :]]}
    return {**tree, "device": told["device"]} if "device" in told else tree


def _uint8(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _twister_at(address: int) -> "ctypes.Array[ctypes.c_char]":
    """A Mersenne twister's memory: whoever keeps this keeps what owns it."""
    return (ctypes.c_char * _TWISTER).from_address(address)


def _python_reader() -> Callable[[], bytes]:
    """Reads Python's words, the number of the next one first: from memory, if they are found to be there."""
    from_memory = partial(bytes, _twister_at(id(random._inst) + object.__basicsize__))

    def by_asking() -> bytes:
        *words, following = random.getstate()[1]
        return array("I", [following, *words]).tobytes()

    there = type(random._inst) is random.Random and type(random._inst).__mro__[1].__basicsize__ >= _TWISTER
    return from_memory if there and from_memory() == by_asking() else by_asking
