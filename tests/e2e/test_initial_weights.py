"""Runs that begin with the weights of others, on several ranks: sharded and replicated, from files and from DCP."""

from pathlib import Path

import pytest
from job_results import Scenarios
from toy import Toy, facts, require_same

from rollback.dcp.write import export_dcp
from rollback.facts.training import Attached
from rollback.inspect.ring.at_url import ReadableRun
from rollback.inspect.ring.export import export

SHARDED = Toy(200, sampler="distributed", sharding="fsdp", width=17)  # 17 rows on two ranks: 9 and 8


def state_of(portrait: dict[str, str], *kinds: str) -> dict[str, str]:
    """Without what is each rank's own; a wrapper's name is none of the tensor's."""
    return {
        key.replace("/module.", "/"): text for key, text in portrait.items()
        if key.startswith(kinds) and "/param_groups" not in key
    }  # fmt: skip


def begun(tmp_path: Path, ranks: int, sharding: tuple[str | None, ...], later: int) -> None:
    """A sharded run is exported; others begin with the exports, take no step, and have what it ended with."""
    first = Scenarios(tmp_path)
    first.add("first", SHARDED.but(max_steps=12))
    first.torchrun(ranks)
    export_dcp(ReadableRun.at(first.run("first")), "final", tmp_path / "dcp")
    export(ReadableRun.at(first.run("first")), "final", tmp_path / "model.safetensors", max_shard_size=300)
    second = Scenarios(tmp_path)
    second.path = tmp_path / "second.json"
    for kind in sharding:
        for init in ("dcp", "model.safetensors.index.json"):
            toy = SHARDED.but(sharding=kind, max_steps=0).with_settings(init=str(tmp_path / init))
            second.add(f"{kind} {init}", toy)
            for rank in range(later):
                (tmp_path / f"{kind} {init}-{rank}.log").touch()
    second.torchrun(later)
    wanted = first.portrait("first", 0)
    for kind in sharding:
        for init, what in (("dcp", ("/model", "/optimizer")), ("model.safetensors.index.json", ("/model",))):
            for rank in range(later):
                found = second.portrait(f"{kind} {init}", rank)
                require_same(state_of(wanted, *what), state_of(found, *what), f"{kind} from {init}, {rank}")
            told = facts(second.run(f"{kind} {init}"), Attached)[0].init
            assert (told.tensors, bool(told.optimizer)) == (9, init == "dcp")


def test_sharded_and_replicated_runs_begin_with_exports_of_a_sharded_run(tmp_path: Path) -> None:
    begun(tmp_path, 2, ("fsdp", None), 2)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("ranks", "sharding", "later"),
    [(3, ("fsdp", "hsdp", "tensor parallel", None), 4), (4, ("fsdp", None), 3), (2, ("fsdp",), 4)],
)
def test_on_other_numbers_of_ranks_and_meshes(
    tmp_path: Path, ranks: int, sharding: tuple[str | None, ...], later: int
) -> None:
    begun(tmp_path, ranks, sharding, later)
