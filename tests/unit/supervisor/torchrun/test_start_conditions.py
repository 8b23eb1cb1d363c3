"""What an attempt is started with: what differs from the last start is told, and nothing that is secret is kept."""

from pathlib import Path
from typing import Any

import pytest

from rollback.facts.training import AttemptStarted
from rollback.supervisor.torchrun.command import LaunchedJob
from rollback.supervisor.torchrun.start_conditions import conditions_of, differences, redacted


def start(
    folder: Path, arguments: str = "", environment: dict[str, str] | None = None, text: str = "train()"
) -> AttemptStarted:
    script = folder / "train.py"
    script.write_text(text)
    conditions = conditions_of(LaunchedJob({}, str(script), arguments.split()), environment or {})
    return AttemptStarted(command=(), host="h", pid=1, **conditions)


def changes(before: AttemptStarted | None, now: AttemptStarted) -> tuple[str, ...]:
    return differences(before, now)


def test_the_same_start_differs_in_nothing(tmp_path: Path) -> None:
    one = start(tmp_path, "--lr 3e-4 --amp data", {"OMP_NUM_THREADS": "4", "HOME": "/root"})
    other = start(tmp_path, "--lr 3e-4 --amp data", {"OMP_NUM_THREADS": "4", "HOME": "/elsewhere"})
    assert changes(one, other) == ()
    assert changes(None, other) == ()


def test_a_start_on_record_without_conditions_is_not_compared(tmp_path: Path) -> None:
    assert changes(AttemptStarted(command=("torchrun",), host="h", pid=1), start(tmp_path, "--lr 1")) == ()


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        ("--lr 3e-4", "--lr=1e-3", "argument --lr: 3e-4 -> 1e-3"),
        ("", "--warmup 10", "argument --warmup: not given -> 10"),
        ("--amp", "", "argument --amp: given -> not given"),
        ("model.width=8", "model.width=16", "argument model.width: 8 -> 16"),
        ("here 5", "there 5", "argument 1: here -> there"),
        ("--shift -3 --x", "--shift -4 --x", "argument --shift: -3 -> -4"),
        ("--lr 1 --lr 2", "--lr 1", "argument --lr: 1 2 -> 1"),
    ],
)
def test_other_arguments_are_told(tmp_path: Path, before: str, now: str, told: str) -> None:
    assert changes(start(tmp_path, before), start(tmp_path, now)) == (told,)


@pytest.mark.parametrize(
    ("name", "before", "now", "told"),
    [
        ("CUDA_VISIBLE_DEVICES", "0,1", "2,3", "CUDA_VISIBLE_DEVICES: 0,1 -> 2,3"),
        ("OMP_NUM_THREADS", None, "8", "OMP_NUM_THREADS: not set -> 8"),
        ("NCCL_ALGO", "Ring", None, "NCCL_ALGO: Ring -> not set"),
        ("CUBLAS_WORKSPACE_CONFIG", ":4096:8", ":16:8", "CUBLAS_WORKSPACE_CONFIG: :4096:8 -> :16:8"),
        ("ROLLBACK_FAST_TIER", None, "off", "ROLLBACK_FAST_TIER: not set -> off"),
        ("HOME", "/a", "/b", None),
        ("TORCH_HUB_TOKEN", "abcdefgh", "hgfedcba", None),
    ],
)
def test_other_environment_is_told_where_it_matters(
    tmp_path: Path, name: str, before: str | None, now: str | None, told: str | None
) -> None:
    one, other = ({} if value is None else {name: value} for value in (before, now))
    assert changes(start(tmp_path, "", one), start(tmp_path, "", other)) == ((told,) if told else ())


def test_other_flags_are_told_where_they_say_what_runs_and_both_starts_have_them_on_record() -> None:
    def start_with(flags: dict[str, str | bool], *runner: str) -> AttemptStarted:
        conditions = conditions_of(LaunchedJob(flags, "a.py", [], runner=runner), {})
        return AttemptStarted(command=(), host="h", pid=1, **conditions)

    one = start_with({"nproc-per-node": "2", "logs-specs": "rollback-streams", "log-dir": "/tmp/of-that-attempt"})
    other = start_with({"nproc-per-node": "4", "module": True, "rdzv-endpoint": "h:1"}, "script.py", "notice")
    told = "--adopt: not given -> notice", "--module: not given -> given", "--nproc-per-node: 2 -> 4"
    assert changes(one, other) == told
    assert changes(one.model_copy(update={"flags": None}), other) == ()


def test_another_content_of_the_script_is_told(tmp_path: Path) -> None:
    assert changes(start(tmp_path), start(tmp_path, text="train(1)")) == ("the script has other content",)


def test_a_module_is_found_without_being_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "package" / "train.py").write_text("one")
    job = LaunchedJob({"module": True}, "package.train", [])
    before = conditions_of(job, {})["script"]
    (tmp_path / "package" / "train.py").write_text("two")
    assert None is not before != conditions_of(job, {})["script"]


def test_what_cannot_be_read_is_not_known(tmp_path: Path) -> None:
    assert conditions_of(LaunchedJob({}, str(tmp_path / "missing.py"), []), {})["script"] is None
    assert conditions_of(LaunchedJob({}, str(tmp_path), []), {})["script"] is None


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        ("--hf-token abc --lr 1", "--hf-token *** --lr 1"),
        ("--hf_token=abc", "--hf_token=***"),
        ("--apiKey abc", "--apiKey ***"),
        ("wandb.api_key=abc", "wandb.api_key=***"),
        ("--password=a=b", "--password=***"),
        ("--secret-id 5", "--secret-id ***"),
        ("--use-token --lr 1", "--use-token --lr 1"),
        ("--tokenizer gpt2 --max-tokens 512 --key-dim 64", "--tokenizer gpt2 --max-tokens 512 --key-dim 64"),
        ("hf_abcdefghijkl", "***"),
        ("--data=https://me:word@host/x", "--data=https://***@host/x"),
        ("--login hf_abcdefghijkl", "--login ***"),
    ],
)
def test_what_looks_like_a_secret_is_not_kept(arguments: str, kept: str) -> None:
    assert " ".join(redacted(arguments.split())) == kept


def test_a_secret_is_nowhere_in_what_is_journalled(tmp_path: Path) -> None:
    environment: dict[str, Any] = {"NCCL_NET_PASSWORD": "sesame", "CUDA_VISIBLE_DEVICES": "0"}
    assert "sesame" not in start(tmp_path, "--db-password sesame --api-key=sesame", environment).model_dump_json()
