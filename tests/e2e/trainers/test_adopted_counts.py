"""`rollback launch --adopt`: what a script counts by itself, and what its loops carry from iteration to iteration."""

import subprocess
import sys
from pathlib import Path

import pytest
from adopted import LIMIT, PLAIN, refused
from selection import by_default
from toy import facts
from warm_server import run_torch_alone, run_warm

from rollback.errors import ExitCode
from rollback.facts.training import Attached, Finished, Incident


def test_a_count_of_the_scripts_own_ends_its_loop(tmp_path: Path) -> None:
    done = refused(tmp_path, "--adopt=strict", str(PLAIN / "refused.py"), "a count of its own")
    assert done.returncode == ExitCode.DONE, done.stdout
    assert "counts with `steps`" not in done.stdout, "it is led"
    assert facts(tmp_path / "runs" / "refused", Finished)


@pytest.mark.covering
@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("a count beside next", "`taken` by itself (line 134), and ends its loop by it"),
        ("a limit of its own", "`itertools.islice(loader, 0, 4)` by itself (line 138), and ends its loop by it"),
    ],
)
@pytest.mark.parametrize("how", ["--adopt", "--adopt=strict"])
def test_what_a_script_ends_by_is_named_when_training_begins_or_refused(
    tmp_path: Path, how: str, what: str, named: str
) -> None:
    done = refused(tmp_path, how, str(PLAIN / "refused.py"), what)
    assert done.returncode == (ExitCode.DONE if how == "--adopt" else ExitCode.USAGE), done.stdout
    assert f"counts with {named}" in done.stdout
    assert bool(facts(tmp_path / "runs" / "refused", Finished)) == (how == "--adopt"), done.stdout


def test_what_a_script_only_counts_is_named_when_training_begins(tmp_path: Path) -> None:
    done = refused(tmp_path, "--adopt=strict", str(PLAIN / "refused.py"), "a loop in another file")
    assert done.returncode == ExitCode.DONE, done.stdout
    assert "counts with `seen.batches` by itself (engine.py, line 10)" in done.stdout


OWN_COUNTS = """
import itertools, os, signal, sys
import torch

torch.manual_seed(7)
loader = torch.utils.data.DataLoader(torch.randn(20, 2), batch_size=2, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Dropout(0.2), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
fault, at = sys.argv[1], 23
calls = itertools.count()  # which nobody leads

def backward(x, *numbers):
    optimizer.param_groups[0]["lr"] = 0.1 / (1 + sum(numbers))
    loss = model(x).square().mean()
    strikes = calls.__next__() == at and os.environ.get("ROLLBACK_ATTEMPT") == "1"
    (loss * float("nan") if strikes and fault == "nan" else loss).backward()
    print("trained", *numbers)
    if strikes and fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)

def train(x, *numbers):
    backward(x, *numbers)
    optimizer.step()
    optimizer.zero_grad()

"""
COUNTED = {
    "updates": """
completed_steps = 0
for epoch in range(9):
    for x in loader:
        train(x, completed_steps)
        completed_steps += 1
        if completed_steps >= 35:
            break
    if completed_steps >= 35:
        break
""",
    "iterations of a generator": """
def forever():
    while True:
        yield from loader

batches = forever()
for step in range(35):
    train(next(batches), step)
""",
    "iterations of each epoch": """
for epoch in range(4):
    batches = iter(loader)
    for i in range(len(loader) - 1):
        x = next(batches)
        train(x, epoch, i)
""",
    "iterations of several, in epochs": """
for epoch in range(5):
    batches = iter(loader)
    for number in range(4):
        micro = []
        for _ in range(3 if number < 3 else 1):
            micro += [next(batches)]
        for x in micro:
            backward(x, epoch, number)
        optimizer.step()
        optimizer.zero_grad()
""",
    "iterations of several, which a function is given": """
def update(micro, *numbers):
    for x in micro:
        backward(x, *numbers)
    optimizer.step()
    optimizer.zero_grad()

for epoch in range(5):
    batches = iter(loader)
    for number in range(4):
        update([next(batches) for _ in range(2)], epoch, number)
""",
    "batches that the loop gathers": """
def update(micro, *numbers):
    for x in micro:
        backward(x, *numbers)
    optimizer.step()
    optimizer.zero_grad()

for epoch in range(5):
    micro = []
    for number, x in enumerate(loader):
        micro.append(x)
        if len(micro) == 4:
            update(micro, epoch, number)
            micro = []
    if micro:
        update(micro, epoch)
""",
    "iterations of several": """
batches = iter(x for _ in range(9) for x in loader)
done = 0
for number in range(15):
    for _ in range(3):
        backward(next(batches), number)
    optimizer.param_groups[0]["weight_decay"] = done / 100
    optimizer.step()
    optimizer.zero_grad()
    done += 1
""",
    "iterations of an iterator that is begun anew": """
batches = iter(loader)
for step in range(35):
    try:
        x = next(batches)
    except StopIteration:
        batches = iter(loader)
        x = next(batches)
    train(x, step)
""",
    "a while by its count": """
batches, step = iter(x for _ in range(9) for x in loader), 0
while step < 35:
    x = next(batches)
    train(x, step)
    step += 1
""",
}


