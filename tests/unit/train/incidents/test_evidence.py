"""What a rank remembers of an incident: the layer that began, the kind of explosion, the batch as it was handed out."""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import rollback
from recorded_run import incident
from rollback.config import Settings
from rollback.facts.history import History
from rollback.rundir.evidence import RankEvidence, read_evidence
from rollback.rundir.paths import RunPaths
from rollback.train.comm.ranks import Ranks
from rollback.train.comm.recorder import Recorder
from rollback.train.events import RollbackApplied, RollbackCause
from rollback.train.incidents.evidence import IncidentEvidence, _find_tensors
from rollback.train.run import AttachedRun
from rollback.train.updates.gradients import Gradients, norm_of_each

SETTINGS: dict[str, Any] = {"snapshot_every": 10, "rewind": 5, "skip_after": 3, "probation": 8}


class Lines(Dataset[Any]):
    def __init__(self, length: int = 240) -> None:
        self.x = torch.randn(length, 4, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.x[index], "about": {"index": index, "a/b": self.x[index, :1]}}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


Body = Callable[[int, Any, nn.Sequential, Tensor], None]


def train(run: Path, *, after_backward: Body | None = None, clip: float | None = None, **settings: Any) -> RunPaths:
    """Train for 60 steps of 4 samples under a guard. `after_backward(step, batch, model, loss)` does the harm."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    guard = rollback.Guard(
        model=model, optimizer=optimizer, loader=DataLoader(Lines(), batch_size=4), run=run, **{**SETTINGS, **settings}
    )
    for batch in guard:
        loss = (model(batch["x"]) - batch["x"].sum(1, keepdim=True)).square().mean()
        loss.backward()
        if after_backward is not None:
            after_backward(guard.step, batch, model, loss)
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip) if clip else None
        optimizer.step()
        optimizer.zero_grad()
        guard.observe(loss, grad_norm=norm)
    guard.close()
    return RunPaths(run)


def once(step: int, act: Callable[[nn.Sequential], None]) -> Body:
    """Do it at that step, the first time only."""
    done: list[int] = []

    def body(now: int, batch: Any, model: nn.Sequential, loss: Tensor) -> None:
        if now == step and not done:
            done.append(now)
            act(model)

    return body


def evidence_of(paths: RunPaths, number: int = 0, rank: int = 0) -> RankEvidence:
    return read_evidence(paths.evidence(number, rank))


# --- where it began ---------------------------------------------------------------------------------------------------


def break_in_backward(model: nn.Sequential) -> None:
    """From now on, one element of the gradient of the second layer's weight is NaN, as backward computes it."""
    spoilt: list[int] = []

    def spoil(gradient: Tensor) -> Tensor:
        if spoilt:
            return gradient
        spoilt.append(1)
        gradient = gradient.clone()
        gradient[0, 0] = math.nan
        return gradient

    model[2].weight.register_hook(spoil)


@pytest.mark.parametrize("clip", [None, 1.0])
def test_the_layer_that_began_is_named_though_clipping_spreads_its_nan(tmp_path: Path, clip: float | None) -> None:
    # The hook is set after step 20's backward, so it is step 21 that breaks.
    seen = evidence_of(train(tmp_path, after_backward=once(20, break_in_backward), clip=clip))
    assert seen.origin is not None
    assert (seen.origin.where, seen.origin.step, seen.origin.name) == ("gradients", 21, "2.weight")
    assert seen.gradients is not None
    assert seen.gradients.exploding["nonfinite"] == ["2.weight"]
    assert seen.gradients_step == 21
    assert math.isfinite(seen.steps[0].losses[0])
    assert seen.steps[0].kind == "nonfinite"


def test_a_gradient_that_the_script_breaks_after_backward_is_seen_in_the_same_step(tmp_path: Path) -> None:
    def harm(model: nn.Sequential) -> None:
        assert model[4].bias.grad is not None
        model[4].bias.grad.fill_(math.inf)

    seen = evidence_of(train(tmp_path, after_backward=once(20, harm)))
    assert seen.origin is not None
    assert (seen.onset_step, seen.origin.where, seen.origin.name) == (20, "gradients", "4.bias")


