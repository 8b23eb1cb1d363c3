"""What a guard is made with: refusals in their order, and what it keeps of where it is made."""

import errno
import gc
import json
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from toy import facts

import rollback
from rollback.environment import ENV_REFUSAL, ENV_SUPERVISOR
from rollback.errors import ExitCode, RollbackError, RunDoesNotFit, UsageError
from rollback.facts.training import Committed, Dropped
from rollback.inspect.ring.checkpoints import read_held
from rollback.rundir.failures import read_failures
from rollback.rundir.heartbeats import UnrecordedEnd, read_heartbeats
from rollback.rundir.journal.journal import Journal
from rollback.rundir.paths import RunPaths
from rollback.train.start import found_run
from rollback.train.state import state
from rollback.train.state.image import require_one_gpu


def guard(run: Path, **others: Any) -> rollback.Guard:
    model = nn.Linear(4, 1)
    given = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.01), "loader": [], "run": run}
    return rollback.Guard(**given | others)


def test_a_setting_that_cannot_be_is_refused_before_the_loader_is_looked_at(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="probation=3 is no longer than"):
        guard(tmp_path / "run", probation=3, loader=object())


def test_what_lies_on_several_gpus_of_one_process_is_refused() -> None:
    def on(*devices: str) -> Any:
        return [SimpleNamespace(device=torch.device(device)) for device in devices]

    with pytest.raises(UsageError, match="what the guard keeps lies on 2 GPUs of this process: cuda:0, cuda:1"):
        require_one_gpu(on("cpu", "cuda:1", "cuda:0", "cuda:1"))
    require_one_gpu(on("cpu", "cuda:1", "cuda:1"))