@pytest.mark.parametrize("counts", by_default(COUNTED, "updates", "iterations of several, in epochs"))
def test_what_a_script_counts_is_what_it_was_behind_a_kill_and_a_rollback(tmp_path: Path, counts: str) -> None:
    """Its learning rate and its end go by it."""
    script = tmp_path / "counted.py"
    weights = "print('weights', *map(torch.Tensor.tolist, model.parameters()))\n"
    script.write_text(OWN_COUNTS + COUNTED[counts] + weights)
    common = "--adopt=strict", "--snapshot-every", "5", "--probation", "6", "--policy", "balanced"
    plain = run_torch_alone(
        [sys.executable, str(script), "none"], cwd=tmp_path, timeout=LIMIT, stdout=subprocess.PIPE, text=True
    )
    killed = refused(tmp_path, *common, "--run", "killed", str(script), "kill")
    nan = refused(tmp_path, *common, "--run", "nan", str(script), "nan")
    told = refused(tmp_path, *common, "--run", "told", "--skips-of", "nan", str(script), "none")
    assert [done.returncode for done in (plain, killed, nan, told)] == [ExitCode.DONE] * 4, killed.stdout + nan.stdout
    assert len(facts(tmp_path / "killed", Attached)) == 2
    assert len(facts(tmp_path / "nan", Incident)) == 1
    ends = [done.stdout[done.stdout.index("weights") :].splitlines()[0] for done in (plain, killed, nan, told)]
    assert (ends[0], ends[2]) == (ends[1], ends[3])
    assert "by itself" not in killed.stdout + nan.stdout


GATHERS = """
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(129, 2)))

def update(micro):
    for (x,) in micro:
        model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

for epoch in range(2):
    micro = []
    for i, (x,) in enumerate(loader):
        micro.append((x * float("nan") if (epoch, i) == NAN else x,))
        if len(micro) == 4:
            update(micro)
            micro = []
    if micro:
        update(micro)
print("weights", *map(torch.Tensor.tolist, model.parameters()))
"""


def test_an_epoch_may_be_shorter_than_an_update_of_what_is_gathered(tmp_path: Path) -> None:
    """The rest is the first update of all."""
    script = tmp_path / "gathers.py"
    script.write_text(GATHERS.replace("NAN", "None").replace("129", "3"))
    done = refused(tmp_path, "--adopt=strict", "--run", "short", str(script))
    assert (done.returncode, "weights" in done.stdout) == (ExitCode.DONE, True), done.stdout


@pytest.mark.soak
def test_a_rollback_leaves_no_batch_in_a_list_that_it_has_skipped(tmp_path: Path) -> None:
    """In an epoch's last update the NaN shows when the script has a batch of the next one in hand."""
    script = tmp_path / "gathers.py"
    script.write_text(GATHERS.replace("NAN", "(1, 126)"))
    common = "--adopt=strict", "--snapshot-every", "5", "--probation", "6", "--policy", "balanced"
    nan = refused(tmp_path, *common, "--run", "nan", str(script))
    told = refused(tmp_path, *common, "--run", "told", "--skips-of", "nan", str(script))
    assert [done.returncode for done in (nan, told)] == [ExitCode.DONE] * 2, nan.stdout
    assert len(facts(tmp_path / "nan", Incident)) == 1
    ends = [done.stdout[done.stdout.index("weights") :].splitlines()[0] for done in (nan, told)]
    assert ends[0] == ends[1]


CARRIES = """
import os, signal, sys
import torch

torch.manual_seed(7)
data = torch.randn(40, 2)
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.nn.Module.register_buffer(model, "updates", torch.zeros(1))


def cool(state):
    state["temperature"] *= 0.9


def train_one_epoch(beta):
    state, baseline, total = {"temperature": 1.0}, 0.0, 0.0
    for x in loader:
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        if int(model.updates) == int(sys.argv[1]) and os.environ.get("ROLLBACK_ATTEMPT", "1") == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        (loss * state["temperature"] + 0.01 * (loss - baseline) * beta).backward()
        optimizer.step()
        model.updates += 1
        cool(state)
        baseline = 0.9 * baseline + 0.1 * loss.item()
        total += loss.item()
    print("end of epoch:", total / len(loader))
    return baseline


def main():
    beta, best, patience, history = 0.5, float("inf"), 2, []
    for epoch in range(9):
        mean = train_one_epoch(beta)
        beta = min(1.0, beta + 0.2)
        history.append(round(mean, 9))
        if mean < best * 0.5:
            best, patience = mean, 2
        else:
            patience -= 1
        if not patience:
            break
    print(f"end: {epoch} {history} {model.weight.tolist()}")


main()
"""


def test_what_a_scripts_loops_carry_is_what_it_was_behind_a_kill(tmp_path: Path) -> None:
    """In an epoch's midst, and with an epoch's first batch: the code behind the one before has run, and runs again."""
    script = tmp_path / "carries.py"
    script.write_text(CARRIES)
    plain = run_warm([sys.executable, str(script), "-1"], stdout=subprocess.PIPE, check=True, timeout=LIMIT)
    for killed_at in ("17", "20"):
        words = "--adopt=strict", "--snapshot-every", "5", "--run", killed_at, str(script), killed_at
        done = refused(tmp_path, *words)
        assert done.returncode == ExitCode.DONE, done.stdout
        assert len(facts(tmp_path / killed_at, Attached)) == 2, done.stdout
        printed = [line for line in done.stdout.splitlines() if line.startswith("end")]
        assert list(dict.fromkeys(printed)) == plain.stdout.splitlines(), "a line may be printed again"
        assert "by itself" not in done.stdout
