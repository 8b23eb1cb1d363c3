"""The scripts of docs/tutorial.md and docs/guard.md run as they stand, and those that should train alike do."""

import os
import re
import shlex
import sys
from pathlib import Path

from job_results import LAUNCH
from warm_server import run_warm

from rollback.inspect.ring.at_url import ReadableRun
from rollback.inspect.ring.export import export

DOCS = Path(__file__).resolve().parents[2] / "docs"


def script(name: str, page: str = "tutorial.md") -> str:
    text = (DOCS / page).read_text()
    match = re.search(rf"<!-- {re.escape(name)} -->\n```python\n(.*?)```\n<!-- end -->", text, re.DOTALL)
    assert match, f"{page} has no {name}"
    return match[1]


def printed_by(path: Path, **environment: str) -> list[str]:
    environment = {**os.environ, "MAX_ITERS": "51", "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, path.name]
    result = run_warm(command, cwd=path.parent, env=environment, check=True, capture_output=True)
    return [line for line in result.stdout.splitlines() if line.startswith(("iter ", "epoch "))]


def write_the_tutorial_s_scripts(folder: Path) -> None:
    before = script("before.py")
    definitions = before[: before.index("torch.manual_seed(1337 + rank)")]
    (folder / "before.py").write_text(before)
    (folder / "after.py").write_text(definitions + script("after.py"))
    (folder / "nested.py").write_text(definitions + script("nested.py"))


def commands_of_the_tutorial() -> list[list[str]]:
    """The indented lines outside of its scripts and lists, in their order."""
    prose = re.sub(r"```python\n.*?```", "", (DOCS / "tutorial.md").read_text(), flags=re.DOTALL)
    commands = [shlex.split(line, comments=True) for line in re.findall(r"^    ((?:python|rollback) .*)$", prose, re.M)]
    programs = {"python": [sys.executable], "rollback": [sys.executable, "-m", "rollback"]}
    return [[*programs[program], *arguments] for program, *arguments in commands]


def test_the_tutorial_s_commands_run_in_their_order_in_one_directory(tmp_path: Path) -> None:
    write_the_tutorial_s_scripts(tmp_path)
    commands = commands_of_the_tutorial()
    assert [*LAUNCH, "--nproc"] in [command[: len(LAUNCH) + 1] for command in commands]
    for command in commands:
        environment = {**os.environ, "MAX_ITERS": "51", "OMP_NUM_THREADS": "1"}
        done = run_warm(command, cwd=tmp_path, env=environment, capture_output=True)
        assert done.returncode == 0, (command, done.stderr)


def test_the_tutorial_s_scripts_print_the_same_numbers(tmp_path: Path) -> None:
    write_the_tutorial_s_scripts(tmp_path)
    lines = printed_by(tmp_path / "before.py")
    assert [line.partition(":")[0] for line in lines] == ["iter 0", "iter 50"]
    assert printed_by(tmp_path / "after.py") == lines
    assert printed_by(tmp_path / "nested.py") == lines


def test_the_page_of_sharded_models_has_its_script_and_it_runs(tmp_path: Path) -> None:
    path = DOCS.parent / "scripts" / "examples" / "fsdp_lm.py"
    assert script("scripts/examples/fsdp_lm.py", "sharded.md") == path.read_text()
    command = [*LAUNCH, "--nproc", "2", str(path), "--steps", "4"]
    done = run_warm(command, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert "step 0: loss " in done.stdout
    exported = export(
        ReadableRun.at(tmp_path / "runs" / "fsdp_lm"), "final", tmp_path / "model.safetensors", max_shard_size=10**6
    )
    assert (exported.step, exported.files) == (4, 2)


def test_the_guide_s_script_runs_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "whole.py").write_text(script("whole.py", "guard.md"))
    lines = printed_by(tmp_path / "whole.py", EPOCHS="3")
    assert [line.split(" samples")[0] for line in lines] == [f"epoch {n}: {n * 3584}" for n in (1, 2, 3)]
    again = printed_by(tmp_path / "whole.py", EPOCHS="3")
    assert again == lines[-len(again) :], "from its last checkpoint to the same end"
