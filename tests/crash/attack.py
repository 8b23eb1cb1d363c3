"""Kills, damages, limits and wild command lines against supervised runs, drawn by seed: `scripts/attack`.

A case is a job and a few acts against it. After the last act the same command is given until the run is through. Then
one of two things must hold: it has ended bit for bit as one that was never disturbed; or, where something was damaged
or denied, it was refused with a documented exit code, in words, without a traceback of ours. And in any case: nothing
outside of the run directory has changed, a bystander lives, no process is left, and commands that only read take little
memory. A case that breaks this is made smaller, act by act, and printed with what plays it again.
"""

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click
import psutil
import typer
from storm import JOBS, LIMIT, MOMENTS, VICTIMS, Kill, Oracle, Undertaking, undisturbed
from toy import require_same
from warm import warm_up

import rollback
from rollback.cli import app
from rollback.errors import ExitCode

REFUSALS = {ExitCode.NO_CHECKPOINT, ExitCode.IN_USE, ExitCode.IO, ExitCode.STRUCTURAL, ExitCode.UNFIT}
"""How a launch may answer to what was damaged or denied."""
DENIALS = {ExitCode.FAILED, ExitCode.USAGE}
"""And to a limit: ranks that cannot start fail, and too few open files are refused as the command line would be."""
MEMORY = 300 << 20  # of a command that reads
PATIENCE = 60.0  # seconds for such a command
COLD = 0.1  # share of the cases in which no process is forked from a warm one
PACKAGE = str(Path(rollback.__file__).parent)
SPARSE = 5 << 30
STARTS = 4  # of the same command after the last act, while it says that it is resumable

TARGETS = {
    "run.json": 2, "holder.json": 1, "lock": 1, "fast-tier.json": 2, "journal/*.jsonl": 4, "metrics/*": 2,
    "ring/c*": 1, "ring/c*/manifest.json": 2, "ring/c*/*.safetensors": 2, "ranks/*": 2, "skips/*": 1, "draws/*": 1,
    "logs/*/*": 1, "failures/*/*": 1, "../memory/*/*/slot-*/*": 3, "../memory/*/*/tier.json": 1,
}  # fmt: skip
HARMS = {
    "truncate": 3, "flip": 3, "empty": 2, "remove": 3, "directory": 2, "fifo": 2, "link": 3, "dangling": 1, "zero": 1,
    "nested": 2, "absurd": 2, "sparse": 1, "stranger": 2, "elsewhere": 1,
}  # fmt: skip
LIMITS = {"nofile 24": 1, "nofile 64": 2, "nofile 256": 2, "fsize 65536": 2, "fsize 400000": 2}
KINDS = {"kill": 8, "stop": 2, "damage": 5, "damage live": 3, "command": 4, "limit": 1, "memory": 2, "clock": 1}
"""What an act is, and how often each is drawn relative to the others."""
LENIENT = {"damage", "damage live", "limit", "memory"}  # after these, a refusal is an answer too
READING = ("status", "why", "audit", "audit --verify", "ring list", "ring verify", "audit --json", "status --json")


@dataclass(frozen=True)
class Act:
    """what, how: whom or what it meets, and in which way. share: of a time or of a file. pick: among several."""

    kind: str
    what: str
    how: str
    share: float
    pick: float

    def __str__(self) -> str:
        return " ".join(filter(None, (self.kind, self.what, self.how))) + f" at {self.share:.2f}"


@dataclass(frozen=True)
class Case:
    """job: which of `JOBS`. memory: bytes of the file system in which the fast tier is; None for no limit; 0: off.
    warm: its processes are forked from this one; else they are started as users do."""

    job: int
    memory: int | None
    warm: bool
    acts: tuple[Act, ...]

    def to_json(self) -> str:
        acts = [[act.kind, act.what, act.how, act.share, act.pick] for act in self.acts]
        return json.dumps([self.job, self.memory, self.warm, acts])

    @classmethod
    def from_json(cls, text: str) -> "Case":
        job, memory, warm, acts = json.loads(text)
        return cls(job, memory, warm, tuple(Act(*act) for act in acts))

    @property
    def lenient(self) -> bool:
        return any(act.kind in LENIENT for act in self.acts)


