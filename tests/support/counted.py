"""What a test has counted is told below the results of all, also where it ran in a process of its own."""

from collections.abc import Callable

Tell = Callable[[str], None]
"""The fixture `tell`."""
TOLD = "told"
