"""The command line's contract: messages, exit codes, what is read from flags, and what is not imported."""

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from job_results import LAUNCH
from selection import by_default, soak
from typer.testing import CliRunner
from warm_server import run_warm

import rollback
from recorded_run import RecordedRun
from rollback import cli
from rollback.cli.launch import closing_line
from rollback.cli.options.settings import read_settings
from rollback.config import PresetName, Settings
from rollback.errors import ExitCode, RunDirectoryError, ScriptRefused, UsageError
from rollback.facts.training import AttemptStarted, SampleQuarantine, SkipAdded, Window
from rollback.rundir.journal.journal import Journal
from rollback.rundir.paths import RunPaths
from rollback.rundir.requests import names
from rollback.rundir.seal import ENV_SEAL
from rollback.supervisor.diagnosis.hang import HangLimits
from rollback.supervisor.nodes.protocol import RecordPlace, RunResult
from rollback.supervisor.preflight import default_run, require_script
from rollback.supervisor.signals import StopSignals
from rollback.supervisor.torchrun.command import LaunchOptions
from rollback.supervisor.torchrun.flags import FLAGS
from rollback.terminal.messages import printable, printable_lines, show_error


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[LaunchOptions]:
    """What `rollback launch` would have carried out; the folder has a train.py."""
    taken: list[LaunchOptions] = []

    def take(options: LaunchOptions, *_: object) -> RunResult:
        taken.append(options)
        return RunResult(exit_code=ExitCode.DONE, reason="")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.modules["rollback.cli.launch"], "supervise", take)
    Path("train.py").write_text("raise SystemExit")
    return taken


