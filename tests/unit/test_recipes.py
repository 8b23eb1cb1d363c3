"""The recipes in launch/ name flags that exist, agree with our exit codes, and fit the published schemas."""

import importlib.util
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from rollback.cli import app
from rollback.errors import ExitCode

LAUNCH = Path(__file__).parents[2] / "launch"
RECIPES = sorted(path for path in LAUNCH.rglob("*") if path.is_file() and path.suffix not in (".md", ".pyc"))
MANIFESTS = sorted((LAUNCH / "kubernetes").glob("*.yaml"))
WANTS_A_PERSON = [ExitCode.USAGE, ExitCode.NO_CHECKPOINT, ExitCode.STRUCTURAL, ExitCode.UNFIT]


def name(path: Path) -> str:
    return str(path.relative_to(LAUNCH))


def flags_of_launch() -> set[str]:
    launch = get_command(app).commands["launch"]
    return {option for parameter in launch.params for option in (*parameter.opts, *parameter.secondary_opts)}


def words_after_launch(text: str) -> list[str]:
    """Words of every `rollback launch` in a file, up to its script; comments and continuation lines are seen to."""
    text = re.sub(r"^\s*#.*$", "", text, flags=re.M).replace("\\\n", " ")
    # A command in a list of YAML is one word a line.
    text = re.sub(r"\n\s*-\s+(?=\S)", " ", text)
    commands = re.findall(r"rollback launch\s+(.*?\.py|.*?\"\$@\")", text, flags=re.S)
    return [word for command in commands for word in re.split(r"[\s='\"]+", command)]


@pytest.mark.parametrize(
    "recipe", [path for path in RECIPES if path.name != "runtime.yaml" and path.suffix != ".py"], ids=name
)
def test_every_flag_in_a_recipe_exists(recipe: Path) -> None:
    used = [word for word in words_after_launch(recipe.read_text()) if re.fullmatch(r"--[a-z][a-z-]*", word)]
    assert {"--run", "--grace"} & set(used), f"no command was found in {recipe}"
    assert set(used) <= flags_of_launch()


def test_a_flag_that_does_not_exist_would_be_found() -> None:
    text = 'x\n  - rollback\n  - launch\n  - --run=/a\n  - train.py\nrollback launch --nprocs 2 \\\n  --grace 1 "$@"\n'
    assert words_after_launch(text) == ["--run", "/a", "train.py", "--nprocs", "2", "--grace", "1", "$@", ""]


@pytest.mark.parametrize("script", [path for path in RECIPES if path.suffix in (".sbatch", "")], ids=name)
def test_shell_scripts_parse(script: Path) -> None:
    assert script.read_text().startswith("#!/bin/bash\n")
    subprocess.run(["bash", "-n", str(script)], check=True)


SLURM = [("one-node", "rollback"), ("many-nodes", "srun")]


class SlurmJob:
    """A recipe whose supervisor ends at once, in a Slurm that is played."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.asked = folder, folder / "asked"

    def run(self, recipe: str, started: str, code: int, state: str = "RUNNING None", **variables: str) -> str:
        """What Slurm is then asked for."""
        programs = {started: f"exit {code}", "scontrol": f'echo "$@" >> {self.asked}', "squeue": f'echo "{state}"'}
        for program, does in programs.items():
            (self.folder / program).write_text(f"#!/bin/bash\n{does}\n")
            (self.folder / program).chmod(0o755)
        # Where the script sets its traps, what it has started is over.
        trap = "() { while [[ -e /proc/${supervisor:-$srun} ]]; do :; done; }"
        environment = {"PATH": f"{self.folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "BASH_FUNC_trap%%": trap}
        words = ["/bin/bash", str(LAUNCH / "slurm" / f"{recipe}.sbatch"), "train.py"]
        done = subprocess.run(
            words, check=False, env={**environment, **variables}, capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stderr) == (code, "")
        return self.asked.read_text() if self.asked.exists() else ""


@pytest.mark.parametrize("code", [ExitCode.RESUMABLE, ExitCode.USAGE])
@pytest.mark.parametrize(("recipe", "started"), SLURM)
def test_a_job_of_slurm_that_ends_at_once_has_its_exit_code(
    recipe: str, started: str, code: ExitCode, tmp_path: Path
) -> None:
    asked = SlurmJob(tmp_path).run(recipe, started, code)
    assert ("requeue 7\n" in asked) is (code == ExitCode.RESUMABLE)


@pytest.mark.parametrize(("recipe", "started"), SLURM)
def test_a_job_of_slurm_that_somebody_cancels_does_not_come_back_and_one_at_its_time_limit_does(
    recipe: str, started: str, tmp_path: Path
) -> None:
    """Slurm sends SIGTERM to all of a job that is cancelled, so the ranks save, and the code is that of any stop."""
    job = SlurmJob(tmp_path)
    assert "requeue" not in job.run(recipe, started, ExitCode.RESUMABLE, "COMPLETING None")
    assert "requeue 7\n" in job.run(recipe, started, ExitCode.RESUMABLE, "COMPLETING TimeLimit")


@pytest.mark.parametrize(("recipe", "started"), SLURM)
def test_a_task_of_an_array_requeues_itself_alone(recipe: str, started: str, tmp_path: Path) -> None:
    """The last task has the number of the array for its own, and by that number Slurm requeues all of them."""
    array = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    asked = SlurmJob(tmp_path).run(recipe, started, ExitCode.RESUMABLE, **array)
    assert "requeue 7_3\n" in asked


def test_more_spares_than_hosts_start_nothing() -> None:
    words = ["/bin/bash", str(LAUNCH / "bare" / "many-hosts"), "one", "two", "--", "train.py"]
    # With no PATH there is no ssh to start anything by.
    done = subprocess.run(words, check=False, env={"SPARES": "2", "PATH": ""}, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "many-hosts: 2 hosts and SPARES=2 leave none that trains\n"


def test_many_hosts_meet_at_the_first_one_whoever_logs_in_there(tmp_path: Path) -> None:
    (tmp_path / "ssh").write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    (tmp_path / "ssh").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    words = ["/bin/bash", str(LAUNCH / "bare" / "many-hosts"), "me@one", "two", "--", "train.py"]
    done = subprocess.run(words, check=True, env=environment, capture_output=True, text=True, timeout=60)
    assert [line for line in done.stdout.splitlines() if line in ("me@one", "two")] == ["me@one", "two"]
    assert set(re.findall(r"--rdzv-endpoint\W+(\S+?:\d+)", done.stdout)) == {"one:29400"}


@pytest.mark.parametrize("manifest", MANIFESTS, ids=name)
def test_manifests_fit_the_published_schemas(manifest: Path) -> None:
    """What the models do not know they drop, so a manifest must come back as it went in."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    body = yaml.safe_load(manifest.read_text())
    kinds = {
        "TrainJob": models.TrainerV1alpha1TrainJob,
        "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
        "JobSet": models.JobsetV1alpha2JobSet,
    }
    model = kinds[body["kind"]]
    assert model.from_dict(body).to_dict() == body
    broken = yaml.safe_load(manifest.read_text().replace("metadata:", "metadatas:", 1))
    assert model.from_dict(broken).to_dict() != broken