def draw(seed: int) -> Case:
    """The case of a seed. A pure function."""
    dice = random.Random(f"attack {seed}")

    def one(weights: dict[str, int]) -> str:
        return dice.choices([*weights], [*weights.values()])[0]

    acts = []
    for _ in range(dice.randint(1, 5)):
        kind, what, how = one(KINDS), "", ""
        match kind:
            case "kill":
                what, how = one(VICTIMS), one(MOMENTS)
            case "damage" | "damage live":
                what, how = one(TARGETS), one(HARMS)
            case "command":
                what = dice.choice(["read", "read", "fuzz"])
                how = dice.choice(READING) if what == "read" else str(dice.randrange(10**6))
            case "limit":
                what = one(LIMITS)
            case "memory":
                what = dice.choice(["fill", "remove"])
        acts.append(Act(kind, what, how, int(1000 * dice.random()) / 1000, int(1000 * dice.random()) / 1000))
    memory = dice.choice([None, None, 0, 1 << 20, 8 << 20])
    job = dice.randrange(len(JOBS))
    return Case(job, memory, dice.random() > COLD, tuple(acts))


class Violation(AssertionError):
    """What must hold does not."""


# --- what is done to files --------------------------------------------------------------------------------------------


@dataclass
class Outside:
    """What lies beside the run directory and is nobody's business: files, a directory, and a process."""

    folder: Path
    bystander: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.folder.mkdir()
        for name in ("secret", "precious/work", "precious/slot-00/rank-00000.safetensors"):
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f'{{"what": "{name}"}}\n')
            path.chmod(0o600)
        (self.folder / "precious").chmod(0o700)
        self.bystander = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        self._before = self._portrait()

    def _portrait(self) -> dict[str, tuple[Any, ...]]:
        found = {}
        for path in (self.folder, *sorted(self.folder.rglob("*"))):
            status = path.lstat()
            content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
            found[str(path)] = (status.st_mode, status.st_uid, content, status.st_nlink)
        return found

    def require_untouched(self) -> None:
        if self._portrait() != self._before:
            before, after = set(self._before.items()), set(self._portrait().items())
            raise Violation(f"outside of the run directory something was changed: {sorted(before ^ after)}")
        if self.bystander.poll() is not None:
            raise Violation(f"a bystander was ended: {self.bystander.returncode}")

    def clear_up(self) -> None:
        self.bystander.kill()
        self.bystander.wait()


def harm(path: Path, how: str, share: float, outside: Outside) -> None:
    """Damage a file, or a directory with all that is in it. Raises OSError where it has just gone."""
    if path.is_dir() and not path.is_symlink() and how in ("truncate", "flip", "empty", "nested", "absurd", "sparse"):
        path = next((inner for inner in sorted(path.rglob("*")) if inner.is_file()), path)
    data = path.read_bytes() if path.is_file() else b""
    at = int(share * len(data))
    match how:
        case "truncate":
            os.truncate(path, at)
        case "flip" if data:
            path.write_bytes(data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :])
        case "empty":
            os.truncate(path, 0)
        case "sparse":
            with contextlib.suppress(OSError):  # in a small file system there is no room even for that
                os.truncate(path, SPARSE)
        case "nested":
            path.write_bytes(b"[" * 60_000)
        case "absurd":
            path.write_bytes(_absurd(data))
        case "stranger":
            path.write_bytes(_of_stranger(data, outside.bystander.pid))
        case "elsewhere":
            _point_elsewhere(path, outside.folder / "precious")
        case _:
            _remove(path)
            _put_instead(path, how, data, outside)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _put_instead(path: Path, how: str, data: bytes, outside: Outside) -> None:
    match how:
        case "directory":
            path.mkdir()
        case "fifo":
            os.mkfifo(path)
        case "link":
            path.symlink_to(outside.folder / "secret")
        case "dangling":
            path.symlink_to(outside.folder / "nowhere")
        case "zero":
            path.symlink_to("/dev/zero")


