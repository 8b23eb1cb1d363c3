"""Lists and counts in sentences, and values in texts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple


def first_few(names: Sequence[str], most: int) -> str:
    """`a, b and 3 more`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def counted(number: int, one: str, many: str | None = None) -> str:
    """`1 batch`, `2 batches`. many: default: the word for one with an s."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def ranks_in_words(ranks: Sequence[int], most: int | None = None) -> str:
    """`rank 3`, `ranks 0, 1`; of many ranks the first few."""
    return f"rank{'s' * (len(ranks) > 1)} {first_few([*map(str, ranks)], len(ranks) if most is None else most)}"


def gone_in_words(ranks: Sequence[int]) -> str:
    """`rank 3 is gone`, `ranks 0, 1 are gone`."""
    return f"{ranks_in_words(ranks)} {'are' if len(ranks) > 1 else 'is'} gone"


@dataclass(frozen=True)
class Calls:
    """What a script types to reach the guard, for advice. hand_over: where an object is handed over, up to its name;
    step: the number of the step; keep: where a value is to be kept, None where only objects can be; first: what is to
    be said of a script that can type none of it yet."""

    hand_over: str = "Guard(..., "
    step: str = "guard.step"
    keep: str | None = "guard.keep"
    first: str = ""

    def hands_over(self, given: str) -> str:
        return f"{self.hand_over}{given})"

    def keeps(self, given: str) -> str:
        """given: `name=value`; `kept = name=value` where a name is given to what is kept; empty: the word for it."""
        if not given:
            return self.keep or "guard.keep"
        kept, equals, value = given.rpartition(" = ")
        if self.keep is not None:
            return f"{kept}{equals}{self.keep}({value})"
        name = value.partition("=")[0]
        return f"{self.hands_over(f'{name}={name}')}, an object that has it, with state_dict and load_state_dict"


class AdviceText(NamedTuple):
    """A likely mistake of a script, by its code. text: its fields in braces are `values`, and what the script types:
    `{guard.step}`, `{guard.hand_over:name=value}`, `{guard.keep:name=value}`."""

    code: str
    text: str
    values: Mapping[str, object] = {}

    def of(self, **values: object) -> "AdviceText":
        """With values where the text names them."""
        return self._replace(values=values)

    def in_words(self, calls: Calls) -> str:
        """calls: what this script types."""
        guard = SimpleNamespace(step=calls.step, hand_over=_Call(calls.hands_over), keep=_Call(calls.keeps))
        told = self.text.format(**self.values, guard=guard)
        return f"{told}. {calls.first}" if calls.first and "guard." in self.text else told


class _Call(NamedTuple):
    write: Callable[[str], str]

    def __format__(self, given: str) -> str:
        return self.write(given)