def test_of_named_objects_it_is_looked_at_too_where_they_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a reference model on another GPU."""
    seen: list[int] = []
    monkeypatch.setattr(state, "require_one_gpu", lambda tensors: seen.append(len(tensors)))
    guard(tmp_path / "alone").close()
    guard(tmp_path / "beside", reference=nn.Linear(1, 1)).close()
    assert seen[1] == seen[0] + 2


def test_a_model_that_takes_no_hooks_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a TorchScript module, which takes no hooks"):
        guard(tmp_path / "run", model=torch.jit.script(nn.Linear(4, 1)))


@pytest.mark.parametrize("shape", [(), (1,)])
def test_losses_that_lie_in_the_same_memory_one_after_the_other_are_each_what_was_observed(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    """As what a CUDA graph gives out: its next replay writes there again."""
    made, place = guard(tmp_path / "run"), torch.zeros(shape)
    for value in (1.0, 3.0):
        made.observe(place.fill_(value))
    assert made._loop.step_in_progress.mean_loss() == 2.0
    made.close()


def test_what_the_guard_keeps_on_the_host_is_there_whatever_the_script_s_default_device(tmp_path: Path) -> None:
    """As with `torch.set_default_device("cuda")`, of which no memory can be pinned. `meta` stands in."""

    def train(run: Path, steps: int) -> torch.Tensor:
        batches = [torch.full((2, 4), number / 24, device="cpu") for number in range(24)]
        torch.manual_seed(0)
        model = nn.Linear(4, 1, device="cpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)
        made = guard(run, model=model, optimizer=optimizer, loader=batches, snapshot_every=5, max_steps=steps)
        for number, x in enumerate(made):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            made.observe(loss if number % 2 else loss.item())
        made.close()
        return model.weight.detach()

    expected = train(tmp_path / "plain", 24)
    torch.set_default_device("meta")
    try:
        train(tmp_path / "run", 12)
        assert torch.equal(train(tmp_path / "run", 24), expected)
    finally:
        torch.set_default_device(None)
    assert facts(tmp_path / "run", Committed)


@pytest.mark.parametrize(("most", "told"), [(5, True), (3, False), (None, False)])
def test_data_that_end_before_max_steps_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], most: int | None, told: bool
) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    made = guard(tmp_path, model=model, optimizer=optimizer, loader=[*torch.ones(3, 2, 4)], max_steps=most)
    for x in made:
        model(x).sum().backward()
        optimizer.step()
        made.observe(0.5)
    made.close()
    said = capsys.readouterr().err
    assert ("training ends at step 3, by the end of the data, and not by max_steps=5" in said) == told


def test_a_library_s_users_are_told_of_an_end_in_the_library_s_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for epochs in (1, 2):
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        made = guard(tmp_path / "run", model=model, optimizer=optimizer, loader=[*torch.ones(3, 2, 4)], max_steps=7)
        made.name_ends("the Trainer's {} steps", "num_train_epochs={}")
        for _ in made.epochs(epochs):
            for x in made:
                model(x).sum().backward()
                optimizer.step()
                made.observe(0.5)
        made.close()
    said = capsys.readouterr().err
    assert "training ends at step 3, by num_train_epochs=1, and not by the Trainer's 7 steps" in said
    assert "the run was complete: it ended at step 3, by num_train_epochs=1" in said


def test_a_guard_that_is_made_in_an_except_block_keeps_nothing_of_it(tmp_path: Path) -> None:
    class Large:
        """Something that a frame holds."""

    def fails() -> weakref.ref[Large]:
        large = Large()
        found.append(weakref.ref(large))
        raise ImportError("a library that is not there")

    found: list[weakref.ref[Large]] = []
    try:
        fails()
    except ImportError:
        made = guard(tmp_path / "run")
    assert found[0]() is None
    made.close()


class Wrapper(torch.optim.Optimizer):
    """Makes none of what torch's have, or plain dicts in the place of torch's hooks."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, hooks: bool = True) -> None:
        self.optimizer, self.param_groups, self.state = optimizer, optimizer.param_groups, optimizer.state
        if hooks:
            self._optimizer_step_pre_hooks = self._optimizer_step_post_hooks = {}  # type: ignore[assignment]

    def state_dict(self) -> dict[str, Any]:
        return {"slow": 1.0}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def test_a_wrapper_of_an_optimizer_with_hooks_of_its_own_making_is_refused_in_words(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    with pytest.raises(UsageError, match="whose steps cannot be noticed") as raised:
        guard(tmp_path / "run", model=model, optimizer=Wrapper(torch.optim.SGD(model.parameters())))
    assert "optimizer.optimizer, and the wrapper by a name of its own" in str(raised.value.hint)


@pytest.mark.parametrize("hooks", [True, False])
def test_it_is_taken_by_a_name_of_its_own(tmp_path: Path, hooks: bool) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters())
    guard(tmp_path / "run", model=model, optimizer=optimizer, wrapper=Wrapper(optimizer, hooks=hooks)).close()


def test_an_optimizer_that_updates_within_the_backward_is_refused_and_not_trained_by_in_silence(tmp_path: Path) -> None:
    class Lomo(torch.optim.Optimizer):
        def fused_backward(self, loss: torch.Tensor, lr: float) -> None: ...

    model = nn.Linear(4, 1)
    optimizer = Lomo(model.parameters(), {"lr": 0.1})
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # puts a step in front of it
    with pytest.raises(UsageError, match=r"a Lomo .* has no step of its own"):
        guard(tmp_path / "run", model=model, optimizer=optimizer)


def test_a_wrapper_whose_state_has_no_groups_is_refused_before_a_rollback_needs_them(tmp_path: Path) -> None:
    class LooksAhead(torch.optim.SGD):
        """Has the moments beside slow weights of its own."""

        def __init__(self, fast: torch.optim.Optimizer) -> None:
            super().__init__(fast.param_groups)
            self.fast = fast

        def state_dict(self) -> dict[str, Any]:
            return {"slow": {}, "fast": self.fast.state_dict()}

    model = nn.Linear(4, 1)
    with pytest.raises(UsageError, match="whose state_dict has no param_groups") as raised:
        guard(tmp_path / "run", model=model, optimizer=LooksAhead(torch.optim.SGD(model.parameters())))
    assert "optimizer.fast, and the wrapper by a name of its own" in str(raised.value.hint)
    assert not (tmp_path / "run").exists()