def _absurd(data: bytes) -> bytes:
    """The same JSON with values that nobody wrote: other types, and numbers beyond all bounds."""
    values = itertools.cycle([-5, 10**400, None, [], {}, "x" * 10_000, True, 1e308, "../../.."])
    lines = []
    for line in data.splitlines() or [b"{}"]:
        try:
            body = json.loads(line)
        except ValueError:
            body = {}
        lines.append({key: next(values) for key in body} if isinstance(body, dict) else next(values))
    return "\n".join(map(json.dumps, lines)).encode() + b"\n"


def _of_stranger(data: bytes, pid: int) -> bytes:
    """The same JSON about another process."""
    try:
        body = json.loads(data)
    except ValueError:
        return data
    if isinstance(body, dict):
        body |= {"pid": pid} if "pid" in body else {}
        body |= {"created": psutil.Process(pid).create_time()} if "created" in body else {}
    return json.dumps(body).encode()


def _point_elsewhere(path: Path, precious: Path) -> None:
    """Let the run directory say that somebody's directory is its fast tier."""
    root = next((parent for parent in path.parents if (parent / "run.json").is_file()), None)
    if root is None:
        return
    identity = root / "run.json"
    with contextlib.suppress(ValueError, AttributeError):
        identity.write_text(json.dumps({**json.loads(identity.read_text()), "run_id": precious.name}))
    (root / "fast-tier.json").write_text(json.dumps({"format": 2, "directory": str(precious), "hosts": 1}))


# --- command lines ----------------------------------------------------------------------------------------------------

_VALUES = (
    "", "-1", "0", "1e309", "nan", "9" * 400, "\udcff\udcfe", "../../..", "/dev/null", "/proc/self/mem", "/", "a\nb",
    "--", "[[[[", "∞", "'; rm -rf x", "7:3", "0:99999999999999999999", "c000000-s00000000", "newest-good", "%s%n",
    "\u202e", "true",
)  # fmt: skip
_SLOW = {"--watch", "--follow", "--wait", "--timeout", "--wandb", "--ring", "--tensorboard", "--output", "-o", "--plot"}
_LONG = {"launch", "drill", "doctor"}  # they start things; what is wrong with launch's flags has tests of its own


def wild(seed: int, run: Path) -> list[str]:
    """A command line of `rollback` that nobody would write."""
    dice = random.Random(seed)
    command: Any = typer.main.get_command(app)
    words: list[str] = []
    while isinstance(command, click.Group) or hasattr(command, "commands"):
        names = sorted(name for name in command.commands if name not in _LONG)
        words.append(dice.choice(names))
        command = command.commands[words[-1]]
    values = [*_VALUES, str(run), str(run / "run.json"), str(run.parent / "nothing-here")]
    options = [parameter for parameter in command.params if parameter.opts[0] not in _SLOW]
    for parameter in dice.sample(options, dice.randint(0, len(options))):
        if parameter.opts[0].startswith("-"):
            words.append(parameter.opts[0])
            if dice.random() < 0.1 or not getattr(parameter, "is_flag", False):
                words.append(dice.choice(values))
        else:
            words.append(str(run) if parameter.name == "run" and dice.random() < 0.8 else dice.choice(values))
    return [word for word in words if "\0" not in word]


