"""The scripts of scripts/examples run as they stand, alike with their guard and without it; the documents have them."""

import os
import re
import sys
from pathlib import Path

import pytest
from toy import facts
from trainer_job import LIMIT, MODULES
from warm_server import ENV_MODULES, run_torch_alone, run_warm

from rollback.facts.training import Finished

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "scripts" / "examples"
PAGES = {"huggingface_lm.py": "huggingface.md", "accelerate_lm.py": "accelerate.md", "lightning_lm.py": "lightning.md"}
OTHERS = {"plain_ddp.py": "adopt.md", "torchtitan_lm.py": "torchtitan.md"}


def printed_by(script: Path, folder: Path, *arguments: str) -> str:
    """The last line that it printed."""
    done = run_warm(
        [sys.executable, str(script), *arguments], timeout=LIMIT, cwd=folder, capture_output=True,
        env={**os.environ, ENV_MODULES: MODULES, "PYTHONPATH": str(EXAMPLES)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize("name", PAGES)
def test_an_example_trains_as_without_the_lines_that_protect_it(tmp_path: Path, name: str) -> None:
    lines = (EXAMPLES / name).read_text().splitlines(keepends=True)
    own = [line for line in lines if "rollback" in line]
    assert len(own) == 2  # the import is one of them
    bare = tmp_path / f"bare_{name}"
    bare.write_text("".join(line for line in lines if line not in own))
    (tmp_path / "bare").mkdir()
    protected = printed_by(EXAMPLES / name, tmp_path, "--epochs", "1")
    assert protected == printed_by(bare, tmp_path / "bare", "--epochs", "1")
    (end,) = facts(tmp_path / "runs" / Path(name).stem, Finished)
    assert name != "huggingface_lm.py" or end.by == f"the Trainer's {end.step} steps"


@pytest.mark.soak
@pytest.mark.parametrize("arguments", [[], ["--lora"]], ids=["whole", "lora"])
def test_the_example_of_trl_runs(tmp_path: Path, arguments: list[str]) -> None:
    assert "loss of the last 10 steps" in printed_by(EXAMPLES / "trl_sft.py", tmp_path, "--epochs", "1", *arguments)
    assert facts(tmp_path / "runs" / "trl_sft", Finished)


def test_the_plain_example_is_adopted_and_trains_as_by_itself(tmp_path: Path) -> None:
    script = EXAMPLES / "plain_ddp.py"
    command = [sys.executable, "-m", "rollback", "launch", "--adopt=strict", str(script), "--epochs", "2"]
    done = run_warm(command, capture_output=True, timeout=LIMIT, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    plain = [sys.executable, "-m", "torch.distributed.run", "--standalone", str(script), "--epochs", "2"]
    alone = run_torch_alone(plain, capture_output=True, timeout=LIMIT, check=True, cwd=tmp_path)
    assert done.stdout == alone.stdout
    assert facts(tmp_path / "runs" / "plain_ddp", Finished)


@pytest.mark.parametrize("name", [*PAGES, *OTHERS])
def test_the_page_has_the_script_as_it_is(name: str) -> None:
    page = (ROOT / "docs" / "trainers" / {**PAGES, **OTHERS}[name]).read_text()
    found = re.search(rf"<!-- scripts/examples/{name} -->\n```python\n(.*?)```\n<!-- end -->", page, re.DOTALL)
    assert found is not None
    assert found[1] == (EXAMPLES / name).read_text()
