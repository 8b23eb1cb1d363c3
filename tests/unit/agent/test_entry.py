"""What the supervisor relies on in torchrun: its flags, and how it tells which ranks failed."""

import functools
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import dynamic_rendezvous, utils
from torch.distributed.run import get_args_parser

from rollback.agent import entry
from rollback.agent.entry import describe
from rollback.agent.overrides import WrongUse, check_configuration, method_name, read_arguments
from rollback.cli import app
from rollback.cli.options import spelling
from rollback.cli.options.spelling import flags_of, spell_out
from rollback.config import Settings
from rollback.errors import ScriptRefused, UsageError
from rollback.supervisor.diagnosis.outcome import Failures, Refusal
from rollback.supervisor.torchrun import host
from rollback.supervisor.torchrun.flags import FLAGS, RENDEZVOUS, Flag, endpoint_of, names_a_rendezvous, read_flags

INSTALLED = flags_of(get_args_parser())
LATER = {"log-line-prefix-template", "shutdown-timeout"}  # than the oldest torch that is supported
HERE = [flag for flag in FLAGS if flag.name in {each.name for each in INSTALLED}]


def columns(flags: Iterable[Flag]) -> dict[str, tuple[bool, str | None, bool]]:
    return {flag.name: (flag.metavar is not None, flag.short, flag.has_variable) for flag in flags}


def test_the_table_is_torchruns_command_line() -> None:
    table, installed = columns(FLAGS), columns(INSTALLED)
    assert table.keys() - installed.keys() <= LATER
    assert {name: table.get(name) for name in installed} == installed


def test_what_torchrun_prints_in_place_of_a_job_is_no_flag_of_a_job() -> None:
    assert not {"help", "print-completion"} & {flag.name for flag in INSTALLED}


def test_the_page_on_torchrun_has_every_flag_and_its_variable() -> None:
    page = (Path(__file__).parents[3] / "docs/torchrun.md").read_text()
    rows = re.findall(r"^\| `--([a-z-]+)` \| (\S+) \| (.+) \|$", page, re.MULTILINE)
    assert {name: variable for name, variable, _ in rows} == {
        flag.name: f"`{flag.variable}`" if flag.has_variable else "-" for flag in FLAGS
    }
    assert all("same" in says or "different" in says for _, _, says in rows)


def test_no_flag_of_torchrun_hides_a_setting_of_the_guard() -> None:
    assert not {flag.parameter for flag in FLAGS} & set(Settings.model_fields)


@pytest.mark.parametrize("name", RENDEZVOUS)
def test_a_rendezvous_is_recognized_as_flag_and_as_variable(name: str) -> None:
    (flag,) = (flag for flag in FLAGS if flag.name == name)
    assert names_a_rendezvous(read_flags({flag.parameter: "x"}, {}))
    assert names_a_rendezvous(read_flags({}, {flag.variable: "x"}))


ENDPOINTS = ("h:7", " h:7", "h", "10.0.0.1:65535", "[::1]:5", "[::1]", "::1:29500", "h.domain_1:0")
NO_ENDPOINTS = (
    "::1",
    "::1:2950",
    "2001:db8::10:7",
    "fe80::1",
    "host:",
    ":29500",
    "host:abc",
    "host:65536",
    "host:-1",
    "[::1",
    "[]:5",
    "a b:5",
    "x:y:5",
)


@pytest.mark.parametrize("backend", ["c10d", "static"])
@pytest.mark.parametrize("endpoint", [*ENDPOINTS, *NO_ENDPOINTS])
def test_an_endpoint_is_read_as_by_torchrun_and_what_is_none_is_wrong_use(endpoint: str, backend: str) -> None:
    """torchrun takes an IPv6 address without brackets for a host and a port, and waits for it."""
    flags = {"rdzv-backend": backend, "rdzv-endpoint": endpoint}
    if endpoint in NO_ENDPOINTS or (backend == "static" and endpoint in ("h", "[::1]")):
        with pytest.raises(UsageError, match=f"the rendezvous endpoint '{re.escape(endpoint)}'") as told:
            endpoint_of(flags)
        assert "[fd00::7]:29500" in (told.value.hint or "")
    else:
        assert endpoint_of(flags) == utils.parse_rendezvous_endpoint(endpoint, 29400)


