"""`rollback launch --adopt`: loops that take their batches in other ways, or do something of their own around them."""

import json
from pathlib import Path

import pytest
from adopted import refused
from selection import by_default
from toy import facts

from rollback.errors import ExitCode
from rollback.facts.training import Attached, Finished, Incident, Restored


def test_a_limit_of_the_batches_of_an_epoch_holds_behind_a_rollback(tmp_path: Path) -> None:
    """Two epochs of 14 of 20 batches. The rollback in the last one leads to its middle, or with a slow disk into the
    first one; in neither is anything left out."""
    script = tmp_path / "limited.py"
    script.write_text(LIMITED)
    common = ("--snapshot-every", "1", "--probation", "6")
    first = refused(tmp_path, "--adopt=strict", *common, "--run", "a", str(script), "25")
    again = refused(tmp_path, "--adopt=strict", *common, "--run", "b", "--skips-of", "a", str(script), "-1")
    assert [done.returncode for done in (first, again)] == [ExitCode.DONE] * 2, first.stdout + again.stdout
    assert len(facts(tmp_path / "a", Restored)) == 1
    assert "by itself" not in first.stdout, "its limit is led as its epochs are"
    ends = [line for done in (first, again) for line in done.stdout.splitlines() if line.startswith("weights")]
    assert ends == [ends[0]] * 2
    assert facts(tmp_path / "a", Finished)[-1].step == 27  # of 28 batches one is skipped
    *_, last = (tmp_path / "a" / "metrics" / "train.jsonl").read_text().splitlines()
    assert json.loads(last)["loss"] is not None, "what the script left its last loop behind is judged with its loss"


LIMITED = """
import itertools, sys
import torch

torch.manual_seed(7)
loader = torch.utils.data.DataLoader(torch.randn(40, 2), batch_size=2, shuffle=True)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
taken = itertools.count()  # which nobody leads
for epoch in range(2):
    for x in itertools.islice(loader, 14):
        loss = model(x).square().mean() * (float("nan") if taken.__next__() == int(sys.argv[1]) else 1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
print("weights", model.weight.tolist(), torch.get_rng_state().sum())
"""


BY_NEXT_SCRIPT = """
import os, signal, sys
import torch

torch.manual_seed(7)
loader = torch.utils.data.DataLoader(torch.randn(10, 2), batch_size=2, shuffle=True)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
updates = torch.nn.Parameter(torch.zeros(()), requires_grad=False)
model.register_parameter("updates", updates)

def train(x):
    if updates.item() == int(sys.argv[1]) and not os.path.exists("killed"):
        open("killed", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    updates.add_(1)
    return updates.item() < 28

"""
BY_NEXT = {
    "begun anew where it ends": """
batches = iter(loader)
going = True
while going:
    try:
        x = next(batches)
    except StopIteration:
        batches = iter(loader)
        x = next(batches)
    going = train(x)
print("weights", model.weight.tolist())
""",
    "begun anew for some batches": """
for epoch in range(99):
    batches = iter(loader)
    for _ in range(4):
        x = next(batches)
        if not train(x):
            break
    else:
        continue
    break
print("weights", updates.item() == 28)
""",
}


@pytest.mark.parametrize("loop", by_default(tuple(BY_NEXT), "begun anew where it ends"))
def test_a_loop_that_takes_its_batches_by_next_goes_on_in_a_later_epoch(tmp_path: Path, loop: str) -> None:
    """Epochs of five batches, and a kill in the fourth one. Where the run stands the optimizer says, which is kept."""
    script = tmp_path / "by_next.py"
    script.write_text(BY_NEXT_SCRIPT + BY_NEXT[loop])
    runs = [refused(tmp_path, "--adopt=strict", "--snapshot-every", "1", "--run", str(at), str(script), str(at))
            for at in (-1, 17)]  # fmt: skip
    assert [done.returncode for done in runs] == [ExitCode.DONE] * 2, runs[1].stdout
    assert len(facts(tmp_path / "17", Attached)) == 2, "the second attempt goes on to the end"
    ends = [line for done in runs for line in done.stdout.splitlines() if line.startswith("weights")]
    assert ends == [ends[0]] * 2


def test_a_rollback_into_the_first_epoch_has_the_scheduler_that_its_body_makes(tmp_path: Path) -> None:
    """As torchvision's detection does. Its constructor sets the learning rate, behind what was put back."""
    script = tmp_path / "warmed.py"
    script.write_text(WARMED)
    common = ("--snapshot-every", "5", "--probation", "8", "--rewind", "14", "--policy", "surgical")
    first = refused(tmp_path, "--adopt=strict", *common, "--run", "a", str(script), "21")
    again = refused(tmp_path, "--adopt=strict", *common, "--run", "b", "--skips-of", "a", str(script), "-1")
    assert [done.returncode for done in (first, again)] == [ExitCode.DONE] * 2, first.stdout + again.stdout
    assert "the script has made its LinearLR anew" in first.stdout
    assert len(facts(tmp_path / "a", Incident)) == 1
    ends = [line for done in (first, again) for line in done.stdout.splitlines() if line.startswith("weights")]
    assert ends == [ends[0]] * 2


WARMED = """
import os, sys
import torch

torch.manual_seed(7)
loader = torch.utils.data.DataLoader(torch.randn(40, 2), batch_size=2, shuffle=True)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
taken, bad = 0, int(sys.argv[1]) if os.environ.get("ROLLBACK_ATTEMPT") == "1" else -1
for epoch in range(2):
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=15) if epoch == 0 else None
    for x in loader:
        loss = model(x).square().mean() * (float("nan") if taken == bad else 1)
        taken = taken + 1
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if warm is not None:
            warm.step()
print("weights", model.weight.tolist(), optimizer.param_groups[0]["lr"], torch.get_rng_state().sum())
"""


def test_a_loop_that_calls_train_for_each_batch_begins_in_the_mode_of_the_evaluation_before(tmp_path: Path) -> None:
    script = tmp_path / "modes.py"
    script.write_text(MODES)
    done = refused(tmp_path, "--adopt=strict", "--run", "a", str(script))
    assert done.returncode == ExitCode.DONE, done.stdout
    assert facts(tmp_path / "a", Finished)[-1].step == 20


MODES = """
import torch

loader = torch.utils.data.DataLoader(torch.randn(20, 2), batch_size=2)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model.eval()
for epoch in range(2):
    for x in loader:
        model.train()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
"""
