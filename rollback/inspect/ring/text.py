"""The ring for a terminal: what `rollback ring list` and `verify` print."""

import shlex
from collections.abc import Iterable

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from rollback.facts.training import Tier
from rollback.inspect.ring.checkpoints import PLACES, Listing
from rollback.inspect.ring.verify import Verification
from rollback.rundir.paths import WRITING
from rollback.terminal.escape import quoted
from rollback.terminal.quantities import duration, size

_WIDEST = 1000
_STYLES = {"good": "green", "damaged": "red", "quarantined": "red", "discarded": "dim", "unknown": "yellow"}


def print_listing(console: Console, listing: Listing) -> None:
    if not listing.checkpoints:
        console.print("no checkpoints")
    table = _table("checkpoint", "step", "batch", "age", "size", "ranks", "where", "status")
    for entry in listing.checkpoints:
        status = Text(entry.status, style=_STYLES.get(entry.status, ""))
        if entry.checkpoint == listing.final:
            status.append(", final", style="bold")
        if entry.pinned:
            status.append(", pinned", style="bold")
        batch = "?" if entry.batch is None else str(entry.batch)
        age = "?" if entry.age is None else duration(entry.age)
        ranks = "?" if entry.ranks is None else str(entry.ranks)
        table.add_row(
            quoted(entry.checkpoint), str(entry.step), batch, age, size(entry.bytes), ranks, _where(entry.tiers), status
        )
    if listing.checkpoints:
        _print_whole(console, table)
    for shared in listing.frozen:
        what = f"frozen weights, stored once: {size(shared.bytes)} for {shared.checkpoints} checkpoints ({shared.file})"
        console.print(quoted(what), soft_wrap=True)
    console.print(quoted(f"the ring is at {listing.ring}"))
    if listing.url is not None:
        command = f"rollback ring list {shlex.quote(listing.url)}"
        console.print(quoted(f"what the run keeps at its URL is not listed here: {command}"), soft_wrap=True)
    _print_faults(console, [(entry.checkpoint, entry.fault) for entry in listing.checkpoints if entry.fault])
    _print_faults(console, [(entry.slot, entry.fault) for entry in listing.damaged_slots])
    _print_leftovers(console, listing.leftovers)


def print_verification(console: Console, verification: Verification) -> None:
    table = _table("checkpoint", "step", "size", "where", "status", "")
    for entry in verification.checkpoints:
        fault = Text("not readable", style="yellow") if entry.unreadable else Text("damaged", style="red")
        found = Text("intact", style="green") if entry.intact else fault
        if entry.sound and not entry.intact:
            found.append(f" in {_where(tier for tier in entry.tiers if tier not in entry.sound)}")
        where = _where(entry.tiers)
        table.add_row(quoted(entry.checkpoint), str(entry.step), size(entry.bytes), where, entry.status, found)
    if verification.checkpoints:
        _print_whole(console, table)
    faults = [(entry.checkpoint, fault.fault) for entry in verification.checkpoints for fault in entry.faults]
    _print_faults(console, faults + [(entry.slot, entry.fault) for entry in verification.damaged_slots])
    _print_leftovers(console, verification.leftovers)
    total = len(verification.checkpoints)
    discarded = sum(entry.intact and entry.status == "discarded" for entry in verification.checkpoints)
    also = f" ({discarded} discarded by a rollback)" if discarded else ""
    console.print(f"{verification.intact} of {total} intact{also}")


def _where(tiers: Iterable[Tier]) -> str:
    return ", ".join(PLACES[tier].removeprefix("the ") for tier in tiers)


def _print_faults(console: Console, faults: Iterable[tuple[str, str]]) -> None:
    for checkpoint, fault in faults:
        console.print(Text.assemble((checkpoint, "bold"), ": ").append_text(quoted(fault)), soft_wrap=True)


def _print_leftovers(console: Console, leftovers: Iterable[str]) -> None:
    for name in leftovers:
        kind = "being written" if name.startswith(WRITING) else "on its way out"
        console.print(quoted(f"{name}: {kind}, or left by a crash; the next start sees to it"), soft_wrap=True)


def _print_whole(console: Console, table: Table) -> None:
    """Where the terminal is too narrow it breaks the lines: a name or a number that is cut off is another one."""
    table.width = Measurement.get(console, console.options.update(max_width=_WIDEST), table).maximum
    console.print(table, crop=False)


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    for heading in headings:
        number = heading in ("step", "batch", "age", "size", "ranks")
        table.add_column(
            heading, justify="right" if number else "left", no_wrap=number or heading == "checkpoint", overflow="fold"
        )
    return table
