"""The base class of all facts, and the ranges of batches that many facts hold. The facts themselves are in
`rollback.facts.training`."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, model_validator

Writer = Literal["train", "supervisor", "either"]
"""Which journal a fact belongs to; `either`: the journal of the process that writes the fact."""
Count = Annotated[int, Field(ge=0, lt=1 << 53)]
"""A number of steps, batches or bytes, or a position among them. What is below 0, or what JSON readers would round, is
damage: to be found where a line is read, and not where somebody reckons with it."""


class Window(BaseModel, frozen=True, extra="forbid"):
    """Inclusive range of batches, `first` to `last`."""

    first: Count
    last: Count

    @model_validator(mode="after")
    def _ordered(self) -> "Window":
        if self.last < self.first:
            raise ValueError(f"window ends ({self.last}) before it begins ({self.first})")
        return self

    def __contains__(self, batch: int) -> bool:
        return self.first <= batch <= self.last

    def __len__(self) -> int:
        return self.last - self.first + 1

    def __str__(self) -> str:
        return f"{self.first}:{self.last}"

    def in_words(self) -> str:
        """For sentences; the verb behind it must suit one batch and many."""
        return f"batches {self}" if len(self) > 1 else f"batch {self.first}"

    @staticmethod
    def merged(windows: "Iterable[Window]") -> "list[Window]":
        """The same batches as sorted windows that neither touch nor overlap."""
        merged: list[Window] = []
        for window in sorted(windows, key=attrgetter("first")):
            if merged and window.first <= merged[-1].last + 1:
                merged[-1] = Window(first=merged[-1].first, last=max(merged[-1].last, window.last))
            else:
                merged.append(window)
        return merged

    @staticmethod
    def holding(windows: "Sequence[Window]", batch: int) -> "Window | None":
        """The one of these windows that has the batch, if any. windows: as `merged` gives them; many batches are asked
        of."""
        place = bisect_right(windows, batch, key=attrgetter("first"))
        return windows[place - 1] if place and batch in windows[place - 1] else None


class SamplesFrom(BaseModel, frozen=True, extra="forbid"):
    """The complete list of data set samples to leave out, starting at a batch."""

    batch: Count = 0
    samples: tuple[Count, ...]


InitialLayout = Literal["safetensors", "dcp"]


class JournalledModel(BaseModel, frozen=True, extra="forbid", ser_json_inf_nan="strings"):
    """Base of what a journal's line has."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**{name: escape_surrogates(value) for name, value in fields.items()})

    # So a line is validated without this call: a journal has half a million, and hardly one needs it.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]


class InitialState(JournalledModel):
    """What a new run began with: a checkpoint that others have written."""

    path: str
    layout: InitialLayout
    files: int
    bytes: Count
    hash: str
    """Of one file, as of a shard; of several, over their names and hashes."""
    tensors: int
    """Of the model."""
    optimizer: int
    """Tensors of the optimizer's state; 0: it began without one."""
    left_aside: int
    """Tensors in it that are neither's."""

    def in_words(self) -> str:
        state = f" and {self.optimizer} of the optimizer's state" if self.optimizer else ""
        aside = f"; {self.left_aside} others were left aside" if self.left_aside else ""
        return f"{self.tensors} tensors{state} from {self.path} ({self.bytes} bytes, hash {self.hash}){aside}"


class Sharding(JournalledModel):
    """How a model is spread over the ranks."""

    parameters: int
    """Of the model."""
    sharded: int
    """How many of them no rank holds whole."""
    meshes: tuple[str, ...]
    """Of ranks, over which they are spread: `4 ranks`, or the names and sizes of the dimensions."""

    def in_words(self) -> str:
        return f"{self.sharded} of {self.parameters} parameters are sharded over {' and '.join(self.meshes)}"


class Fact(JournalledModel):
    """Base of all facts."""

    writer: ClassVar[Writer] = "train"
    """The journal that the fact belongs to."""
    kind: str
    """Names the kind of line."""


_NOTHING: set[str] = set()


def drop_fields_set(facts: Iterable[Fact]) -> None:
    """Give up the names of the fields that were given and did not take their defaults. Nobody asks a fact for them, and
    these sets are a third of the memory of a long run's facts."""
    give_up = object.__setattr__  # a fact does not change otherwise
    for fact in facts:
        give_up(fact, "__pydantic_fields_set__", _NOTHING)


def escape_surrogates(value: Any) -> Any:
    """The value with lone surrogates escaped: an exception that quotes an undecodable path must not fail the
    journal."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {escape_surrogates(key): escape_surrogates(item) for key, item in value.items()}
    return [escape_surrogates(item) for item in value] if isinstance(value, (list, tuple)) else value


def by_whom(who: str | None, why: str | None) -> str:
    """Who ordered something and why, in words; a reason need not be given."""
    return f"{who}: {why}" if why else f"{who}"
