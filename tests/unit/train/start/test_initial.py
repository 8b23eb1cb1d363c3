"""A run that begins with weights of others: what is read, what is refused, and when it is not read."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from toy import Toy, facts, train, weights

import rollback
from rollback.checkpoints.format.parts import Box, Part
from rollback.checkpoints.outside.fitting import hash_file, open_outside
from rollback.errors import UsageError
from rollback.facts.training import Advice, Attached
from rollback.inspect.ring.export import export
from rollback.train.comm.ranks import Ranks
from rollback.train.restore.reads import reading

TOY = Toy(40, max_steps=3)


def objects(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Trained a little, so that the optimizer has a state."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    order = [*model[2].parameters(), *model[0].parameters(), *model[1].parameters()]
    optimizer = torch.optim.AdamW(order, lr=0.1 * seed)
    for _ in range(seed):
        model(torch.randn(5, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def begin(run: Path, init: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> rollback.Guard:
    return rollback.Guard(model=model, optimizer=optimizer, loader=[torch.zeros(2, 4)], run=run, init=init)


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_begins_with_the_weights_in_a_file(tmp_path: Path) -> None:
    saved, _ = objects(3)
    save_file(saved.state_dict(), tmp_path / "model.safetensors")
    model, optimizer = objects(1)
    moments = {name: item.clone() for name, item in optimizer.state[model[0].weight].items()}
    begin(tmp_path / "run", tmp_path / "model.safetensors", model, optimizer).close()
    assert same(model.state_dict(), saved.state_dict())
    assert same(optimizer.state[model[0].weight], moments), "the file has none"
    (attached,) = facts(tmp_path / "run", Attached)
    assert attached.init.model_dump() == {
        "path": str(tmp_path / "model.safetensors"), "layout": "safetensors", "files": 1,
        "bytes": (tmp_path / "model.safetensors").stat().st_size, "hash": hash_file(tmp_path / "model.safetensors"),
        "tensors": 9, "optimizer": 0, "left_aside": 0,
    }  # fmt: skip


def test_a_dcp_checkpoint_gives_the_optimizer_s_state_too_and_leaves_its_settings(tmp_path: Path) -> None:
    model, optimizer = objects(3)
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.save({**state, "tokens": torch.tensor(5)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    own, its = objects(1)
    begin(tmp_path / "run", tmp_path / "dcp", own, its).close()
    assert same(own.state_dict(), model.state_dict())
    for one, other in zip(own.parameters(), model.parameters(), strict=True):
        assert same(its.state[one], optimizer.state[other])
    assert its.param_groups[0]["lr"] == 0.1
    init = facts(tmp_path / "run", Attached)[0].init
    assert (init.layout, init.tensors, init.optimizer, init.left_aside) == ("dcp", 9, 18, 1)


def test_a_run_of_ours_exported_for_dcp_begins_another_run(tmp_path: Path) -> None:
    from rollback.dcp.write import export_dcp
    from rollback.inspect.ring.at_url import ReadableRun

    train(TOY, tmp_path / "first")
    export_dcp(ReadableRun.at(tmp_path / "first"), None, tmp_path / "dcp")
    train(TOY.but(max_steps=1).with_settings(init=str(tmp_path / "dcp")), tmp_path / "second")
    init = facts(tmp_path / "second", Attached)[0].init
    assert (init.tensors, init.optimizer) == (9, 18)
    export(ReadableRun.at(tmp_path / "first"), "final", tmp_path / "model.safetensors")
    train(TOY.with_settings(init=tmp_path / "model.safetensors").but(max_steps=1), tmp_path / "third")
    two, three = (facts(tmp_path / name, Attached)[0].init for name in ("second", "third"))
    assert two.tensors == three.tensors


def test_of_a_frozen_parameter_no_state_is_awaited_and_what_there_is_comes_along(tmp_path: Path) -> None:
    torch.manual_seed(0)
    saved = nn.Linear(4, 3)
    saved.bias.requires_grad_(False)
    its = torch.optim.AdamW(saved.parameters())
    saved(torch.ones(2, 4)).sum().backward()
    its.step()
    state = {"model": get_model_state_dict(saved), "optim": get_optimizer_state_dict(saved, its)}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for kind, frozen in (("bias", ["bias"]), ("both", ["bias", "weight"]), ("none", [])):
        model = nn.Linear(4, 3)
        for name in frozen:
            model.get_parameter(name).requires_grad_(False)
        optimizer = torch.optim.AdamW(model.parameters())
        if not frozen:
            with pytest.raises(UsageError, match="1 missing of the optimizer's state: bias") as caught:
                begin(tmp_path / kind, tmp_path / "dcp", model, optimizer)
            assert "they were frozen" in str(caught.value.hint)
            continue
        begin(tmp_path / kind, tmp_path / "dcp", model, optimizer).close()
        assert same(model.state_dict(), saved.state_dict())
        assert same(optimizer.state[model.weight], its.state[saved.weight])
        assert not optimizer.state.get(model.bias)


def test_nothing_is_touched_where_something_does_not_fit(tmp_path: Path) -> None:
    saved, _ = objects(3)
    state = saved.state_dict()
    state["0.weight"] = state["0.weight"].double()
    del state["2.bias"]
    save_file(state, tmp_path / "model.safetensors")
    model, optimizer = objects(1)
    before = {name: item.clone() for name, item in model.state_dict().items()}
    with pytest.raises(UsageError, match=r"1 missing: 2\.bias; 1 of another .* 0\.weight is float64\[3, 4\]"):
        begin(tmp_path / "run", tmp_path, model, optimizer)
    assert same(model.state_dict(), before)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["lock"]


def test_a_run_with_checkpoints_does_not_read_it_and_says_so_once(tmp_path: Path) -> None:
    plain = train(TOY, tmp_path / "plain")
    longer = train(TOY.but(max_steps=6), tmp_path / "plain")
    train(TOY, tmp_path / "run")
    for steps in (5, 6):
        other = TOY.but(max_steps=steps).with_settings(init=str(tmp_path / "gone"))
        ended = train(other, tmp_path / "run")
    assert weights(ended) == weights(longer) != weights(plain)
    told = [fact for fact in facts(tmp_path / "run", Advice) if fact.code == "init-not-read"]
    assert len(told) == 1
    assert str(tmp_path / "gone") in told[0].text
    assert [fact.init for fact in facts(tmp_path / "run", Attached)] == [None] * 3


def test_tied_weights_and_what_a_state_dict_copies_are_put_in_their_places(tmp_path: Path) -> None:
    class Copying(nn.Linear):
        """Its state_dict has copies."""

        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination[prefix + "weight"] = destination[prefix + "weight"].clone()

    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Copying(4, 2))
        model[1].weight = model[0].weight
        return model

    saved, model = make(1), make(2)
    state = saved.state_dict()
    del state["1.weight"]  # as save_pretrained does
    save_file(state, tmp_path / "model.safetensors")
    begin(tmp_path / "run", tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1)).close()
    assert same(model.state_dict(), saved.state_dict())
    assert model[1].weight is model[0].weight


def test_a_rank_reads_the_rows_that_it_has_a_part_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.arange(4000.0).reshape(1000, 4)
    save_file({"w": weight}, tmp_path / "model.safetensors")
    dcp.save({"w": weight}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for place in (tmp_path / "model.safetensors", tmp_path / "dcp"):
        found, read = open_outside(place), []
        preadv = os.preadv
        monkeypatch.setattr(os, "preadv", lambda *call: read.append(count := preadv(*call)) or count)  # noqa: B023
        with reading(Ranks()) as reads:
            rows = reads.want_part(found.tensors["w"], Part((1000, 4), Box((300, 0), (5, 4))), None, torch.empty(0))
        monkeypatch.undo()
        assert torch.equal(rows, weight[300:305])
        assert sum(read) < 2500, "80 bytes of the tensor, and of the archive its table"
        found.close()


def test_parameters_without_elements_keep_their_own_names(tmp_path: Path) -> None:
    """As a rank's parts may be: they have no memory by which they could be told apart."""
    model = nn.ParameterDict(
        {name: nn.Parameter(torch.ones(size, 3)) for name, size in {"a": 0, "b": 0, "c": 2}.items()}
    )
    optimizer = torch.optim.SGD([model["c"], model["b"], model["a"]], lr=0.1)
    guard = rollback.Guard(model=model, optimizer=optimizer, loader=[torch.zeros(1)], run=tmp_path / "run")
    assert guard._loop.state.trained_names() == ["c", "b", "a"]
    guard.close()
