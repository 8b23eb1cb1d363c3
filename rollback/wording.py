"""Lists and counts in sentences, and values in texts."""

import re
from collections.abc import Sequence
from dataclasses import dataclass


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

    def put_into(self, text: str) -> str:
        """An advice that is written for those who make a guard."""
        if self.first and re.search(r"Guard\(|guard\.", text):
            text = f"{text}. {self.first}"
        text = text.replace("Guard(..., ", self.hand_over).replace("guard.step", self.step)
        if self.keep is not None:
            return text.replace("guard.keep", self.keep)
        by_object = rf"{self.hand_over}\2=\2), an object that has it, with state_dict and load_state_dict"
        return re.sub(r"(\w+ = )?guard\.keep\((\w+)=[^)]*\)", by_object, text)


def filled(advice: tuple[str, str], **values: object) -> tuple[str, str]:
    """An advice, code and text, with values where its text names them."""
    code, text = advice
    return code, text.format(**values)