@pytest.mark.parametrize(
    "words", ["launch --run RUN train.py", "status RUN", "why RUN", "audit RUN", "stop RUN", "ring pin RUN newest"]
)
def test_a_run_directory_that_this_user_may_not_read_is_no_wrong_use(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    # Tests may run as root, whom permissions do not stop.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != run)
    # A launch is the last thing that its process does; this one has other tests to run, with signals of their own.
    monkeypatch.setattr(StopSignals, "ignored_from_its_end_on", lambda _: contextlib.nullcontext())
    done = CliRunner().invoke(cli.app, words.replace("RUN", str(run)).split())
    assert isinstance(done.exception, RunDirectoryError), done.output
    assert done.exception.exit_code == ExitCode.IO


def test_a_stop_while_an_adopted_script_is_refused_is_one_for_the_launch_without_protection_too(
    launches: list[LaunchOptions], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(options: LaunchOptions, *_: object) -> RunResult:
        assert not launches, "started once more"
        launches.append(options)
        signal.raise_signal(signal.SIGTERM)
        raise ScriptRefused("two loaders", hint="one will do")

    monkeypatch.setattr(sys.modules["rollback.cli.launch"], "supervise", refuse)
    assert run(monkeypatch, "launch", "--adopt", "train.py") == ExitCode.RESUMABLE
    assert "told to stop before the script was started without protection" in capsys.readouterr().err


@pytest.mark.parametrize("late", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_that_comes_when_all_is_over_leaves_the_exit_code_as_it_is(
    tmp_path: Path, late: signal.Signals
) -> None:
    (tmp_path / "train.py").touch()
    program = f"""
import atexit, os, signal, sys
from rollback import cli
launch = sys.modules["rollback.cli.launch"]
stopped = launch.RunResult(exit_code=75, reason="SIGUSR1")
launch.supervise = lambda options, audience, signals: stopped
atexit.register(os.kill, os.getpid(), {int(late)})
sys.argv = ["rollback", "launch", "train.py"]
cli.main()
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=False, capture_output=True, text=True)
    assert done.returncode == ExitCode.RESUMABLE, done.stderr


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["rollback", *arguments])
    with StopSignals(), pytest.raises(SystemExit) as ended:  # it leaves them ignored
        cli.main()
    return int(ended.value.code or 0)


def test_where_a_run_directory_is_expected_a_url_is_told_from_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for given, is_url in [("s3://bucket/run", True), ("runs/train", False)]:
        assert run(monkeypatch, "status", given) == ExitCode.USAGE
        assert ("`rollback ring list`" in capsys.readouterr().err) == is_url


class TestFrame:
    def test_help_and_commands_do_not_import_torch(self) -> None:
        code = (
            "import sys, rollback.cli, rollback.supervisor.supervise, rollback.agent.entry\n"
            "sys.argv = ['rollback', '--help']\n"
            "try: rollback.cli.main()\n"
            "except SystemExit: pass\n"
            "print('TORCH' if 'torch' in sys.modules else 'FREE')"
        )
        output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        assert output.splitlines()[-1] == "FREE"
        for command in ("launch", "status", "audit", "backtest"):
            assert command in output

    @pytest.mark.parametrize(
        "interrupted",
        [
            "import builtins\n"
            "ordinary = builtins.__import__\n"
            "def interrupted(name, *more, **others):\n"
            "    if name == 'typer': raise KeyboardInterrupt\n"
            "    return ordinary(name, *more, **others)\n"
            "builtins.__import__ = interrupted\n",
            "import typer.main\n"
            "def interrupted(*_, **__): raise KeyboardInterrupt\n"
            "typer.main.get_command = interrupted\n",
        ],
        ids=["imported", "made"],
    )
    def test_ctrl_c_while_the_commands_are_imported_or_made_ends_without_a_traceback(self, interrupted: str) -> None:
        code = f"{interrupted}import runpy\nrunpy.run_module('rollback', run_name='__main__')"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (130, "", "")

    def test_version(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        assert run(monkeypatch, "--version") == 0
        assert capsys.readouterr().out == f"rollback {rollback.__version__}\n"

    def test_an_error_for_the_reader_is_one_message_on_stderr(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def fail() -> None:
            raise RunDirectoryError("reading \x1b[31mx: torn", hint="look at it")

        monkeypatch.setattr(cli, "app", fail)
        assert run(monkeypatch) == ExitCode.IO
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err == "rollback: error: reading \\x1b[31mx: torn\n  hint: look at it\n"

    @pytest.mark.parametrize(("script", "why"), [("nope.py", "No such file or directory"), (".", "Is a directory")])
    def test_a_script_that_cannot_be_read_is_refused_in_words(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], script: str, why: str
    ) -> None:
        assert run(monkeypatch, "adopt", script) == ExitCode.USAGE
        assert f"the training script {script} cannot be read: {why}\n  hint: " in capsys.readouterr().err

    def test_a_script_in_what_is_no_encoding_of_text_is_refused_in_words(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        (tmp_path / "train.py").write_text("# coding: hex\n")
        assert run(monkeypatch, "adopt", str(tmp_path / "train.py")) == ExitCode.USAGE
        assert "train.py cannot be read: 'hex' is not a text encoding" in capsys.readouterr().err

    def test_a_script_without_end_is_refused(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run(monkeypatch, "adopt", "/dev/zero") == ExitCode.USAGE
        assert "/dev/zero has more than 64 MiB: it is no training script" in capsys.readouterr().err

    def test_what_a_written_guard_will_not_know_is_named_beside_the_diff(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        script = tmp_path / "train.py"
        script.write_text(SCRIPT.replace("    loss.backward()", "    (loss * tau).backward()\n    tau *= 0.9"))
        assert run(monkeypatch, "adopt", str(script)) == 0
        told = capsys.readouterr()
        assert "guard.observe" in told.out
        assert "iteration to iteration what a guard does not know: `tau` (line" in told.err
        assert "guard.keep" in told.err

    def test_where_a_script_leaves_a_written_guards_loop_is_named_beside_the_diff(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        script = tmp_path / "train.py"
        script.write_text(SCRIPT.replace("    loss.backward()", "    loss.backward()\n    if loss < 1: break"))
        assert run(monkeypatch, "adopt", str(script)) == 0
        told = capsys.readouterr()
        assert "guard.finish" not in told.out
        assert "leaves its training by itself (line" in told.err
        assert '`if guard.finish("enough"): break`' in told.err

    def test_what_a_terminal_would_obey_is_shown_and_not_sent(self) -> None:
        assert printable("naïve\nβ\x07\x9b\u202e") == "naïve\\nβ\\x07\\x9b\\u202e"
        assert printable_lines("naïve\nβ\x07") == "naïve\nβ\\x07"

    @pytest.mark.parametrize(("name", "value"), [("TERM", "xterm"), ("TERM", "dumb"), ("NO_COLOR", "1")])
    def test_an_error_is_red_on_a_terminal_that_knows_colours(
        self, monkeypatch: pytest.MonkeyPatch, name: str, value: str
    ) -> None:
        terminal = io.StringIO()
        monkeypatch.setattr(terminal, "isatty", lambda: True)
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.delenv("NO_COLOR", raising=False)
        monkeypatch.setenv(name, value)
        show_error(RunDirectoryError("reading x: torn"))
        assert ("\x1b" in terminal.getvalue()) == (value == "xterm")

    def test_the_answer_of_a_backtest_has_lines(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        log = tmp_path / "log.csv"
        log.write_text("step,loss\n" + "".join(f"{step},{3 - step / 100}\n" for step in range(100)))
        assert run(monkeypatch, "backtest", str(log)) == 0
        told = capsys.readouterr().out
        assert len(told.splitlines()) > 3
        assert "\\n" not in told


SCRIPT = """\
import torch
from torch.utils.data import DataLoader

model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters())
loader = DataLoader(range(8))
for batch in loader:
    loss = model(batch).sum()
    loss.backward()
    optimizer.step()
"""
FULL = Path("/dev/full")
ANSWERS = [
    "--version",
    "status run",
    "status run --json",
    "audit run",
    "audit run --format csv",
    "drill --list",
    "adopt train.py",
    "backtest log.csv",
]
FOR_READERS = ["status run", "audit run", "adopt train.py", "backtest log.csv"]
"""Only these have more than ASCII."""
EACH_WAY = ["--version", "status run --json", "audit run", "audit run --format csv"]
"""One of each way to write an answer. A full disk is met by all."""


class TestAnswersThatCannotBeWritten:
    @pytest.fixture
    def recorded(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RecordedRun:
        monkeypatch.chdir(tmp_path)
        Path("train.py").write_text(SCRIPT)
        Path("log.csv").write_text("step,loss\n" + "".join(f"{step},2.5\n" for step in range(300)))
        recorded = RecordedRun(tmp_path / "run", monkeypatch)
        recorded.tell(0, AttemptStarted(command=("torchrun", "train.py"), host="node1", pid=4000))
        recorded.attach(2, 1, None, 0)
        recorded.judge(0, 49)
        recorded.pass_over(50, 100, 101)
        return recorded

    def answer(self, words: str, stdout: int, *, at_once: bool = False) -> tuple[int, str]:
        """Exit code and stderr. at_once: each line is written by itself, not all of them at the end."""
        command = [sys.executable, *(["-u"] if at_once else []), "-m", "rollback", *words.split()]
        cold = words == "audit run"  # how Python itself ends with what it could not write
        told = (subprocess.run if cold else run_warm)(command, stdout=stdout, stderr=subprocess.PIPE, text=True)
        return told.returncode, told.stderr

    @pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
    @pytest.mark.parametrize(
        "words", [*ANSWERS, "status run --watch", "--help", "launch --help", *soak("audit -h", "ring --help")]
    )
    @pytest.mark.usefixtures("recorded")
    def test_an_answer_to_a_full_disk_is_one_error_in_words(self, words: str) -> None:
        with FULL.open("w") as full:
            assert self.answer(words, full.fileno(), at_once="--json" in words) == (
                ExitCode.IO,
                "rollback: error: writing the answer to stdout: No space left on device\n"
                "  hint: check the free space there, and give the command again\n",
            )

    @pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
    def test_of_an_order_whose_answer_cannot_be_written_it_is_said_that_it_stands(self, recorded: RecordedRun) -> None:
        with FULL.open("w") as full:
            code, err = self.answer("skip run --sample 3 --json", full.fileno())
        assert code == ExitCode.IO
        (request,) = names(recorded.paths)
        assert f"hint: the order stands: request {request}: it will be carried out when the run" in err

    @pytest.mark.parametrize(
        "words", [*by_default(ANSWERS, *EACH_WAY), "status run --watch", *soak("audit run --format jsonl")]
    )
    @pytest.mark.usefixtures("recorded")
    def test_without_a_stdout_nothing_is_answered_and_nothing_is_wrong(self, words: str) -> None:
        closed = f"exec {sys.executable} -m rollback {words} >&-"
        told = subprocess.run(["sh", "-c", closed], stderr=subprocess.PIPE, text=True, check=False)
        assert (told.returncode, told.stderr) == (0, "")

    @pytest.mark.parametrize("words", [*by_default(ANSWERS, *FOR_READERS), "status run --watch", "launch --help"])
    @pytest.mark.usefixtures("recorded")
    def test_what_an_encoding_lacks_ends_no_answer(self, words: str) -> None:
        """As in a container or a job of cron without a locale: a plot, an ellipsis in a narrow table."""
        poor = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "COLUMNS": "20"}
        command = [sys.executable, "-m", "rollback", *words.split()]
        told = subprocess.run(command, env=poor, capture_output=True, check=False)
        assert (told.returncode, told.stderr) == (0, b"")
        assert told.stdout.isascii()

    @pytest.mark.parametrize("words", ["status", "why", "audit", "ring list"])
    def test_a_directory_whose_name_is_no_utf_8_is_named_so_that_it_is_found(
        self, words: str, recorded: RecordedRun
    ) -> None:
        odd = recorded.paths.root.with_name(os.fsdecode(b"r\xffn \x7f"))
        recorded.paths.root.rename(odd)
        told = CliRunner().invoke(cli.app, [*words.split(), str(odd), "--json"], catch_exceptions=False)
        answer = json.loads(told.stdout)
        assert told.stdout.isascii()
        assert "\x7f" not in told.stdout
        assert (answer.get("directory") or answer["run"]["directory"]) == str(odd)

    @pytest.mark.parametrize("words", [*by_default(ANSWERS, *EACH_WAY), "status run --watch", "launch --help"])
    @pytest.mark.usefixtures("recorded")
    def test_a_reader_that_has_gone_away_has_had_enough(self, words: str) -> None:
        """`| head -1`, under `set -o pipefail` or with the exit code looked at."""
        read, write = os.pipe()
        os.close(read)
        try:
            assert self.answer(words, write, at_once="--json" in words) == (0, "")
        finally:
            os.close(write)


class TestLaunchFlags:
    def test_a_command_line_in_full(self, launches: list[LaunchOptions], monkeypatch: pytest.MonkeyPatch) -> None:
        words = "launch --nproc 2 --rdzv_id=x -r3 --grace 5 --restart_budget 3 --policy palm --retry-first --keep=4"
        assert (
            run(monkeypatch, *words.split(), "--skip", "9:12", "--skip=1:2", "train.py", "--keep", "-h", "--a_b") == 0
        )
        (options,) = launches
        assert options.paths.root == Path("runs/train")
        assert options.job.flags == {"nproc-per-node": "2", "rdzv-id": "x", "redirects": "3"}
        assert options.job.script == "train.py"
        assert options.job.arguments == ["--keep", "-h", "--a_b"]
        assert options.restart_budget == 3
        assert options.grace == 5.0
        assert json.loads(options.settings.model_dump_json(exclude_unset=True)) == {
            "policy": "palm",
            "retry_first": True,
            "keep": 4,
            "skip": [{"first": 1, "last": 2}, {"first": 9, "last": 12}],
        }

    def test_nothing_is_set_that_was_not_given(
        self, launches: list[LaunchOptions], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run(monkeypatch, "launch", "train.py")
        assert launches[0].settings.model_dump(exclude_unset=True) == {}
        assert launches[0].job.flags == {}
        assert launches[0].restart_budget == 10
        assert launches[0].grace == 60.0
        assert not launches[0].expects_guard

    @pytest.mark.parametrize("flag", ["--run=x", "--restart-budget=3", "--policy=palm", "--tensorboard=x", "--keep=4"])
    def test_a_flag_that_concerns_a_guard_says_that_there_is_one(
        self, launches: list[LaunchOptions], monkeypatch: pytest.MonkeyPatch, flag: str
    ) -> None:
        run(monkeypatch, "launch", flag, "train.py")
        run(monkeypatch, "launch", "--grace=3", "--hang-after=9", "--max-restarts=3", "--no-preload", "train.py")
        assert [options.expects_guard for options in launches] == [True, False]

    @pytest.mark.parametrize(("words", "said"), [(["train.py"], True), (["--no-python", "./train.py"], False)])
    def test_a_script_that_starts_its_ranks_by_itself_is_told_what_comes_of_that(
        self, launches: list[LaunchOptions], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
        words: list[str], said: bool,
    ) -> None:  # fmt: skip
        Path("train.py").write_text("import torch.multiprocessing as mp\nmp.spawn(print, nprocs=2)")
        Path("train.py").chmod(0o700)
        assert run(monkeypatch, "launch", *words) == ExitCode.DONE
        told = "train.py, line 2, starts ranks by itself, as processes below its own: what they train is not protected."
        assert (told in capfd.readouterr().err) is said
        assert len(launches) == 1

    def test_a_limit_is_switched_off_by_the_word_for_it_and_what_is_no_limit_is_refused(
        self, launches: list[LaunchOptions], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        run(monkeypatch, "launch", "--stall-after", "off", "--hang-after", "off", "train.py")
        run(monkeypatch, "launch", "--stall-after", "9", "train.py")
        assert [options.hang for options in launches] == [HangLimits(None, None), HangLimits("auto", 9.0)]
        for flag, words in (("--stall-after", "off"), ("--hang-after", "auto, off,")):
            for text in ("auto!", "0", "nan"):
                assert run(monkeypatch, "launch", flag, text, "train.py") == ExitCode.USAGE
                said = capfd.readouterr().err
                assert f"{flag}: '{text}' is neither {words} nor a number of seconds" in said

    def test_torchruns_restarts_become_the_budget(
        self, launches: list[LaunchOptions], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run(monkeypatch, "launch", "--max-restarts", "4", "train.py")
        monkeypatch.setenv("PET_MAX_RESTARTS", "7")
        run(monkeypatch, "launch", "train.py")
        assert [options.restart_budget for options in launches] == [4, 7]
        assert [options.job.max_restarts for options in launches] == [4, 7]
        run(monkeypatch, "launch", "--restart-budget", "9", "train.py")
        assert (launches[2].restart_budget, launches[2].job.max_restarts) == (9, 7)

    def test_help_has_every_setting_and_every_flag_of_torchrun_with_what_it_means(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("COLUMNS", "250")
        monkeypatch.setenv("TERMINAL_WIDTH", "250")
        assert run(monkeypatch, "launch", "--help") == 0
        lines = capsys.readouterr().out.splitlines()

        def line_of(flag: str) -> str:
            return next(line for line in lines if re.search(rf"^│ {flag}[ ,]", line))

        for name, field in Settings.model_fields.items():
            assert str(field.description) in line_of(f"--{name.replace('_', '-')}")
        for flag in FLAGS:
            assert flag.help in line_of(flag.option)
        assert " | ".join(get_args(PresetName)) in line_of("--policy")
        assert "(default: auto)" in line_of("--snapshot-every")

    def test_the_lines_of_a_helps_paragraphs_are_filled(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("COLUMNS", "250")
        assert run(monkeypatch, "drill", "--help") == 0
        assert "trackers and the like): leave these out" in capsys.readouterr().out


class TestLaunchMistakes:
    @pytest.mark.parametrize(
        ("words", "told"),
        [
            (["missing.py"], "there is no training script 'missing.py'"),
            (["."], ". is a directory without a __main__.py"),
            ([""], "there is no training script ''"),
            (["/dev/null"], "/dev/null is a pipe or a device, not a training script"),
            (["--module", "--no-python", "train"], "--module and --no-python exclude each other"),
            (["--log", "x", "train.py"], "--log is ambiguous: it could be --log-dir, --log-line-"),
            (["-m", "no_such_module.train"], "there is no module 'no_such_module'"),
            (["--no-python", "no-such-program"], "there is no program 'no-such-program' on PATH"),
            (["accelerate", "launch", "train.py"], "leave accelerate and its flags out: rollback launch --nproc N"),
            (["--no-python", "torchrun", "train.py"], "torchrun starts processes of its own"),
            (["-m", "torch.distributed.run", "train.py"], "torch.distributed.run starts processes of its own"),
            (["--rewind", "-3", "train.py"], "--rewind: Input should be greater than or equal to 0 (got '-3')"),
            (["--policy", "bold", "train.py"], "--policy: Input should be 'balanced', 'palm', 'surgical' or 'screen'"),
            (["--skip", "5", "train.py"], "--skip: '5' is not a range of batches"),
            (["--skip", "5:4", "train.py"], "--skip: '5:4' is not a range of batches"),
            (["--skip", f"0:{2**53}", "train.py"], f"--skip: '0:{2**53}' is not a range of batches"),
            (["--skip-samples", f"{2**53}:1", "train.py"], f"--skip-samples: '{2**53}:1' is not a list of samples"),
            (
                ["--checkpoint-every", "never", "train.py"],
                "--checkpoint-every: 'never' is not of the form N|Nm|Nh",
            ),
            (
                ["--lr-after", "2", "train.py"],
                "is not of the form FACTOR:STEPS with a FACTOR of at least 0.01, below 1, such as 0.5:200",
            ),
            (["--max-skipped", "200%", "train.py"], "'200%' is not of the form X% with X from 0 to 100, such as 5%"),
            (["--snapshot-every", "0", "train.py"], "--snapshot-every: 0 leaves nothing to restore"),
            (["--max-restarts", "-1", "train.py"], "--max-restarts: '-1' is not a number of restarts"),
            (["--skips-of", "nowhere", "train.py"], "--skips-of: nowhere is not a run directory"),
            (["--fast-tier=", "train.py"], "--fast-tier: it is empty: name a file or a folder, or leave it out"),
            (["--run=", "train.py"], "Invalid value for '--run': it is empty: name a file or a folder"),
            (["--skips-of=", "train.py"], "Invalid value for '--skips-of': it is empty"),
            (["--seal", "", "train.py"], "Invalid value for '--seal': it is empty"),
            (["--secret-args", "", "train.py"], "--secret-args names no option of the script"),
            (["--rdzv-endpoint", "::1", "train.py"], "the rendezvous endpoint '::1' is an IPv6 address"),
            (["--rdzv-endpoint", "a:b:29500", "train.py"], "the rendezvous endpoint 'a:b:29500': 'a:b' is no host"),
            (["--nnodes", "2", "--rdzv-endpoint", "h:http", "train.py"], "'h:http': 'http' is no port from 0 to 65535"),
            (["--no-such-flag", "train.py"], "No such option: --no-such-flag"),
            ([], "Missing argument 'SCRIPT'"),
        ],
    )
    def test_a_mistake_is_told_by_name_before_anything_is_made(
        self,
        launches: list[LaunchOptions],
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        words: list[str],
        told: str,
    ) -> None:
        assert run(monkeypatch, "launch", *words) == ExitCode.USAGE
        assert told in capsys.readouterr().err
        assert launches == []
        assert [path.name for path in Path().iterdir()] == ["train.py"]

    def test_a_key_that_the_environment_names_is_looked_at_like_one_that_a_flag_names(
        self, launches: list[LaunchOptions], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        key = Path("key")
        for named, told in (
            (key, "reading the key of the seal"),
            (Path("runs/train/key"), "lies in the run directory"),
        ):
            monkeypatch.setenv(ENV_SEAL, str(named))
            assert run(monkeypatch, "launch", "train.py") == ExitCode.USAGE
            assert told in capsys.readouterr().err
        assert launches == []
        key.write_bytes(bytes(32))
        key.chmod(0o600)
        monkeypatch.setenv(ENV_SEAL, str(key))
        assert run(monkeypatch, "launch", "train.py") == ExitCode.DONE
        assert os.environ[ENV_SEAL] == str(key.resolve()), "the script may change to another directory"

    def test_a_module_and_a_program_are_found_without_being_run(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        Path("mine.py").write_text("raise RuntimeError('imported')")
        require_script("mine", {"module": True})
        require_script("json.tool", {"module": True})
        require_script("sh", {"no-python": True})
        with pytest.raises(UsageError):
            require_script("mine.py", {"no-python": True})
        with pytest.raises(UsageError):
            require_script("folder", {})
        Path("folder").mkdir()
        Path("folder/__main__.py").touch()
        require_script("folder", {})
        with pytest.raises(UsageError):
            require_script("folder", {"no-python": True})
        monkeypatch.setenv("PYTHON_EXEC", "/another/python")
        require_script("only_there", {"module": True})

    def test_the_run_directory_is_named_after_the_script(self) -> None:
        assert default_run("some/where/train_gpt.py", {}) == Path("runs/train_gpt")
        assert default_run("pkg.train", {"module": True}) == Path("runs/pkg.train")
        assert default_run(".", {}) == Path("runs", Path.cwd().name)


class TestSkipsOf:
    def test_the_windows_in_force_there_are_taken_over(self, tmp_path: Path) -> None:
        paths = RunPaths(tmp_path)
        journal = Journal(paths.train_journal, 1)
        journal.append(SkipAdded(window=Window(first=3, last=5), who="operator", why="known bad"))
        journal.close()
        assert read_settings({"skip": ["5:9"]}, tmp_path).skip == (Window(first=3, last=9),)
        assert read_settings({"skip": None}, tmp_path).skip == (Window(first=3, last=5),)
        record = paths.skip_record(0)
        record.parent.mkdir()
        record.write_text("damaged\n")
        with pytest.raises(UsageError, match=f"--skips-of: {record}: line 1 is damaged: .*is not known"):
            read_settings({}, tmp_path)


def ended(code: ExitCode, reason: str = "because", **more: Any) -> RunResult:
    return RunResult(exit_code=code, reason=reason, **more)


class TestClosingLine:
    @pytest.mark.parametrize("code", [ExitCode.DONE, ExitCode.RESUMABLE, ExitCode.STRUCTURAL, ExitCode.FAILED])
    def test_it_always_names_the_audit_and_the_reason(self, code: ExitCode) -> None:
        line = closing_line(ended(code), Path("runs/my run"), ["rollback", "launch", "train.py", "a b"])
        assert "`rollback audit 'runs/my run'`" in line
        assert ("because" in line) is (code != ExitCode.DONE)
        assert ("`rollback launch train.py 'a b'`" in line) is (code in (ExitCode.RESUMABLE, ExitCode.FAILED))

    @pytest.mark.parametrize("code", [ExitCode.RESUMABLE, ExitCode.FAILED, ExitCode.IO])
    def test_where_the_same_command_is_not_the_way_on_it_says_which_is(self, code: ExitCode) -> None:
        command, run = ["rollback", "launch", "train.py"], Path("run")
        line = closing_line(ended(code, "not at URL", hint="name another URL"), run, command)
        assert "; name another URL; " in line
        assert "rollback launch train.py" not in line

    def test_a_stop_while_nodes_are_waited_for_says_nothing_of_guards(self) -> None:
        told = ended(ExitCode.RESUMABLE, "told to stop while nodes were waited for", record=None)
        line = closing_line(told, Path("run"), ["rollback", "launch", "train.py"])
        assert "Guard" not in line
        assert line.startswith("stopped, resumable (told to stop")
        assert "`rollback launch train.py`" in line

    def test_a_job_whose_flags_announce_a_guard_that_no_rank_makes_was_done_without_protection(
        self, tmp_path: Path
    ) -> None:
        (tmp_path / "train.py").write_text("print('trained')")
        command = [*LAUNCH, "--nproc", "1", "--policy", "palm", "train.py"]
        done = run_warm(command, cwd=tmp_path, capture_output=True)
        assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
        assert "done, without protection: no rank made a rollback.Guard" in done.stderr

    def test_of_a_job_that_failed_on_the_way_to_its_guard_it_does_not_say_that_it_has_none(self) -> None:
        line = closing_line(ended(ExitCode.FAILED, "it raised", record=None), Path("run"), ["rollback"])
        assert line == "failed: it raised; no rank had made a rollback.Guard, so nothing was recorded"

    @pytest.mark.parametrize("code", [ExitCode.DONE, ExitCode.RESUMABLE, ExitCode.STRUCTURAL, ExitCode.FAILED])
    def test_where_another_host_keeps_the_record_it_names_that_host(self, code: ExitCode) -> None:
        line = closing_line(
            ended(code, record=RecordPlace(host="head", directory="/data/my run")), Path("runs/run"), ["rollback"]
        )
        assert "`rollback audit '/data/my run'` on head" in line
        assert "runs/run" not in line

    def test_where_the_bucket_alone_has_said_that_the_run_is_complete_it_names_the_bucket(self) -> None:
        line = closing_line(
            ended(ExitCode.DONE, record=RecordPlace(url="s3://bucket/one")), Path("runs/run"), ["rollback"]
        )
        assert "`rollback ring list s3://bucket/one`" in line
        assert "runs/run" not in line


def test_samples_of_several_flags_are_left_out_together() -> None:
    settings = read_settings({"skip_samples": ["640:18", "17,402"]}, None)
    assert [(one.batch, one.samples) for one in settings.skip_samples] == [(0, (17, 402)), (640, (17, 18, 402))]
    with pytest.raises(UsageError, match="not a list of samples"):
        read_settings({"skip_samples": ["7-9"]}, None)
    with pytest.raises(UsageError, match="--max-skipped"):
        read_settings({"max_skipped": "many"}, None)


def test_samples_of_a_flag_and_of_another_run_are_left_out_together_each_from_its_own_batch_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RecordedRun(tmp_path / "run", monkeypatch)
    for batch, samples, added, released in ((100, (3,), (3,), ()), (700, (3, 5), (5,), ()), (600, (5,), (), (3,))):
        order = {"batch": batch, "samples": samples, "added": added, "released": released}
        run.tell(1, SampleQuarantine(who="me", why="because", **order))
    settings = read_settings({"skip_samples": ["500:17", "650:5"]}, run.paths.root)
    assert [(one.batch, one.samples) for one in settings.skip_samples] == [
        (100, (3,)), (500, (3, 17)), (600, (5, 17)),
    ]  # fmt: skip
