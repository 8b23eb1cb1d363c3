"""The sentinel's states, and the table of transitions."""

from enum import Enum

from rollback.sentinel.verdict import Kind


class State(str, Enum):
    """The sentinel's state between two observations."""

    LEARNING = "learning"  # too few accepted values to judge by; non-finite ones are called all the same
    HEALTHY = "healthy"
    WATCHING = "watching"  # an excursion is on and may yet recover
    CALLED = "called"  # it was called: not called again until it has recovered or become the new level


class Event(str, Enum):
    """What a finite observation means in the present state."""

    CALM = "calm"
    READY = "ready"
    HIGH = "high"
    CALL = "call"
    RECOVERED = "recovered"
    PERSISTED = "persisted"


TRANSITIONS: dict[tuple[State, Event], tuple[State, Kind]] = {
    (State.LEARNING, Event.CALM): (State.LEARNING, Kind.HEALTHY),
    (State.LEARNING, Event.READY): (State.HEALTHY, Kind.HEALTHY),
    (State.HEALTHY, Event.CALM): (State.HEALTHY, Kind.HEALTHY),
    (State.HEALTHY, Event.HIGH): (State.WATCHING, Kind.WATCH),
    (State.HEALTHY, Event.CALL): (State.CALLED, Kind.SPIKE),
    (State.WATCHING, Event.HIGH): (State.WATCHING, Kind.WATCH),
    (State.WATCHING, Event.CALL): (State.CALLED, Kind.SPIKE),
    (State.WATCHING, Event.RECOVERED): (State.HEALTHY, Kind.HEALTHY),
    (State.WATCHING, Event.PERSISTED): (State.HEALTHY, Kind.HEALTHY),
    (State.CALLED, Event.HIGH): (State.CALLED, Kind.WATCH),
    (State.CALLED, Event.RECOVERED): (State.HEALTHY, Kind.HEALTHY),
    (State.CALLED, Event.PERSISTED): (State.HEALTHY, Kind.HEALTHY),
}
"""(state, event) -> (next state, kind of the verdict). Non-finite observations are called in every state and change no
state."""
