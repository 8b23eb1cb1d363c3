"""What is raised where there is no proof that a state is that of one step's end on all ranks."""


class NotProved(Exception):
    """Why the state is not known to be that of one step's end on all ranks, in words."""


def why_not(error: Exception) -> str:
    """Why nothing was kept, in words."""
    return str(error) if isinstance(error, NotProved) else f"{type(error).__name__}: {error}"


class NextRound(NotProved):
    """Why the hosts have not agreed, or not kept what they had agreed on, though it is worth another try."""


class StoreGone(NotProved):
    """The store of the hosts cannot be reached, or can be no longer."""
