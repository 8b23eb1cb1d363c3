"""Whether a script is seen to start its ranks by itself."""

import pytest

from rollback.source.rank_spawning import line_of_spawn


@pytest.mark.parametrize(
    "source",
    [
        "import torch.multiprocessing as mp\nmp.spawn(main, nprocs=2)",
        "import torch.multiprocessing\ntorch.multiprocessing.start_processes(main, nprocs=2)",
        "from torch import multiprocessing\nmultiprocessing.spawn(main, nprocs=2)",
        "from torch.multiprocessing import spawn as begin\nbegin(main, nprocs=2)",
        "from torch.multiprocessing.spawn import spawn\nspawn(main, nprocs=2)",
    ],
)
def test_whatever_the_name_of_spawn_it_is_found(source: str) -> None:
    assert line_of_spawn(source.encode()) == 2


@pytest.mark.parametrize("process", ["mp.Process", "Process", "mp.get_context('spawn').Process"])
@pytest.mark.parametrize("meets", ["dist.init_process_group('gloo')", "setup(rank)"])
def test_processes_whose_function_makes_a_process_group_are_ranks(process: str, meets: str) -> None:
    source = f"""def setup(rank):
    torch.distributed.init_process_group("gloo", rank=rank)
def work(rank):
    {meets}
for rank in range(2):
    {process}(target=work, args=(rank,)).start()
"""
    assert line_of_spawn(source.encode()) == 6


@pytest.mark.parametrize(
    "source",
    [
        "import multiprocessing as mp\nmp.spawn(main)",
        "def log():\n    pass\ndist.init_process_group()\nmp.Process(target=log).start()",
        "def main():\n    dist.init_process_group()\npsutil.Process(main)",
        "import torch.multiprocessing as mp\nmp.set_start_method('spawn')\nmp.Process(target=main).start()",
        "from .torch.multiprocessing import spawn\nspawn(main)",
        "spawn(main)",
        "this is no Python",
        "\0",
        f"x = table{'.next()' * 500}",
    ],
)
def test_nothing_else_is_taken_for_it(source: str) -> None:
    assert line_of_spawn(source.encode()) is None