class MovesFirst(torch.optim.SGD):
    """As sharpness-aware minimization does: its step moves the weights, has the closure run there, and steps from where
    they were."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float]) -> None:  # type: ignore[override]
        parameters = self.param_groups[0]["params"]
        before = [item.clone() for item in parameters]
        for item in parameters:
            item.add_(item.grad, alpha=1e-3)
        with torch.enable_grad():
            closure()
        for item, at in zip(parameters, before, strict=True):
            item.copy_(at).sub_(item.grad, alpha=1e-3)


def test_a_snapshot_is_complete_before_an_optimizer_moves_the_weights_for_its_closure(tmp_path: Path) -> None:
    run, model = tmp_path / "run", nn.Sequential(nn.Linear(64, 512), nn.Linear(512, 1))
    optimizer = MovesFirst(model.parameters(), lr=1e-3)
    made = guard(run, model=model, optimizer=optimizer, loader=list(torch.randn(30, 4, 64)), snapshot_every=10)
    for x in made:

        def loss_there(x: torch.Tensor = x) -> torch.Tensor:
            model.zero_grad()
            loss = model(x).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        loss = loss_there()
        optimizer.step(loss_there)
        made.observe(loss)
    made.close()
    assert not facts(run, Dropped)
    assert facts(run, Committed)[0].step == 0


@pytest.mark.parametrize("batches", [1, 2])
def test_epochs_of_an_update_or_two_leave_checkpoints_behind_them(tmp_path: Path, batches: int) -> None:
    """What is kept at the end of each epoch is removed again, and the memory for the next one is ready two steps on."""
    run, model = tmp_path / "run", nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(torch.randn(4 * batches, 4), batch_size=4)  # type: ignore[arg-type]
    made = guard(run, model=model, optimizer=optimizer, loader=loader, snapshot_every=5)
    for _ in range(20 // batches):
        for x in made:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            made.observe(loss)
    made.close()
    assert {checkpoint.step // 5 for checkpoint in read_held(run)} == {0, 2, 4}


def test_a_loss_is_what_it_was_when_it_was_told(tmp_path: Path) -> None:
    """A script adds the losses of its micro-batches up in one tensor, which begins again at zero."""
    run, model = tmp_path / "run", nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    made = guard(run, model=model, optimizer=optimizer, loader=list(torch.ones(8, 1, 4)))
    total, level = torch.zeros(()), model(torch.ones(1, 4)).square().mean().item()
    for place, x in enumerate(made):
        loss = model(x).square().mean()
        loss.backward()
        total += loss.detach()
        if place % 2:
            optimizer.step()
            optimizer.zero_grad()
            made.observe(total)
            total.zero_()
    made.close()
    lines = RunPaths(run).metrics.read_text().splitlines()
    assert [json.loads(line)["loss"] for line in lines] == pytest.approx([2 * level] * 4)


@pytest.mark.parametrize("phase", [3, None, b"warm"])
def test_a_phase_that_is_no_text_is_refused_where_it_is_announced(tmp_path: Path, phase: Any) -> None:
    """Not two steps later, where a rank that raises is taken for one that a batch brings down. None was ignored."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    guard = rollback.Guard(model=model, optimizer=optimizer, loader=list(torch.randn(4, 4, 4)), run=tmp_path / "run")
    try:
        next(guard)
        with pytest.raises(UsageError, match=rf"guard.announce got a {type(phase).__name__}; it takes the phase's"):
            guard.announce(phase)
    finally:
        guard.close()