def ask(words: Sequence[str], folder: Path) -> None:
    """Give a command that reads, or asks. Raises Violation where its end is not one that is documented."""
    said = "rollback " + " ".join(map(repr, words))
    with open(folder / "asked.txt", "wb") as output:
        command = [sys.executable, "-m", "rollback", *words]
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, "NO_COLOR": "1"},
        )
        until, most = time.monotonic() + PATIENCE, 0
        while process.poll() is None:
            if time.monotonic() > until:
                process.kill()
                process.wait()
                raise Violation(f"{said}: it did not end in {PATIENCE:.0f} s")
            most = max(most, _memory_of(process.pid))
            time.sleep(0.01)
    text = (folder / "asked.txt").read_text(errors="replace")
    if process.returncode not in set(ExitCode):
        raise Violation(f"{said}: exit code {process.returncode}\n{text[-2000:]}")
    if "Traceback (most recent call last)" in text and "why" not in words:  # `why` shows those of ranks
        raise Violation(f"{said}: a traceback\n{text[-2000:]}")
    if process.returncode not in (ExitCode.DONE, ExitCode.FAILED) and not text.strip():
        raise Violation(f"{said}: exit code {process.returncode} without a word")
    if most > MEMORY:
        raise Violation(f"{said}: {most >> 20} MiB of memory")


def _memory_of(pid: int) -> int:
    """The most that it has had so far. (What the kernel tells at its end is that of the process it was forked from.)"""
    with contextlib.suppress(OSError):
        if found := re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text()):
            return int(found[1]) << 10
    return 0


OF_THE_DEAD = re.compile(r"third_party/gloo/|DataLoader worker \(pid .* is killed by signal")
"""Errors that another process's death raises here, wherever this one is: in a collective, in a signal's handler."""


def our_traceback(text: str) -> str | None:
    """A traceback that ends in the package: it is our bug, whatever was done. One of the script's is the script's."""
    for part in text.split("Traceback (most recent call last):")[1:]:
        this = part.split("\n\n")[0]
        frames = re.findall(r'File "([^"]+)", line \d+', this)
        if frames and frames[-1].startswith(PACKAGE) and not OF_THE_DEAD.search(this):
            return part[:3000]
    return None


# --- a case -----------------------------------------------------------------------------------------------------------