def test_an_endpoint_that_is_not_of_torch_s_own_store_is_not_looked_at() -> None:
    assert endpoint_of({}) is None
    assert endpoint_of({"rdzv-endpoint": ""}) is None, "torchrun takes it for none"
    assert endpoint_of({"rdzv-backend": "etcd", "rdzv-endpoint": ":x"}) is None
    assert endpoint_of({"standalone": True, "rdzv-endpoint": ":x"}) is None
    assert endpoint_of({"master-addr": "::1"}) == ("::1", 29500)
    with pytest.raises(UsageError, match="'http' is no port"):
        endpoint_of({"master-addr": "h", "master-port": "http"})


@pytest.mark.parametrize(("nnodes", "many"), [("1", False), ("1:1", False), ("2", True), ("1:4", True)])
def test_several_nodes_need_a_rendezvous_of_their_own(nnodes: str, many: bool) -> None:
    assert names_a_rendezvous({"nnodes": nnodes}) is many


def test_one_node_needs_no_rendezvous() -> None:
    assert not names_a_rendezvous({"nproc-per-node": "8", "standalone": True})
    assert not names_a_rendezvous({})


def value_by_torchrun(words: list[str], name: str) -> object:
    return getattr(get_args_parser().parse_args([*words, "train.py"]), name.replace("-", "_"))


@pytest.mark.parametrize("flag", HERE, ids=lambda flag: flag.name)
def test_every_variable_is_read_as_torchrun_reads_it(flag: Flag, monkeypatch: pytest.MonkeyPatch) -> None:
    value = "1" if flag.metavar is None else {"start-method": "fork"}.get(flag.name, "3")
    unset = value_by_torchrun([], flag.name)
    monkeypatch.setenv(flag.variable, value)
    ours = read_flags({}, os.environ)
    assert (flag.name in ours) is (value_by_torchrun([], flag.name) != unset)
    if flag.name in ours:
        given = [flag.option] if flag.metavar is None else [f"{flag.option}={ours[flag.name]}"]
        assert value_by_torchrun([], flag.name) == value_by_torchrun(given, flag.name)
    # The command line wins.
    chosen = {flag.parameter: True if flag.metavar is None else "4"}
    assert read_flags(chosen, os.environ)[flag.name] == chosen[flag.parameter]


@pytest.mark.parametrize(("text", "on"), [("1", True), ("0", False), ("2", True), ("-1", True)])
def test_the_variable_of_a_switch_is_a_number(text: str, on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_MODULE", text)
    assert value_by_torchrun([], "module") is on
    assert ("module" in read_flags({}, os.environ)) is on


@pytest.mark.parametrize("text", ["yes", "", "true"])
def test_a_switch_whose_variable_is_no_number_is_wrong_use(text: str) -> None:
    with pytest.raises(UsageError, match="PET_MODULE"):
        read_flags({}, {"PET_MODULE": text})


@functools.cache
def options_of_launch() -> dict[str, bool]:
    """The options that typer knows, and whether each takes a value."""
    command: Any = typer.main.get_command(app)
    options = [option for option in command.commands["launch"].params if hasattr(option, "is_flag")]
    return {name: not option.is_flag for option in options for name in [*option.opts, *option.secondary_opts]}


def prefixes() -> list[str]:
    found = {flag.name[:length] for flag in HERE for length in range(1, len(flag.name) + 1)}
    # A flag of a later torch may make a prefix ambiguous that is not yet.
    lacking = LATER - {flag.name for flag in HERE}
    return sorted(prefix for prefix in found if not any(name.startswith(prefix) for name in lacking))


@pytest.mark.parametrize("prefix", prefixes())
def test_every_abbreviation_is_what_torchrun_takes_it_for(prefix: str) -> None:
    parser = get_args_parser()
    meant = {option.replace("_", "-") for _, option, *_ in parser._get_option_tuples(f"--{prefix}")}
    if f"--{prefix}" in parser._option_string_actions:
        meant = {f"--{prefix}"}
    own = options_of_launch()
    if len(meant) > 1 and f"--{prefix}" not in own:
        with pytest.raises(UsageError, match="ambiguous"):
            spell_out([f"--{prefix}", "1"], own, lambda name: None)
        return
    (spelled,) = spell_out([f"--{prefix}"], own, lambda name: None)
    # A name that is a flag of ours in full is that flag.
    assert spelled == (f"--{prefix}" if f"--{prefix}" in own else meant.pop())


def test_a_name_of_our_own_that_abbreviates_a_flag_of_torchruns_is_ours() -> None:
    names = {flag.name for flag in FLAGS}
    hidden = {
        name for name in options_of_launch() if name[2:] not in names and any(n.startswith(name[2:]) for n in names)
    }
    assert {name for name in hidden if name.startswith("--")} == {"--run", "--nproc"}


def test_words_behind_the_script_are_its_own() -> None:
    options = {"--nproc-per-node": True, "--standalone": False, "-r": True, "-m": False}
    words = ["--nproc_per", "2", "--standal", "-r", "3", "-m", "train", "--nproc_per", "--standal", "--", "-r"]
    spelled = ["--nproc-per-node=2", "--standalone", "-r", "3", "-m", "train"]
    assert spell_out(words, options, lambda name: None) == [*spelled, *words[7:]]
    assert spell_out(["--", "--standal"], options, lambda name: None) == ["--", "--standal"]


def test_a_flag_that_only_the_installed_torchrun_knows_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spelling, "FLAGS", tuple(f for f in FLAGS if f.name not in ("role", "standalone")))
    options = {"--nproc-per-node": True}
    words = ["--role", "trainer", "--standalone", "--nproc_per_node", "2", "train.py"]
    monkeypatch.setattr(spelling, "in_full", lambda name: name)
    handed = ["--torchrun-flag=--role=trainer", "--torchrun-flag=--standalone", "--nproc-per-node=2", "train.py"]
    assert spell_out(words, options, spelling.ask_torchrun) == handed
    assert spelling.ask_torchrun("--no-such-flag") is None