def test_what_a_script_draws_behind_its_guard_is_the_same_at_each_start(tmp_path: Path) -> None:
    """A teacher with random weights, fixed noise: no checkpoint has them."""

    def drawn(leave_at: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(0)
        made = guard(tmp_path / "run", loader=list(torch.ones(8, 1, 4)), snapshot_every=2)
        assert bool(made.step) is (leave_at is None)
        teacher = torch.randn(4)
        for _ in made:
            made._loop.state.model(torch.ones(1, 4)).sum().backward()
            made._loop.state.optimizer.step()
            made._loop.checkpoints.snapshots.wait()
            noise = torch.randn(4)
            if made.step == leave_at:
                break
        made.close()
        return teacher, noise

    first, resumed = drawn(leave_at=6), drawn(leave_at=None)
    assert torch.equal(first[0], resumed[0])
    assert not torch.equal(first[1], resumed[1]), "the loop goes on with the random states of the checkpoint"


class Counts:
    """An object of the script's, of a version that has a state of its own."""

    def __init__(self, version: int) -> None:
        self.version = version

    def state_dict(self) -> dict[str, int]:
        return {"version": self.version}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if state["version"] != self.version:
            raise KeyError("seen")


def test_a_kept_object_that_does_not_load_its_state_ends_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no attempt after another, as what a script raises by itself."""
    first = guard(tmp_path / "run", loader=list(torch.ones(8, 1, 4)))
    first.keep(counts=Counts(1))
    for x in first:
        first._loop.state.model(x).sum().backward()
        first._loop.state.optimizer.step()
    first.close()
    monkeypatch.setenv(ENV_REFUSAL, str(tmp_path / "refusal"))
    resumed = guard(tmp_path / "run", loader=list(torch.ones(8, 1, 4)))
    with pytest.raises(SystemExit):
        resumed.keep(counts=Counts(2))
    told = json.loads((tmp_path / "refusal").read_text())
    assert told["exit_code"] == ExitCode.UNFIT
    assert "the Counts 'counts' did not load the state" in told["message"]


def test_a_number_of_epochs_that_is_none_ends_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no attempt after another, as an error of the script's does."""
    made = guard(tmp_path / "run")
    monkeypatch.setenv(ENV_REFUSAL, str(tmp_path / "refusal"))
    with pytest.raises(SystemExit):
        made.epochs(-1)
    assert "guard.epochs got count=-1" in json.loads((tmp_path / "refusal").read_text())["message"]


def test_a_refusal_that_cannot_be_written_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the supervisor's folder was swept away: else the reader learns of that alone, and not why."""
    made = guard(tmp_path / "run")
    monkeypatch.setenv(ENV_REFUSAL, str(tmp_path / "gone" / "refusal"))
    with pytest.raises(UsageError, match="no way back"):
        made.refuse(UsageError("no way back"))
    with pytest.raises(UsageError, match="no way back"):
        next(made)


def open_paths() -> list[Path]:
    """What this process has open."""
    return [Path(os.path.realpath(f"/proc/self/fd/{number}")) for number in os.listdir("/proc/self/fd")]


def open_records(run: Path) -> list[str]:
    """This process's open files of a run's draw log and of its skip record."""
    return sorted(path.parent.name for path in open_paths() if path.parent in (run / "draws", run / "skips"))


def test_guards_that_are_gone_leave_no_file_open(tmp_path: Path) -> None:
    """A process may make hundreds of them, as in a search for settings."""

    def open_files(number: int) -> int:
        guard(tmp_path / str(number)).close()
        gc.collect()
        # A last guard's heartbeat goes on, and opens files of its own for a moment.
        return len([path for path in open_paths() if "ranks" not in (path.name, path.parent.name)])

    # The one before is there for a moment longer, where a thread of its heartbeat has not heard yet that it is over.
    counts = [open_files(number) for number in range(10)]
    assert min(counts[5:]) <= counts[0], f"one file of each would be five more: {counts}"


def test_a_guard_that_is_closed_holds_no_record_of_its_data_open(tmp_path: Path) -> None:
    made = guard(tmp_path / "run", loader=list(torch.ones(8, 1, 4)), skip=[{"first": 0, "last": 1}])
    next(iter(made))
    assert open_records(tmp_path / "run") == ["draws", "skips"]
    made.close()
    assert open_records(tmp_path / "run") == []


def test_a_guard_that_is_broken_off_while_it_reads_its_run_leaves_the_run_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by an interrupt in a notebook, which keeps the exception, while a ring at a URL does not answer."""

    def interrupted(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(found_run, "only_at_url", interrupted)
        with pytest.raises(KeyboardInterrupt) as kept:
            guard(tmp_path / "run")
    guard(tmp_path / "run").close()
    del kept


@pytest.mark.parametrize(
    ("refusal", "told"),
    [
        (ValueError("not mine"), "the Refusing 'refusing' did not load the state"),
        (RunDoesNotFit("of another model"), "of another model"),
    ],
    ids=["an error", "one that ends the job"],
)
def test_a_state_that_could_not_be_put_back_is_not_trained_on_where_the_script_catches_that(
    refusal: Exception, told: str, tmp_path: Path
) -> None:
    class Refusing:
        refuses = False

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: Any) -> None:
            if self.refuses:
                raise refusal

    refusing, model, caught = Refusing(), nn.Linear(4, 1), list[str]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    made = guard(
        tmp_path / "run", model=model, optimizer=optimizer, loader=DataLoader(torch.randn(60, 4)),  # type: ignore[arg-type]
        refusing=refusing, snapshot_every=4, max_steps=40,
    )  # fmt: skip
    batches = iter(made)
    while len(caught) < 3 and made.step < 30:
        try:
            batch = next(batches)
        except RollbackError as error:
            caught.append(error.message)
            continue
        refusing.refuses = made.step >= 20
        loss = model(batch).pow(2).mean() * (float("nan") if made.step == 20 else 1.0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        made.observe(loss)
    made.close()
    assert (len(caught), len({*caught})) == (3, 1)
    assert caught[0].startswith(told)


BROKEN_OFF = [
    (UsageError, "snapshots.drift.require_alike"),
    (RuntimeError, "snapshots.drift.require_alike"),
    (KeyboardInterrupt, "snapshots.drift.require_alike"),
    (KeyboardInterrupt, "assembly.Prober"),  # behind the last part that has a thread
    (KeyboardInterrupt, "guard.end_with_supervisor"),
]
"""An error, and what raises it when a guard has attached to its run."""
READ_BY_INDEX = DataLoader([torch.ones(4)])  # type: ignore[arg-type]


def test_a_signal_to_a_guard_that_is_then_refused_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever catches the refusal would go on for ever, though it was told to end."""

    def refuse(*_: Any) -> NoReturn:
        signal.raise_signal(signal.SIGINT)
        raise UsageError("broken off")

    monkeypatch.setattr("rollback.train.assembly.Prober", refuse)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            guard(tmp_path / "run")
    finally:
        signal.signal(signal.SIGINT, before)
    monkeypatch.undo()
    guard(tmp_path / "run").close()


def require_refused(run: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], place: str) -> Any:
    """Make a guard, which is broken off by this error at this place. Returns what a notebook keeps of it."""

    def refuse(*_: Any) -> None:
        raise error("broken off")

    (memory := run.parent / "memory").mkdir()
    with monkeypatch.context() as made_unlike:
        made_unlike.setattr(f"rollback.train.{place}", refuse)
        with pytest.raises(error) as kept:
            guard(run, fast_tier=str(memory), loader=READ_BY_INDEX)  # so it has last snapshots
    return kept