class Assault(Undertaking):
    """A run under attack."""

    def prepare(self, case: Case) -> None:
        self.case = case
        self.outside = Outside(self.folder / "outside")
        self.memory = self.folder / "memory"
        self.memory.mkdir()
        self.limits: dict[int, int] = {}
        self.mounted = False
        self.met = 0  # acts that began while the run was not yet through
        if case.memory and os.geteuid() == 0:
            mount = ["mount", "-t", "tmpfs", "-o", f"size={case.memory}", "rollback-attack", str(self.memory)]
            self.mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
        self.environment = {"ROLLBACK_FAST_TIER": "off" if case.memory == 0 else str(self.memory)}

    def launch(self) -> None:
        """Under the limits of the last act, which hold for this launch and all that it starts."""
        before = {which: resource.getrlimit(which) for which in self.limits}
        try:
            for which, most in self.limits.items():
                resource.setrlimit(which, (most, before[which][1]))
            super().launch()
        finally:
            for which, both in before.items():
                resource.setrlimit(which, both)
            self.limits = {}

    def halt(self) -> None:
        """Everything dies, in no good order."""
        if not self.ended():
            processes = [process for group in self.tree().values() for process in group]
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self.supervisor.wait()
        for process in self.survivors():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def perform(self, act: Act, start_up: float) -> None:
        self.met += not self.ended()
        match act.kind:
            case "kill":
                self.carry_out(Kill(act.what, act.how, act.share, act.pick), start_up)
            case "stop":
                self._stop(act)
            case "damage":
                self._train_a_while(act.share)
                self.halt()
                self._damage(act)
                self.launch()
            case "damage live":
                self._train_a_while(act.share)
                self._damage(act)
            case "command":
                self._train_a_while(act.share)
                ask(
                    [*act.how.split(), str(self.run)] if act.what == "read" else wild(int(act.how), self.run),
                    self.folder,
                )
            case "limit":
                self.halt()
                name, most = act.what.split()
                self.limits = {{"nofile": resource.RLIMIT_NOFILE, "fsize": resource.RLIMIT_FSIZE}[name]: int(most)}
                self.launch()
            case "memory":
                self._train_a_while(act.share)
                self._exhaust_memory(act.what)
            case "clock":
                self.halt()
                for path in self.run.rglob("*"):
                    with contextlib.suppress(OSError):
                        moment = time.time() + (act.pick - 0.5) * 1000 * 86400
                        os.utime(path, (moment, moment), follow_symlinks=False)
                self.launch()

    def _train_a_while(self, share: float) -> None:
        """As far as it comes: what was damaged may keep it from that."""
        self.wait(self._trains, 30.0)
        until = time.monotonic() + share * 0.3
        self.wait(lambda: time.monotonic() > until)

    def _trains(self) -> bool:
        try:
            return self.training()
        except OSError:
            return False

    def _stop(self, act: Act) -> None:
        self._train_a_while(act.share)
        if not self.ended():
            self.supervisor.send_signal(signal.SIGTERM)
            code = self._end()
            allowed = {ExitCode.DONE, ExitCode.RESUMABLE} | (REFUSALS if self.case.lenient else set())
            if code not in allowed:
                raise Violation(f"told to stop, it ended with {code}\n{self.tail()}")
        if self.supervisor.returncode == ExitCode.RESUMABLE:
            self.launch()

    def _damage(self, act: Act) -> None:
        with contextlib.suppress(OSError):  # a folder or the file has gone at this moment, or it cannot be done to it
            if found := sorted(path for path in self.run.glob(act.what) if "outside" not in path.parts):
                harm(found[int(act.pick * len(found))], act.how, act.share, self.outside)

    def _exhaust_memory(self, how: str) -> None:
        """The memory of the fast tier is full, or somebody has removed all that was in it, as at a logout."""
        if how == "remove":
            for path in self.memory.iterdir():
                shutil.rmtree(path, ignore_errors=True)
        elif self.mounted:
            with contextlib.suppress(OSError), open(self.memory / "ballast", "wb") as file:
                while True:
                    file.write(bytes(1 << 16))

    def _end(self) -> int:
        try:
            return int(self.supervisor.wait(LIMIT))
        except subprocess.TimeoutExpired:
            raise Violation(f"it did not end in {LIMIT:.0f} s\n{self.tail()}") from None

    def require_a_good_end(self, oracle: Oracle) -> str:
        """How it ended, in a word. Raises Violation."""
        code = self._end()
        acts = {act.kind for act in self.case.acts}
        for _ in range(STARTS):
            if code != ExitCode.RESUMABLE or not (self.case.lenient or "command" in acts):  # `rollback stop` is one
                break
            self.launch()
            code = self._end()
        self.outside.require_untouched()
        text = self.output.read_text(errors="replace")
        if found := our_traceback(text):
            raise Violation(f"a traceback of ours:{found}")
        if left := self.survivors():
            raise Violation(f"processes that outlived their run: {left}")
        if code == ExitCode.DONE:
            for rank in range(self.ranks):
                try:
                    require_same(self.scenarios.portrait("run", rank), oracle.portraits[rank], f"rank {rank}")
                except AssertionError as error:
                    raise Violation(f"it is not as undisturbed: {str(error)[:1000]}") from None
            return "exact"
        if not self.case.lenient or code not in REFUSALS | (DENIALS if "limit" in acts else set()):
            raise Violation(f"exit code {code}\n{self.tail()}")
        if "rollback" not in text[-4000:]:
            raise Violation(f"exit code {code} without a word\n{self.tail()}")
        return f"refused ({code})"

    def clear_up(self) -> None:
        super().clear_up()
        self.outside.clear_up()
        if self.mounted:
            subprocess.run(["umount", "--lazy", str(self.memory)], check=False)


