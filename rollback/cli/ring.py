"""`rollback ring`: the checkpoints of a run, as files: look at them, prove them, take weights out, keep one."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from rollback.cli.answers import CommandGroup, JsonOption, RunArgument, say_notices, show
from rollback.cli.options.values import parse_size
from rollback.errors import RunDirectoryError, UsageError, reporting
from rollback.terminal.messages import say

ring = typer.Typer(
    cls=CommandGroup, no_args_is_help=True, add_completion=False, help="List, verify, export and pin checkpoints."
)

_RunOrUrl = Annotated[
    str, typer.Argument(metavar="RUN", help="Run directory, or the URL of a ring.", show_default=False)
]
_NAMES = "A checkpoint's name, `final` (of a complete run), `newest-good`, or `newest` (good or not)."
_WRITABLE = "check the permissions and free space there"
_VERIFY_CODES = (
    "Exit codes: 0 all are intact; 1 some are damaged, and the run could resume from another; 65 it could from none."
)


@ring.command("list")
def list_checkpoints(run: _RunOrUrl, json: JsonOption = False) -> None:
    """Show all checkpoints, oldest first: step, batch, age, size, where they are, and whether they are good.

    Those in the ring and those in memory of this host (the fast tier). Reads manifests only, and writes nothing; a
    running run is not disturbed.
    """
    from rollback.inspect.ring.at_url import readable
    from rollback.inspect.ring.text import print_listing

    with readable(run) as place:
        listing = place.listing()
    say_notices(listing.notices)
    show(listing, print_listing, json=json)


@ring.command(epilog=_VERIFY_CODES)
def verify(
    run: _RunOrUrl,
    names: Annotated[list[str] | None, typer.Argument(help=f"{_NAMES} Default: all.", show_default=False)] = None,
    json: JsonOption = False,
) -> None:
    """Prove checkpoints readable: manifest, sizes, hashes, headers, trees, and that they are this run's model.

    In the ring and in memory of this host (the fast tier). What is wrong is named. Reads every byte, and writes
    nothing; a running run is not disturbed: what it evicts or overwrites meanwhile is named and does not count.
    """
    from rollback.inspect.ring.at_url import readable
    from rollback.inspect.ring.text import print_verification
    from rollback.inspect.ring.verify import verify as verify_checkpoints

    with readable(run) as place:
        verification = verify_checkpoints(place, names or ())
    show(verification, print_verification, json=json)
    say_notices(verification.notices)
    raise typer.Exit(verification.exit_code)


@ring.command()
def export(
    run: _RunOrUrl,
    name: Annotated[
        str | None, typer.Argument(help=f"{_NAMES} Default: `final`, else `newest-good`.", show_default=False)
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File to write (default: model.safetensors).", show_default=False),
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Above this, several files and an index, as Hugging Face has them.")
    ] = "5GB",
    dcp: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Write model and optimizer for torch.distributed.checkpoint into this directory instead. Needs torch.",
            show_default=False,
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what is there.")] = False,
) -> None:
    """Write the model's weights as plain safetensors, under the names of `model.state_dict()`.

    Parameters, and the buffers of rank 0; a sharded model is put together. The checkpoint is verified first. One that
    is only in memory of this host is held there until it is written: the run postpones a snapshot that would need that
    room.
    """
    from rollback.inspect.ring.at_url import readable
    from rollback.inspect.ring.export import export as export_model
    from rollback.terminal.quantities import size

    largest = parse_size(max_shard_size, "--max-shard-size")
    if largest < 1:
        raise UsageError(f"--max-shard-size: no tensor fits into {max_shard_size}", hint="such as 5GB or 800MB")
    if dcp is not None:
        if output is not None:
            raise UsageError("--dcp and --output exclude each other", hint="export twice")
        from rollback.dcp.write import export_dcp

        with readable(run) as place:
            done = export_dcp(place, name, dcp, force=force)
        what = f"{done.tensors} tensors of model and optimizer"
    else:
        output = output or Path("model.safetensors")
        with readable(run) as place:
            done = export_model(place, name, output, force=force, max_shard_size=largest)
        what = f"{done.tensors} tensors" + (f" in {done.files} files" if done.files > 1 else "")
    say_notices(done.notices)
    say(f"{dcp or output}: {what}, {size(done.bytes)}, of step {done.step} ({done.checkpoint})")
    if done.left_out:
        say(f"notice: left out, since they are not tensors: {', '.join(map(str, done.left_out))}")


@ring.command()
def pin(run: RunArgument, name: Annotated[str, typer.Argument(help=_NAMES, show_default=False)]) -> None:
    """Keep a checkpoint of the ring: a pinned one is never evicted, and does not count against the ring's capacity.

    Works on a running run too. One that is in memory only cannot be pinned until it is in the ring.
    """
    from rollback.checkpoints import pins
    from rollback.inspect.ring.checkpoints import choose_from_ring, read_listing
    from rollback.rundir.paths import RunPaths

    chosen = choose_from_ring(read_listing(run), name)
    with reporting(RunDirectoryError, f"pinning {chosen} in {run}", _WRITABLE):
        pins.pin(RunPaths(run), chosen)
    say(f"{chosen} stays; `rollback ring unpin {shlex.quote(str(run))} {chosen}` lets it go")


@ring.command()
def unpin(
    run: RunArgument, name: Annotated[str, typer.Argument(help="Name of a pinned checkpoint.", show_default=False)]
) -> None:
    """Let a pinned checkpoint leave the ring when its time comes."""
    from rollback.checkpoints import pins
    from rollback.inspect.record.reading import require_run_directory

    with reporting(RunDirectoryError, f"unpinning {name} in {run}", _WRITABLE):
        pins.unpin(require_run_directory(run), name)
    say(f"{name} is no longer pinned; it leaves when its time comes")