@pytest.mark.parametrize("name", ["heartbeat", "snapshot", "slots", "lifeline"])
def test_a_guard_without_a_thread_that_it_needs_is_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith(f"rollback-{name}"):
            raise RuntimeError("can't start new thread")
        start(thread)

    (tmp_path / "memory").mkdir()
    known = threading.enumerate()
    with monkeypatch.context() as at_the_limit:
        if name == "lifeline":
            at_the_limit.setenv(ENV_SUPERVISOR, "1:0.0")
            at_the_limit.setattr("rollback.train.run._attached", set())
        at_the_limit.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RollbackError, match=rf"starting a thread .rollback-{name}.: can't .*\n.*ulimit -u"):
            guard(tmp_path / "run", fast_tier=str(tmp_path / "memory"))
    require_ended(known)
    guard(tmp_path / "run").close()


def require_ended(known: list[threading.Thread]) -> None:
    """All threads of ours but for these."""
    for thread in {*threading.enumerate()} - {*known}:
        if thread.name.startswith("rollback-"):
            thread.join(10)
            assert not thread.is_alive(), thread.name


def test_a_training_that_begins_anew_with_smaller_batches_is_told_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """find_executable_batch_size swallows the error that there was no memory, so nothing else says why it did."""
    guard(tmp_path / "run").close()
    monkeypatch.setenv(ENV_SUPERVISOR, "1:0.0")
    with pytest.raises(UsageError, match="a second guard in one job") as refused:
        guard(tmp_path / "run")
    assert "begin with batches that fit" in str(refused.value.hint)