def test_all_gradients_that_the_script_breaks_alike_are_seen_in_the_same_step(tmp_path: Path) -> None:
    def harm(model: nn.Sequential) -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(math.nan)

    seen = evidence_of(train(tmp_path, after_backward=once(20, harm)))
    assert (seen.onset_step, seen.origin and seen.origin.where) == (20, "gradients")


def test_a_loss_that_is_not_finite_comes_before_the_gradients_that_follow_from_it(tmp_path: Path) -> None:
    class Spoilt(Lines):
        def __getitem__(self, index: int) -> dict[str, Any]:
            item = super().__getitem__(index)
            return {**item, "x": item["x"] * math.nan} if index == 81 else item

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    guard = rollback.Guard(model=model, optimizer=optimizer, loader=DataLoader(Spoilt(), 4), run=tmp_path, **SETTINGS)
    for batch in guard:
        loss = model(batch["x"]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        guard.observe(loss)
    guard.close()
    seen = evidence_of(RunPaths(tmp_path))
    assert seen.origin is not None
    assert (seen.origin.where, seen.origin.step, seen.origin.name) == ("loss", 20, None)
    assert seen.nonfinite_buffers == ["3.running_mean", "3.running_var"]
    assert seen.weights.exploding["nonfinite"][0] == "4.bias"
    kept = load_file(RunPaths(tmp_path).incident_batch(0, 0))
    assert torch.isnan(kept["20/x"]).any(1).tolist() == [False, True, False, False]


def test_buffers_of_any_type_are_looked_at(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    for dtype in (torch.float8_e5m2, torch.float8_e4m3fn, torch.bfloat16, torch.complex64, torch.uint16, torch.bool):
        name = str(dtype).replace("torch.", "of_")
        bench.model.register_buffer(name, torch.tensor([0.0, 1.0]).to(dtype))
        if dtype.is_floating_point or dtype.is_complex:
            bench.model.register_buffer(f"broken_{name}", torch.tensor([0.0, math.nan]).to(dtype))
    bench.model.register_buffer("sparse", torch.eye(2).to_sparse())
    bench.step(0, math.nan)
    assert bench.account(0).nonfinite_buffers == [
        "broken_of_float8_e5m2", "broken_of_float8_e4m3fn", "broken_of_bfloat16", "broken_of_complex64"
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
def test_parameters_without_a_norm_are_left_out_of_the_weights(tmp_path: Path, dtype: torch.dtype) -> None:
    """As the base of a QLoRA, in four bits."""
    bench = Bench(tmp_path)
    bench.model.register_parameter("base", nn.Parameter(torch.ones(4).to(dtype), requires_grad=False))
    bench.step(0, math.nan)
    assert bench.account(0).weights.tensors == 3


# --- three kinds of explosion -----------------------------------------------------------------------------------------


class Bench:
    """Parameters whose gradients a test sets, and what the evidence says of them."""

    def __init__(self, folder: Path, limit: int = 1 << 20) -> None:
        self.model = nn.ParameterDict({name: nn.Parameter(torch.ones(4)) for name in ("first", "middle", "last")})
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.gradients = Gradients(self.optimizer, None, self.model)
        self.paths = RunPaths(folder)
        run = AttachedRun(self.paths, Ranks(), Settings(), Recorder(self.paths, 1, is_rank_0=False), History())
        self.evidence = IncidentEvidence(run, self.model, limit)

    def step(self, number: int, loss: float = 1.0, **gradients: float) -> float:
        for name, parameter in self.model.items():
            parameter.grad = torch.full((4,), gradients.get(name, 0.5))
        norms = self.gradients.before_step()
        assert norms is not None
        self.gradients.forget()
        self.evidence.end_step(number, [torch.tensor(loss)], norms)
        return norms.total.item()

    def account(self, onset: int, detected: int | None = None, number: int = 0) -> RankEvidence:
        fact = incident(number, onset, onset if detected is None else detected)
        self.evidence.write(fact)
        return read_evidence(self.paths.evidence(number, 0))


def test_a_large_norm_an_overflowing_norm_and_elements_that_are_not_finite_are_told_apart(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    assert bench.step(0) == pytest.approx(math.sqrt(3))
    assert bench.step(1, middle=1e4, last=1e3) == pytest.approx(2e4, rel=0.01)
    assert bench.step(2, middle=1e30) == math.inf
    assert bench.step(3, first=math.inf, last=math.nan, middle=1e30) != bench.step(4)
    seen = bench.account(0)
    assert [step.kind for step in seen.steps] == [None, "large", "overflow", "nonfinite", None]

    def exploding(step: int) -> dict[Any, list[str]]:
        found = bench.account(step).gradients
        assert found is not None
        return {kind: names for kind, names in found.exploding.items() if names}

    assert exploding(1) == {"large": ["middle", "last"]}  # leading first
    assert exploding(2) == {"overflow": ["middle"]}
    assert exploding(3) == {"nonfinite": ["last", "first"], "overflow": ["middle"]}  # nearest to the output first
    norms = bench.account(2).gradients
    assert norms is not None
    assert norms.largest[0].norm == pytest.approx(2e30)  # in double precision
    assert norms.total == pytest.approx(2e30)


def test_the_largest_the_smallest_and_the_vanishing_are_listed(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.step(7, first=1e-10, middle=3.0)
    found = bench.account(7).gradients
    assert found is not None
    assert [item.name for item in found.largest] == ["middle", "last", "first"]
    assert [item.name for item in found.smallest] == ["first", "last", "middle"]
    assert found.vanishing == ["first"]
    assert bench.account(7).weights.total == pytest.approx(math.sqrt(12))


# --- the batch --------------------------------------------------------------------------------------------------------


def test_the_onset_steps_batch_is_kept_as_it_was_handed_out(tmp_path: Path) -> None:
    paths = train(tmp_path, after_backward=once(20, break_in_backward))
    seen, kept = evidence_of(paths), load_file(paths.incident_batch(0, 0))
    # Batches that an earlier incident skipped shift no position here: this is the first.
    assert sorted(kept) == ["21/about/a%2Fb", "21/about/index", "21/x"]
    assert torch.equal(kept["21/x"], Lines().x[84:88])
    assert kept["21/about/index"].tolist() == [84, 85, 86, 87]
    assert (seen.batch.step, seen.batch.file, seen.batch.left_out) == (21, "rank-00000.safetensors", [])
    assert not any(part.altered for part in seen.batch.tensors)


def test_a_batch_into_which_the_script_writes_is_marked(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    batch = [torch.zeros(2), torch.zeros(2)]
    bench.evidence.keep_batch(0, batch)
    batch[1].add_(1)
    bench.step(0)
    assert [part.altered for part in bench.account(0).batch.tensors] == [False, True]


def test_what_does_not_fit_is_left_out_and_said(tmp_path: Path) -> None:
    bench = Bench(tmp_path, limit=100)
    bench.evidence.keep_batch(3, (torch.zeros(4), torch.zeros(30), {"s": torch.zeros(2).to_sparse(), "o": object()}))
    bench.step(0)
    batch = bench.account(0).batch
    assert [part.name for part in batch.tensors] == ["3/0"]
    assert [part.name for part in batch.left_out] == ["3/1", "3/2/s", "3/2/o"]
    assert "120 bytes" in batch.left_out[0].reason


@pytest.mark.filterwarnings("ignore:The PyTorch API of")
def test_a_tensor_that_is_not_in_one_piece_is_left_out_and_ends_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    masked = torch.masked.masked_tensor(torch.ones(3), torch.tensor([True, False, True]))
    bench.evidence.keep_batch(0, (torch.zeros(4), nested, masked))
    bench.step(0)
    batch = bench.account(0).batch
    assert [part.name for part in batch.tensors] == ["0/0"]
    assert [part.name for part in batch.left_out] == ["0/1", "0/2"]
    assert "MaskedTensor" in batch.left_out[1].reason


def test_an_array_of_a_kind_that_no_file_has_is_left_out_and_ends_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.evidence.keep_batch(0, {"spectrum": np.fft.fft(np.ones(4)), "signal": np.ones(4)})
    bench.step(0)
    batch = bench.account(0).batch
    assert [part.name for part in batch.tensors] == ["0/signal"]
    assert [(part.name, "complex128" in part.reason) for part in batch.left_out] == [("0/spectrum", True)]


def test_numbers_in_lists_cost_next_to_nothing(tmp_path: Path) -> None:
    """A loader that does not collate hands out samples as they are: hundreds of thousands of tokens, in each step."""
    bench, looked = Bench(tmp_path), 0

    def count(frame: Any, event: str, _: object) -> None:
        nonlocal looked
        looked += event == "call" and frame.f_code is _find_tensors.__code__

    sys.setprofile(count)
    try:
        bench.evidence.keep_batch(0, [{"ids": list(range(500)), "text": ["a"] * 500} for _ in range(10)])
    finally:
        sys.setprofile(None)
    assert looked < 50


def test_a_field_of_a_batch_that_is_not_set_is_left_out_and_ends_nothing(tmp_path: Path) -> None:
    @dataclass
    class Pair:
        x: torch.Tensor
        weight: torch.Tensor = field(init=False)

    bench = Bench(tmp_path)
    bench.evidence.keep_batch(0, Pair(torch.ones(2)))
    bench.step(0)
    assert [item.name for item in bench.account(0).batch.tensors] == ["0/x"]


def test_no_more_than_the_limit_is_held_and_the_suspected_step_goes_last(tmp_path: Path) -> None:
    bench = Bench(tmp_path, limit=100)
    for step in range(6):
        bench.evidence.keep_batch(step, torch.zeros(10))
        bench.step(step)
        if step == 1:
            bench.evidence.suspect(1)
    assert [part.name for part in bench.account(1, number=0).batch.tensors] == ["1"]
    assert bench.account(2, number=1).batch.tensors == []
    assert [part.name for part in bench.account(5, number=2).batch.tensors] == ["5"]


def test_of_too_many_tensors_the_first_ones_are_held_and_the_next_one_is_named(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    lines = [torch.zeros(1) for _ in range(600)]
    bench.evidence.keep_batch(3, {"a": lines, "b": lines, "c": lines})
    bench.step(0)
    batch = bench.account(0).batch
    assert (len(batch.tensors), batch.tensors[-1].name) == (1024, "3/b/423")
    assert [(part.name, part.reason) for part in batch.left_out] == [("3/b/424", "more than 1024 tensors")]


def test_the_suspected_step_is_remembered_longer_than_others(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    for step in range(100):
        bench.step(step)
        if step == 1:
            bench.evidence.suspect(1)
    assert [seen.step for seen in bench.account(0, 99).steps] == [1, *range(37, 100)]


def test_with_a_limit_of_0_no_batch_is_held(tmp_path: Path) -> None:
    paths = train(tmp_path, after_backward=once(20, break_in_backward), evidence_limit=0)
    assert evidence_of(paths).batch.tensors == []
    assert not paths.incident_batch(0, 0).exists()


def test_steps_that_a_rollback_undid_are_forgotten(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    for step in range(4):
        bench.step(step, loss=float(step))
    bench.evidence.rollback_applied(RollbackApplied(RollbackCause.PLAN, 2, 2, "c000000-s00000002"))
    bench.step(2, loss=20.0)
    assert [(seen.step, seen.losses) for seen in bench.account(1).steps] == [(1, [1.0]), (2, [20.0])]


def test_a_step_from_before_this_process_leaves_no_batch_and_says_so(tmp_path: Path) -> None:
    seen = Bench(tmp_path).account(5)
    assert (seen.steps, seen.gradients, seen.origin) == ([], None, None)
    assert "began later" in seen.batch.left_out[0].reason


def test_a_disk_that_refuses_stops_nothing_and_is_told_of_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = Bench(tmp_path)
    (tmp_path / "incidents").write_text("in the way")
    bench.step(0)
    bench.evidence.write(incident(0, 0, 0))
    bench.evidence.write(incident(1, 0, 0))
    told = capsys.readouterr().err
    assert told.count("training goes on") == 1
    assert f"writing the evidence {bench.paths.evidence(0, 0)} failed" in told


@pytest.mark.parametrize(
    ("error", "then"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "training goes on"),
        (RuntimeError("DefaultCPUAllocator: not enough memory"), "training goes on"),
        (torch.AcceleratorError("CUDA error: illegal access"), "training goes on if the device still answers"),
    ],
    ids=["device without room", "host without room", "device fails"],
)
def test_a_device_that_computes_no_norms_stops_no_plan_and_nothing_is_promised_of_one_that_fails(
    error: Exception, then: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> NoReturn:
        raise error

    monkeypatch.setattr("rollback.train.incidents.evidence.norm_of_each", fail)
    bench = Bench(tmp_path)
    bench.step(0)
    bench.evidence.write(incident(0, 0, 0))
    assert f"failed ({error}); {then}\n" in capsys.readouterr().err


# --- norms between backward and step ----------------------------------------------------------------------------------


@pytest.fixture
def sensed() -> tuple[nn.Sequential, torch.optim.Optimizer, Gradients]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, Gradients(optimizer, None, model)


def test_clipping_is_seen_by_its_factor_and_the_norm_is_that_before_it(sensed: Any) -> None:
    model, _, gradients = sensed
    (100 * model(torch.ones(2, 4))).sum().backward()
    told = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    norms = gradients.before_step()
    assert norms.total.item() == pytest.approx(told.item(), rel=1e-5)
    assert norms.clip_factor == pytest.approx(1 / told.item(), rel=1e-4)


def test_a_tensor_written_to_by_itself_is_measured_again(sensed: Any) -> None:
    model, _, gradients = sensed
    model(torch.ones(2, 4)).sum().backward()
    model[1].weight.grad[0, 0] = 1e6
    norms = gradients.before_step()
    assert norms.total.item() == pytest.approx(1e6, rel=1e-3)
    assert norms.clip_factor is None


@pytest.mark.parametrize("factor", [0.0, 1.0])
def test_gradients_that_are_all_made_nan_are_seen_whatever_the_small_one_was(sensed: Any, factor: float) -> None:
    model, _, gradients = sensed
    (factor * model(torch.ones(2, 4))).sum().backward()
    for parameter in model.parameters():
        parameter.grad.fill_(math.nan)
    assert math.isnan(gradients.before_step().total.item())


def test_gradients_that_are_all_made_larger_count_as_they_are(sensed: Any) -> None:
    model, _, gradients = sensed
    model(torch.ones(2, 4)).sum().backward()
    before = nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    for parameter in model.parameters():
        parameter.grad.mul_(50.0)
    assert gradients.before_step().total.item() == pytest.approx(50 * before, rel=1e-4)


def test_the_scale_of_a_gradient_scaler_is_taken_out_of_the_norm() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    gradients = Gradients(optimizer, scaler, model)
    norms: list[Any] = []
    optimizer.register_step_pre_hook(lambda *_: norms.append(gradients.before_step()))
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    plain = nn.utils.get_total_norm([p.grad / 1024.0 for p in model.parameters() if p.grad is not None]).item()
    scaler.step(optimizer)
    assert norms[0].total.item() == pytest.approx(plain, rel=1e-5)
    assert norms[0].clip_factor == pytest.approx(1.0)


def test_sparse_gradients_have_norms_too() -> None:
    model = nn.Embedding(5, 3, sparse=True)
    optimizer = torch.optim.SparseAdam(list(model.parameters()))
    gradients = Gradients(optimizer, None, model)
    model(torch.tensor([1, 1, 2])).sum().backward()
    assert gradients.before_step().total.item() == pytest.approx(math.sqrt(3 * 4 + 3))  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_norms_are_those_of_double_precision_also_where_single_precision_overflows(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    rows = [[3.0, 4.0], [largest, largest / 2], [math.inf, 1.0], [math.nan, math.inf], [0.0, 0.0]]
    tensors = [torch.tensor(row, dtype=dtype) for row in rows]
    expected = torch.stack([torch.linalg.vector_norm(item.double()) for item in tensors])
    if dtype == torch.float64:
        expected[1] = math.inf  # there is nothing wider
    torch.testing.assert_close(norm_of_each(tensors).double(), expected, equal_nan=True, rtol=1e-5, atol=0.0)