class TestWrongUse:
    """What torchrun's own parser and its own checks say, in one line."""

    def test_is_that_of_the_job_and_not_of_its_protection(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """With --adopt the script would be started without, by the same flags."""
        told: list[dict[str, Any]] = []
        monkeypatch.setattr(entry, "_tell_supervisor", lambda path, fields: told.append(fields))
        monkeypatch.setattr(entry, "_leave_at_once", lambda status: None)
        entry._refuse(SimpleNamespace(refusal="there"), "no such flag")  # type: ignore[arg-type]
        (fields,) = told
        assert not isinstance(Refusal(**fields).as_error(reached=0), ScriptRefused)

    @pytest.mark.parametrize(
        ("words", "told"),
        [
            (["--max-restarts=soon", "x.py"], "invalid int value: 'soon'"),
            (["--start-method=magic", "x.py"], "invalid choice: 'magic'"),
            (["--no-such-flag=1", "x.py"], "unrecognized arguments"),
            (["--event-log-handler=nix", "x.py"], "there is no handler 'nix'"),
            ([], "required: training_script"),
        ],
    )
    def test_of_its_parser(self, words: list[str], told: str) -> None:
        with pytest.raises(WrongUse, match=told):
            read_arguments(words, "id")

    @pytest.mark.parametrize(
        ("words", "told"),
        [
            (["--nproc-per-node=foo"], "Unsupported nproc_per_node value: foo"),
            (["--nproc-per-node=0"], "0 ranks cannot be started"),
            (["--nproc-per-node=xpu"], "Xpu is not available"),
            (["--monitor-interval=0"], "not a positive time"),
            (["--monitor-interval=nan"], "not a positive time"),
            (["--monitor-interval=inf"], "not a positive time"),
            (["--redirects=7"], "7 does not match"),
            (["--tee=0:9"], "0:9 does not match"),
            (["--logs-specs=nix"], "Could not find entrypoint"),
            (["--local-ranks-filter=a"], "comma-separated list of integers"),
            (["--module", "--no-python"], "at the same time"),
            (["--nnodes=1:2:3"], "MIN:MAX"),
        ],
    )
    def test_of_its_configuration(self, words: list[str], told: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(run, "config_from_args", run.config_from_args)  # put back at the end
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        check_configuration()
        with pytest.raises(WrongUse, match=told):
            run.config_from_args(read_arguments([*words, "x.py"], "id"))

    def test_standalone_keeps_its_name_over_all_attempts(self) -> None:
        arguments = read_arguments(["--standalone", "x.py"], "one launch")
        meeting = (arguments.rdzv_backend, arguments.rdzv_endpoint, arguments.rdzv_id)
        assert meeting == ("c10d", "localhost:0", "one launch")

    @pytest.mark.parametrize(
        ("name", "words", "address"),
        [
            ("no-such.invalid", [], "localhost"),
            ("no-such.invalid", ["--local-addr=::1"], "::1"),
            ("localhost", [], None),
        ],
    )
    def test_on_a_host_whose_name_nobody_knows_standalone_meets_at_localhost(
        self, monkeypatch: pytest.MonkeyPatch, name: str, words: list[str], address: str | None
    ) -> None:
        monkeypatch.setattr("socket.getfqdn", lambda *_: name)
        assert read_arguments(["--standalone", *words, "x.py"], "id").local_addr == address


def failure(rank: int, exitcode: int, *, at: int, error_file: str = "") -> ProcessFailure:
    found = ProcessFailure(local_rank=rank, pid=100 + rank, exitcode=exitcode, error_file=error_file)
    found.timestamp = at
    return found


@pytest.mark.parametrize(
    ("words", "waits"), [(["--standalone"], [1.0]), (["--nnodes=2", "--rdzv-backend=c10d"], [0.25, 1.0])]
)
def test_a_node_without_others_comes_to_the_rendezvous_at_once(
    words: list[str], waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(dynamic_rendezvous, "_delay", utils._delay)
    monkeypatch.setattr("time.sleep", slept.append)
    read_arguments([*words, "x.py"], "id")
    for seconds in ((0.25, 0.25), 1.0):
        dynamic_rendezvous._delay(seconds=seconds)
    assert slept == waits


def test_the_first_failure_comes_first_and_ranks_that_torchrun_ended_come_last() -> None:
    failures = {0: failure(0, -15, at=6), 1: failure(1, 1, at=8), 2: failure(2, -9, at=8), 3: failure(3, 1, at=7)}
    told = Failures.model_validate(describe(ChildFailedError("train.py", failures)))
    assert [failed.rank for failed in told.failures] == [3, 2, 1, 0]
    assert told.failures[1].exitcode == -9
    assert told.failures[1].pid == 102
    assert told.failures[1].message is None


@pytest.mark.parametrize("short", [True, False])
def test_what_a_rank_left_in_its_error_file_is_handed_on(short: bool, tmp_path: Path) -> None:
    more = {"py_callstack": "...", "timestamp": "5"}
    message = {"message": "ValueError: no such sample", "extraInfo": more, "shortage": short}
    left = tmp_path / "error.json"
    left.write_text(json.dumps({"message": message}))
    told = Failures.model_validate(
        describe(ChildFailedError("train.py", {0: failure(0, 1, at=5, error_file=str(left))}))
    )
    assert told.failures[0].message == "ValueError: no such sample"
    assert told.shortage is short


def test_what_ranks_say_at_length_is_told_by_its_beginning_and_its_end(tmp_path: Path) -> None:
    """A state that does not fit is told of with all of its keys. What is too long for a record, nobody reads."""
    left = tmp_path / "error.json"
    message = f"RuntimeError: missing: {'слой.weight, ' * 9_000}\nthat is all"
    left.write_text(json.dumps({"message": {"message": message, "extraInfo": {"timestamp": "5"}}}))
    told = describe(
        ChildFailedError("train.py", {rank: failure(rank, 1, at=5, error_file=str(left)) for rank in range(8)})
    )
    assert len(json.dumps(told)) < host._ACCOUNT
    kept = Failures.model_validate(told).failures[0].message or ""
    assert (kept[:24], kept[-13:]) == (message[:24], message[-13:])


def test_a_name_that_is_no_utf_8_spoils_no_account(tmp_path: Path) -> None:
    """Python reads it with lone surrogates, which no reader of JSON but its own takes."""
    name, left = os.fsdecode(b"/data/\xff"), tmp_path / "error.json"
    left.write_text(json.dumps({"message": {"message": f"ValueError: {name}", "extraInfo": {"timestamp": "5"}}}))
    told = describe(ChildFailedError("train.py", {0: failure(0, 1, at=5, error_file=str(left))}))
    read = Failures.model_validate_json(json.dumps(told))
    assert read.failures[0].message == r"ValueError: /data/\udcff"
    assert Failures.model_validate_json(json.dumps(describe(OSError(name)))).error == r"OSError: /data/\udcff"
    refused = Refusal.model_validate_json(json.dumps(UsageError(f"no {name}", hint=f"make {name}").fields))
    assert (refused.message, refused.hint) == (r"no /data/\udcff", r"make /data/\udcff")


def test_another_error_of_torchrun_names_itself() -> None:
    assert describe(RuntimeError("no\nrendezvous")) == {"error": "RuntimeError: no", "shortage": False, "failures": []}
    assert describe(RuntimeError("can't start new thread"))["shortage"]


@pytest.mark.parametrize("depth", [1, 2, 3, 10**4])
def test_methods_are_named_as_torchruns_rendezvous_names_them(depth: int) -> None:
    def asked() -> tuple[str, str]:
        return dynamic_rendezvous.get_method_name(depth), method_name(depth)

    theirs, ours = asked()
    assert ours == theirs