@pytest.mark.parametrize(("error", "place"), BROKEN_OFF)
def test_a_second_guard_that_is_refused_leaves_the_first_one_its_heartbeat_and_its_failure_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], place: str
) -> None:
    monkeypatch.setattr(sys, "excepthook", lambda *error: None)
    first = guard(tmp_path / "run")
    require_refused(tmp_path / "other", monkeypatch, error, place)
    assert not first._loop.step_in_progress.heartbeat._over.is_set()
    sys.excepthook(ValueError, ValueError("here"), None)
    first.close()
    (record,) = read_failures(RunPaths(tmp_path / "run").failures(1)).values()
    assert (record.error, record.message) == ("ValueError", "here")


@pytest.mark.parametrize(("error", "place"), BROKEN_OFF)
def test_a_guard_that_is_refused_when_it_has_attached_leaves_the_process_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], place: str
) -> None:
    """Else the script that catches this would ignore SIGTERM from then on, and its next guard find the run in use."""
    monkeypatch.setattr(sys, "excepthook", print)
    known = threading.enumerate()
    before = signal.getsignal(signal.SIGTERM), sys.excepthook
    kept = require_refused(tmp_path / "run", monkeypatch, error, place)
    records = read_failures(RunPaths(tmp_path / "run").failures(1)).values()
    assert [record.message for record in records] == (["broken off"] if error is RuntimeError else [])
    for record in records:  # the script's own lines tell which error it is
        assert "require_refused" in [frame.function for frame in record.frames]
        assert ", in require_refused\n" in record.traceback
    assert (signal.getsignal(signal.SIGTERM), sys.excepthook) == before
    assert open_records(tmp_path / "run") == []
    require_ended(known)
    guard(tmp_path / "run", loader=READ_BY_INDEX).close()
    del kept


@pytest.mark.parametrize(("how", "taken"), [("complete", 2), ("left", 1)])
def test_how_training_ended_is_told_by_the_last_heartbeat_where_the_journal_cannot_take_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, taken: int
) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    one = rollback.Guard(model=model, optimizer=optimizer, loader=[torch.ones(1, 4)] * 2, run=tmp_path, max_steps=2)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for x in one:
        one.observe(model(x).sum())
        optimizer.step()
        monkeypatch.setattr(Journal, "append", full)
        if one.step + 1 == taken and how == "left":
            break
    one.close()
    end = read_heartbeats(RunPaths(tmp_path).ranks)[0].unrecorded_end
    why = os.strerror(errno.ENOSPC)
    assert end == UnrecordedEnd(how=how, why=why, step=taken, batch=taken)  # type: ignore[arg-type]
