"""An exercise: at step 500 the gradients are multiplied by a factor, once. Is it seen, and is it undone?

A small network learns to predict the next byte of the standard library's sources, with plain SGD, in one process.
SGD, because Adam divides a gradient by its own size and clipping cuts it: both hide much of such a fault. For each
factor the script trains without and with a guard, and prints what was measured, what the guard made of it and did, and
the loss on held-out text beside that of an undisturbed run.

The fault is not in the data and does not come back, so the guard is told to replay first (`retry_first=True`): it
restores a good checkpoint and skips nothing. With --skip it does what it does by default, and passes over the batches
around the fault as well. A factor of 10 is seen and left alone: the loss comes back by itself within a dozen steps, and
going back would cost more than it gives.
"""

import argparse
import math
import statistics
import tempfile
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import rollback
from rollback.inspect.audit.compile import compile_audit
from rollback.inspect.audit.contents import read_run_contents
from rollback.inspect.audit.report import AuditReport
from rollback.rundir.metrics.metric_columns import joined, metric_pieces
from rollback.rundir.paths import RunPaths
from stdlib_text import StdlibText

FAULT_AT = 500
STEPS = 600
FACTORS = (10.0, 1e4, math.inf)
CONTEXT = 16


@dataclass
class Trained:
    """What came of a run: the loss on held-out text, and all parameters in one tensor."""

    loss: float
    weights: torch.Tensor


def train(factor: float, run: Path | None = None, *, retry_first: bool = True) -> Trained:
    """Train, under a guard if there is a run directory; the gradients of step `FAULT_AT` are multiplied, once."""
    torch.manual_seed(0)
    loader = DataLoader(StdlibText(), batch_size=32, shuffle=True)
    model = nn.Sequential(
        nn.Embedding(256, 16), nn.Flatten(), nn.Linear(16 * CONTEXT, 128), nn.Tanh(), nn.Linear(128, 256)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    guard = None
    if run is not None:
        guard = rollback.Guard(
            model=model, optimizer=optimizer, loader=loader, max_steps=STEPS, run=run, retry_first=retry_first,
            snapshot_every=50,
        )  # fmt: skip
    for number, (tokens, _) in enumerate(guard or islice(loader, STEPS)):
        loss = loss_of(model, tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        if number == FAULT_AT:  # counts iterations, which a rewind does not take back: the fault comes once
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad *= factor
        optimizer.step()
        optimizer.zero_grad()
        if guard is not None:
            guard.observe(loss)
    if guard is not None:
        guard.close()
    with torch.no_grad():
        held_out = torch.stack([loss_of(model, tokens) for tokens, _ in DataLoader(StdlibText(held_out=True), 64)])
    return Trained(
        held_out.mean().item(), torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    )


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Mean loss of predicting bytes from the `CONTEXT` bytes before them; of each window, four places."""
    windows = tokens[:, :-1].unfold(1, CONTEXT, 28)
    return F.cross_entropy(model(windows.flatten(0, 1)), tokens[:, CONTEXT::28].flatten())


def measured(run: Path) -> str:
    """How large the gradient of step `FAULT_AT` was, the first time."""
    norms: dict[int, float] = {}
    judged = joined(metric_pieces(RunPaths(run).metrics, []))
    told = zip(judged.step.tolist(), judged.grad_norm.tolist(), judged.no_grad_norm.tolist(), strict=True)
    for step, norm, missing in told:
        norms.setdefault(step, 0.0 if missing else norm)
    before = statistics.median(norms[step] for step in range(FAULT_AT - 50, FAULT_AT))
    return f"gradient norm {norms[FAULT_AT]:.3g} at step {FAULT_AT}, {before:.3g} in the steps before it"


def seen(audit: AuditReport) -> str:
    """What the guard made of it."""
    parts = [f"{entry.rule} called at step {entry.detection.step}" for entry in audit.incidents]
    parts += [f"{blip.rule} in steps {blip.first_step} to {blip.last_step}, {blip.fate}" for blip in audit.noticed]
    return "; ".join(parts) or "nothing"


def done(audit: AuditReport) -> str:
    """What the guard did about it."""
    parts = []
    for entry in audit.incidents:
        if entry.restored is not None:
            skipped = f"batches {entry.skip.first} to {entry.skip.last} skipped" if entry.skip else "nothing skipped"
            parts.append(f"step {entry.restored.step} restored, {skipped}: {entry.outcome.replace('_', ' ')}")
    return "; ".join(parts) or "left alone"


def main() -> None:
    parser = argparse.ArgumentParser(description="Multiply the gradients of step 500, and see what becomes of it.")
    parser.add_argument("--factor", type=float, action="append", help="may be repeated (default: 10, 1e4 and inf)")
    parser.add_argument(
        "--skip", action="store_true", help="skip the batches around the fault instead of replaying them"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)

    undisturbed = train(1.0)
    print(f"held-out loss after {STEPS} steps, undisturbed: {undisturbed.loss:.4f}")
    with tempfile.TemporaryDirectory() as folder:
        for factor in args.factor or FACTORS:
            run = Path(folder, f"{factor:g}")
            print(f"\ngradients of step {FAULT_AT} x {factor:g}", flush=True)
            unguarded, guarded = train(factor), train(factor, run, retry_first=not args.skip)
            same = ", bit for bit the undisturbed run" if torch.equal(guarded.weights, undisturbed.weights) else ""
            audit = compile_audit(read_run_contents(run))
            print(f"  measured   {measured(run)}")
            print(f"  seen       {seen(audit)}")
            print(f"  done       {done(audit)}")
            print(f"  loss       {guarded.loss:.4f} with the guard{same}; {unguarded.loss:.4f} without", flush=True)


if __name__ == "__main__":
    main()