@pytest.mark.parametrize("manifest", [path for path in MANIFESTS if path.name != "trainjob.yaml"], ids=name)
def test_the_pod_failure_policy_follows_our_exit_codes(manifest: Path) -> None:
    (job,) = every(yaml.safe_load(manifest.read_text()), "podFailurePolicy")
    rules = job["podFailurePolicy"]["rules"]
    by_code = {code: rule["action"] for rule in rules for code in rule.get("onExitCodes", {}).get("values", [])}
    assert by_code == {ExitCode.RESUMABLE: "Ignore", **dict.fromkeys(WANTS_A_PERSON, "FailJob")}
    pod = job["template"]["spec"]
    assert {rule["onExitCodes"]["containerName"] for rule in rules if "onExitCodes" in rule} == {
        container["name"] for container in pod["containers"]
    }
    # The order of rules counts: what was told to stop by an eviction exits with 75 or is a disruption.
    assert [rule["action"] for rule in rules] == ["Ignore", "Ignore", "FailJob"]
    assert pod["restartPolicy"] == "Never"  # else exit codes are not looked at
    commands = [words_after_launch(path.read_text()) for path in MANIFESTS]
    graces = [float(command[command.index("--grace") + 1]) for command in commands if command]
    assert len(graces) == 3
    assert pod["terminationGracePeriodSeconds"] > max(graces)


def test_the_systemd_unit_follows_our_exit_codes() -> None:
    text = (LAUNCH / "bare" / "rollback-train.service").read_text()
    unit = dict(line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith("#"))
    assert unit["RestartPreventExitStatus"].split() == [str(int(code)) for code in WANTS_A_PERSON]
    assert unit["RestartForceExitStatus"] == str(int(ExitCode.RESUMABLE))
    command = shlex.split(unit["ExecStart"])
    assert float(unit["TimeoutStopSec"]) > float(command[command.index("--grace") + 1])


def test_slurm_warns_early_enough_for_the_grace() -> None:
    for recipe in (LAUNCH / "slurm").glob("*.sbatch"):
        text = recipe.read_text()
        warned = int(re.search(r"--signal=B:USR1@(\d+)", text)[1])  # type: ignore[index]
        words = words_after_launch(text)
        assert warned > float(words[words.index("--grace") + 1]), recipe
        assert f"status == {int(ExitCode.RESUMABLE)}" in text


@pytest.mark.parametrize("recipe", sorted((LAUNCH / "skypilot").glob("*.yaml")), ids=name)
def test_the_skypilot_task_fits_skypilot_s_schema(recipe: Path) -> None:
    task = yaml.safe_load(recipe.read_text())
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [ExitCode.RESUMABLE]
    if importlib.util.find_spec("sky") is None:
        pytest.skip("SkyPilot is not installed, which brings half a gigabyte; `pip install skypilot` to try its schema")
    import jsonschema
    from sky.utils import schemas

    jsonschema.validate(task, schemas.get_task_schema())
    jsonschema.validate(task["resources"], schemas.get_resources_schema())


def every(tree: Any, key: str) -> list[dict[str, Any]]:
    """The mappings in a tree that have a key."""
    below = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else []
    found = [mapping for branch in below for mapping in every(branch, key)]
    return [tree, *found] if isinstance(tree, dict) and key in tree else found