class Attack:
    """Cases, one after the other. `say` is told of each."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self.folder, self.say = folder, say
        self.ends: Counter[str] = Counter()
        self.acts = self.met = 0
        self.violations: list[tuple[str, Case, str]] = []
        self._oracles: dict[tuple[int, bool], Oracle] = {}
        self._number = itertools.count()
        register = folder / "register"
        register.mkdir()
        warm_up(register)

    def try_case(self, case: Case) -> str | None:
        """What does not hold, in words; None where all does."""
        which = case.job, case.warm
        if which not in self._oracles:
            folder = self.folder / f"undisturbed-{case.job}-{'warm' if case.warm else 'cold'}"
            self._oracles[which] = undisturbed(folder, *JOBS[case.job], case.warm)
        oracle = self._oracles[which]
        run = Assault(self.folder / f"case-{next(self._number)}", *JOBS[case.job], case.warm)
        try:
            run.prepare(case)
            run.launch()
            for act in case.acts:
                run.perform(act, oracle.start_up)
            self.acts += len(case.acts)
            self.met += run.met
            self.ends[run.require_a_good_end(oracle)] += 1
        except AssertionError as error:
            return str(error)
        finally:
            run.clear_up()
            shutil.rmtree(run.folder, ignore_errors=True)
        return None

    def try_seed(self, seed: int, *, shrink: bool) -> None:
        case = draw(seed)
        fault = self.try_case(case)
        self.say(f"seed {seed}: {', '.join(map(str, case.acts))}: {'VIOLATED' if fault else 'holds'}")
        if fault is not None:
            smallest, fault = self._shrunk(case, fault) if shrink else (case, fault)
            self.violations.append((f"seed {seed}", smallest, fault))
            self.say(f"{fault}\nplay it again: scripts/attack --seed {seed}, or --case '{smallest.to_json()}'")

    def _shrunk(self, case: Case, fault: str) -> tuple[Case, str]:
        """The case without the acts that it does not take. What depends on a moment may not happen again: it stays."""
        for act in reversed(case.acts):
            fewer = replace(case, acts=tuple(other for other in case.acts if other is not act))
            if fewer.acts and (found := self.try_case(fewer)) is not None:
                case, fault = fewer, found
        return case, fault


def seeds_of(text: str) -> range:
    first, _, behind = text.partition(":")
    return range(int(first), int(behind))


def _seeds(arguments: argparse.Namespace) -> Iterator[int]:
    if arguments.seed is not None:
        yield arguments.seed
    elif arguments.seeds is not None:
        yield from arguments.seeds
    else:
        yield from itertools.count(random.SystemRandom().randrange(10**6))


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/attack", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=seeds_of, metavar="A:B", help="these cases, B not among them")
    parser.add_argument("--seed", type=int, help="this case")
    parser.add_argument("--minutes", type=float, help="begin no other case after this time (default: 10, seeds: none)")
    parser.add_argument("--case", type=Case.from_json, help="a case as it was printed")
    parser.add_argument("--no-shrink", action="store_true", help="do not look for the smallest list of acts")
    parser.add_argument("--folder", type=Path, help="where runs are while they last (default: a temporary one)")
    arguments = parser.parse_args()
    minutes = arguments.minutes or (10.0 if arguments.seeds is None else float("inf"))
    folder = Path(tempfile.mkdtemp(prefix="rollback-attack-", dir=arguments.folder))
    attack = Attack(folder, lambda line: print(line, flush=True))
    began = time.monotonic()
    cases = 0
    if arguments.case is not None:
        fault = attack.try_case(arguments.case)
        print(fault or "it holds")
        return int(fault is not None)
    for seed in _seeds(arguments):
        if cases and time.monotonic() - began > 60 * minutes:
            break
        attack.try_seed(seed, shrink=not arguments.no_shrink)
        cases += 1
    shutil.rmtree(folder, ignore_errors=True)
    ends = ", ".join(f"{count} {end}" for end, count in sorted(attack.ends.items()))
    for name, case, fault in attack.violations:
        print(f"{name}: {', '.join(map(str, case.acts))}: {fault.splitlines()[0]}")
    seconds = time.monotonic() - began
    print(
        f"{cases} cases in {seconds:.0f} s: {len(attack.violations)} violations; ends, shrinking included: {ends}; "
        f"{attack.met} of {attack.acts} acts met a run that was not yet through"
    )
    return int(bool(attack.violations))


if __name__ == "__main__":
    sys.exit(main())
