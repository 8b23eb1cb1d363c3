"""What a pickle says, read as data: nothing that it names is imported, and nothing is called.

A pickle is a program for a small machine. Loading runs it. This reads the same instructions and only notes what would
be made and from what, so whoever wrote the file decides nothing about this process. It serves one purpose: to read the
checkpoints of torch.distributed.checkpoint, whose table of contents is a pickle.
"""

import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

LIMIT = 1 << 30
"""Bytes; the table of a checkpoint has a few hundred for each part of a tensor."""
_LITERALS = {
    "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE", "BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1",
    "LONG4", "BINFLOAT", "FLOAT", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
}  # fmt: skip
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False, "EMPTY_DICT": dict, "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple, "EMPTY_SET": list,
}  # fmt: skip
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_NOTHING = {"PROTO", "FRAME", "STOP"}
_MARK = object()


@dataclass(eq=False)  # so that it can be a key
class Named:
    """What loading would have imported (`arguments` None), or called."""

    name: str
    """Module and name: `torch.Size`."""
    arguments: tuple[Any, ...] | None = None
    state: Any = None
    """What the object would have been filled with."""
    items: list[Any] = field(default_factory=list)
    """What would have been put into it: pairs, for a mapping."""

    def __getitem__(self, name: str) -> Any:
        """An attribute of its state. Raises ValueError where it has none."""
        if not isinstance(self.state, dict) or name not in self.state:
            raise ValueError(f"the {self.name} in it has no {name!r}")
        return self.state[name]


@dataclass(frozen=True)
class Persistent:
    """A reference to something beside the pickle: of a tensor, to its bytes."""

    content: Any


def read_pickled(data: bytes) -> Any:
    """The content of a pickle: numbers, texts, lists, tuples, dicts as they are; all else as `Named`, sets as lists.

    Raises ValueError where it is no pickle, or has an instruction that such files do not need.
    """
    reader = _Reader()
    try:
        for code, argument, _ in pickletools.genops(data):
            reader.follow(code.name, argument)
        (result,) = reader.stack
    except (IndexError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it is no sound pickle: {error!r}") from error
    if result is _MARK:
        raise ValueError("it is no sound pickle: it ends within something")
    return result


class _Reader:
    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def follow(self, code: str, argument: Any) -> None:
        """One instruction."""
        stack = self.stack
        if code in _LITERALS:
            stack.append(argument)
        elif code in _CONSTANTS:
            stack.append(_CONSTANTS[code]())
        elif code in _TUPLES:
            stack.append(tuple(reversed([stack.pop() for _ in range(_TUPLES[code])])))
        elif code not in _NOTHING:
            act = getattr(self, f"_{code.lower()}", None)
            if act is None:
                raise ValueError(f"it has the instruction {code}, which no table of a checkpoint needs")
            act(argument)

    def _mark(self, _: Any) -> None:
        self.stack.append(_MARK)

    def _above_mark(self) -> list[Any]:
        place = max(index for index, item in enumerate(self.stack) if item is _MARK)
        above = self.stack[place + 1 :]
        del self.stack[place:]
        return above

    def _pop(self, _: Any) -> None:
        self.stack.pop()

    def _memoize(self, _: Any) -> None:
        self._memo[len(self._memo)] = self.stack[-1]

    def _binput(self, place: int) -> None:
        self._memo[place] = self.stack[-1]

    def _binget(self, place: int) -> None:
        self.stack.append(self._memo[place])

    _put = _long_binput = _binput
    _get = _long_binget = _binget

    def _tuple(self, _: Any) -> None:
        self.stack.append(tuple(self._above_mark()))

    def _append(self, _: Any) -> None:
        item = self.stack.pop()
        self._list().append(item)

    def _appends(self, _: Any) -> None:
        above = self._above_mark()
        self._list().extend(above)

    _additems = _appends

    def _list(self) -> list[Any]:
        top = self.stack[-1]
        return top.items if isinstance(top, Named) else top

    def _setitem(self, _: Any) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._put_items([key, value])

    def _setitems(self, _: Any) -> None:
        self._put_items(self._above_mark())

    def _put_items(self, flat: list[Any]) -> None:
        pairs = list(zip(flat[::2], flat[1::2], strict=True))
        top = self.stack[-1]
        if isinstance(top, Named):
            top.items.extend(pairs)
        else:
            top.update(pairs)

    def _global(self, argument: str) -> None:
        self.stack.append(Named(argument.replace(" ", ".")))

    def _stack_global(self, _: Any) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.stack.append(Named(f"{module}.{name}"))

    def _reduce(self, _: Any) -> None:
        arguments, called = self.stack.pop(), self.stack.pop()
        self.stack.append(Named(called.name, tuple(arguments)))

    _newobj = _reduce

    def _build(self, _: Any) -> None:
        state = self.stack.pop()
        self.stack[-1].state = state

    def _binpersid(self, _: Any) -> None:
        self.stack.append(Persistent(self.stack.pop()))
