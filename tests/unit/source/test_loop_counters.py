"""What a script counts, and carries from iteration to iteration: which of it is restored, and how it is asked for."""

import ast
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

from rollback.source.instrumentation import (
    BY_BATCH,
    BY_EPOCH,
    EPOCH_MOVED,
    EPOCHS,
    NEXT,
    RAISED,
    STEP_MOVED,
    STEPS,
    instrumented,
)
from rollback.source.loop_counters import loop_counters
from rollback.source.loop_variables import loop_variables
from rollback.source.loops import ScriptLoops


class Loss:
    def backward(self) -> None:
        """Of no interest."""


class Moved(BaseException):
    pass


def run(source: str, **names: Any) -> dict[str, Any]:
    space: dict[str, Any] = {
        "f": lambda *x: Loss(), "loader": "abcdef",
        STEP_MOVED: Moved, RAISED: lambda: (), BY_BATCH: lambda *_: (), **names,
    }  # fmt: skip
    exec(compile(instrumented(ScriptLoops(textwrap.dedent(source)), "script.py").tree, "script.py", "exec"), space)
    return space


@pytest.mark.parametrize(
    ("source", "restored"),
    [
        # counts, and what a training depends on
        ("for x in loader:\n  f(x).backward()\n  if x: n += 1\n  n += 1", ["n"]),
        ("for x in loader:\n  f(x, tau).backward()\n  tau *= 0.9", ["tau"]),
        ("for x in loader:\n  (f(x) * self.beta).backward()\n  self.beta = min(1, self.beta + 0.1)", ["self.beta"]),
        ("for x in loader:\n  y = f(x) - b\n  y.backward()\n  b = 0.9 * b + 0.1 * y.item()", ["b"]),
        ("for x in loader:\n  f(x, w).backward()\n  w.mul_(0.9)", ["w"]),
        ("for x in loader:\n  f(x, s['a']).backward()\n  s.update(a=s['a'] * 0.9)", ["s"]),
        ("for x in loader:\n  f(x, s.a).backward()\n  setattr(s, 'a', s.a * 0.9)", ["s.a"]),
        ("import heapq\nfor x in loader:\n  f(x, h[0]).backward()\n  heapq.heapreplace(h, h[0] + 1)", ["h"]),
        ("class M:\n  def update(self, x): self.sum += x\nm = M()\nfor x in loader:\n  f(x, m).backward()\n"
         "  m.update(x)", ["m.sum"]),
        ("class A:\n  def fit(self):\n    for x in loader:\n      f(x).backward()\n      self.o.step()\n"
         "      self.r *= 0.9\n      for g in self.o.param_groups: g['lr'] = self.r", ["self.r"]),
        ("class A:\n  @property\n  def w(self): return 1 / self.b\n  def fit(self):\n    for x in loader:\n"
         "      f(x, self.w).backward()\n      self.b += 0.1", ["self.b"]),
        ("def main():\n  def one(x):\n    f(x, args.tau).backward()\n    args.tau *= 0.9\n  for x in loader: one(x)",
         ["args.tau"]),
        ("for x in loader:\n  k = decay(k)\n  w = 2 * k\n  f(x, w).backward()", ["k"]),
        ("for x in loader:\n  f(x).backward()\n  r *= 0.9\n  for g in o.param_groups: g['lr'] = r\n  o.step()", ["r"]),
        ("for x in loader:\n  f(x).backward()\n  p = p + 1\n  model.set_rate(p)\n  model(x)\n  model.step()", ["p"]),
        ("for x in loader:\n  f(x).backward()\n  seen.append(x)\n  if len(seen) > 9: break", ["seen"]),
        ("for x in loader:\n  f(x).backward()\n  if x < best: best, bad = x, 0\n  else: bad = bad + 1\n"
         "  if bad > 3: break", ["bad", "best"]),
        ("for x in loader:\n  f(x, h).backward()\n  if x: h = h + 1", ["h"]),
        ("for x in loader:\n  f(x, self.data).backward()\n  self.data *= 0.9\n  p.data *= 2\n  self.p.grad *= 2",
         ["self.data"]),
        ("for x in loader:\n  f(x).backward()\n  if i - last > 3:\n    o.step()\n    last = i", ["last"]),
        ("class A:\n  def one(self, x):\n    (f(x) * self.b).backward()\n    self.b *= 0.9\n  def fit(self):\n"
         "    for x in loader: self.one(x)", ["self.b"]),
        # for each epoch anew, and in functions that are called again
        ("for x in loader:\n  f(x).backward()\n  n += 1\n  if n == 4: n = 0", ["n"]),
        ("def one():\n  n = 0\n  for x in loader:\n    f(x).backward()\n    n += 1\none()\none()", ["n"]),
        ("def one():\n  m = 0\n  for x in loader:\n    f(x).backward()\n    m += x\n  return m\n"
         "while True:\n  if one() < 3: break", ["m"]),
        # by `next`
        ("def main():\n  n = 0\n  while n < 9:\n    x = next(it)\n    f(x).backward()\n    n += 1\nmain()", ["n"]),
        ("while n < 9:\n  f(next(it)).backward()\n  n += 1", ["n"]),
        ("while n < 9:\n  f(next(it), n).backward()\n  n += 1", []),
        # by `next`, the batches of an update in a loop of theirs
        ("while n < 9:\n  for i in range(4):\n    x = next(it)\n    f(x, n).backward()\n  o.step()\n  n += 1", ["n"]),
        ("while True:\n  for g in o.param_groups: g['lr'] = rate(n)\n  for i in range(4):\n    try: x = next(it)\n"
         "    except StopIteration:\n      it = iter(loader)\n      x = next(it)\n    f(x).backward()\n  o.step()\n"
         "  n += 1\n  if n > 9: break", ["n"]),
        ("for n in numbers():\n  for i in range(4): f(next(it), tau).backward()\n  o.step()\n  tau *= 0.9", []),
        ("while True:\n  it = iter(loader)\n  for i in range(4):\n    f(next(it)).backward()\n    o.step()\n  n += 1\n"
         "  if n > 9: break", []),
        ("def get(): return next(it)\nwhile n < 9:\n  f(get()).backward()\n  n += 1", []),
        # set anew in each iteration, only told, or of another loop
        ("for x in loader:\n  tau = 1\n  f(x, tau).backward()\n  tau *= 0.9", []),
        ("for x in loader:\n  m = M()\n  f(x, m.n).backward()\n  m.n *= 2", []),
        ("for x in loader:\n  if x: tau = 1\n  else: tau = 2\n  f(x, tau).backward()", []),
        ("for x in loader:\n  try: loss = f(x)\n  except ValueError: continue\n  loss.backward()", []),
        ("for x in loader:\n  f(x).backward()\nelse:\n  n += 1", []),
        ("for x in loader:\n  n += 1\nfor x in loader:\n  f(x).backward()", []),
    ],
)  # fmt: skip
def test_what_a_training_loop_counts_or_trains_by_is_restored(source: str, restored: list[str]) -> None:
    loops = ScriptLoops(source)
    assert sorted(variable.name for variable in loop_variables(loops) if variable.by_batch) == restored
    assert {count.name for count in loop_counters(loops) if count.restored} == {*restored}


@pytest.mark.parametrize(
    ("behind", "names"),
    [
        ("with c() as y: total += y", ["total"]),
        ("total += 8\n  print(total)\n  log.append(total)", ["log", "total"]),
        ("if x: best = max(best, x)\n  print(best)", ["best"]),
        ("if x: model.save(best)\n  best = max(best, x)", ["best"]),
    ],
)
def test_so_is_what_is_only_told_and_no_counter(behind: str, names: list[str]) -> None:
    loops = ScriptLoops(f"for x in loader:\n  f(x).backward()\n  {behind}")
    assert sorted((each.name, each.affects_training) for each in loop_variables(loops)) == [
        (name, False) for name in names
    ]
    assert not loop_counters(loops)


def test_a_loop_that_takes_its_batch_in_its_head_trains_by_what_it_carries() -> None:
    loops = ScriptLoops("while (x := next(it, None)) is not None:\n  f(x, tau).backward()\n  tau *= 0.9")
    assert [(count.name, count.trains, count.restored) for count in loop_counters(loops)] == [("tau", True, False)]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="except* is of Python 3.11")
def test_what_is_set_beside_the_catching_of_an_exception_group_is_carried() -> None:
    source = "for x in loader:\n  try: f(x, tau).backward()\n  except* ValueError: tau = tau * 0.9"
    assert [variable.name for variable in loop_variables(ScriptLoops(source))] == ["tau"]


def test_a_function_of_the_script_may_be_called_next() -> None:
    loops = ScriptLoops("for x in loader:\n  f(x, next()).backward()\n  n += 1")
    assert [count.name for count in loop_counters(loops)] == ["n"]


def test_so_is_what_a_logger_is_told_that_hands_the_batches_on() -> None:
    """That of torchvision's references, DeiT and MAE."""
    source = """
        for i, x in enumerate(logger.log_every(loader, 10)):
            f(x).backward()
            logger.update(loss=x)
            logger.meters["speed"].update(1 / x)
    """
    loops = ScriptLoops(textwrap.dedent(source))
    assert [(each.name, each.affects_training) for each in loop_variables(loops)] == [
        ("logger", False),
        ("logger.meters", False),
    ]
    assert not [count for count in loop_counters(loops) if not count.counts]


def test_what_a_training_gives_back_may_be_told_alone() -> None:
    source = "def one(n):\n  for x in loader:\n    f(x).backward()\n    n += x\n  return n\nprint(one(3))"
    (variable,) = loop_variables(ScriptLoops(source))
    assert (variable.name, variable.affects_training) == ("n", False)


@pytest.mark.parametrize(
    ("before", "behind"),
    [
        ("class Net:\n  def forward(self, x): return x * n", "n *= 0.9"),
        ("w.register_hook(lambda g: g * n)", "n *= 0.9"),
        ("", "n *= 0.9\n  dropout.p = n"),
    ],
)
def test_what_something_else_reads_may_be_trained_by(before: str, behind: str) -> None:
    (variable,) = loop_variables(ScriptLoops(f"{before}\nfor x in loader:\n  f(x).backward()\n  {behind}"))
    assert (variable.name, variable.affects_training) == ("n", True)


def test_the_time_is_not_put_back() -> None:
    source = "for x in loader:\n  f(x).backward()\n  spent += time.time() - end\n  end = time.time()"
    assert [variable.name for variable in loop_variables(ScriptLoops(source))] == ["spent"]


def test_a_module_takes_nothing_in() -> None:
    source = "import torch\nfor x in loader:\n  f(torch.to(x)).backward()\n  torch.save(best)\n  best = max(best, 1)"
    (variable,) = loop_variables(ScriptLoops(source))
    assert (variable.name, variable.affects_training) == ("best", False)


def test_what_decides_of_an_act_that_the_loop_ends_by_trains_too() -> None:
    """As Accelerate's trigger."""
    source = "for x in loader:\n  f(x).backward()\n  if bad > 3: a.set_trigger()\n  bad += x\n  if a.check(): break"
    (variable,) = loop_variables(ScriptLoops(source))
    assert (variable.name, variable.affects_training) == ("bad", True)


@pytest.mark.parametrize(
    ("behind", "restored"),
    [
        ("beta = beta + 0.1", ["beta"]),
        ("history.append(x)", ["history"]),
        ("best = max(best, x)", ["best"]),
        ("if x > best: best, patience = x, 3\n  else: patience -= 1\n  if not patience: break", ["best", "patience"]),
        ("last = x\n  print(last)", []),
    ],
)
def test_of_a_loop_over_epochs_all_is_restored_that_it_carries(behind: str, restored: list[str]) -> None:
    source = f"for epoch in range(3):\n  for x in loader:\n    f(x).backward()\n  {behind}"
    found = loop_variables(ScriptLoops(source))
    assert [(variable.name, variable.by_batch) for variable in found] == [(name, False) for name in restored]
    assert not loop_variables(ScriptLoops(source.replace("range(3)", "groups")))


def test_a_variable_is_asked_for_with_the_batch_and_behind_a_loop() -> None:
    source = """
        for e in range(2):
            for x in loader:
                log.append((e, x, beta))
                f(x, beta).backward()
                beta = beta + 1
        log.append(beta)
    """
    asked: list[tuple[str, int]] = []

    def by_batch(read: Callable[[], int], name: str, filename: str, *_: bool) -> list[int]:
        if name == "log of loop 2":
            return []
        asked.append((name, read()))
        return [read() + 10] * (len(asked) == 3)  # with the second batch

    log: list[Any] = []
    names = {EPOCHS: lambda numbers, *_: numbers, EPOCH_MOVED: Moved, BY_EPOCH: lambda *_: (), BY_BATCH: by_batch}
    run(source, log=log, beta=0, loader="ab", **names)
    assert log[:2] == [(0, "a", 0), (0, "b", 11)]
    assert {name for name, _ in asked} == {"beta of loop 2"}
    assert len(asked) == 8, "with each batch, and on both sides of each loop"


def test_it_is_asked_for_with_each_batch_of_an_update() -> None:
    """What an iteration does with them may depend on it."""
    source = """
        while beta < 2:
            for i in range(2):
                x = next(it)
                f(x, beta).backward()
            optimizer.step()
            beta = beta + 1
    """
    text = ast.unparse(instrumented(ScriptLoops(textwrap.dedent(source)), "script.py").tree)
    assert f"x = next(it)\n                for beta in {BY_BATCH}" in text


def test_at_an_epochs_top_it_is_asked_for_once() -> None:
    """And not behind a loop in it that takes batches by `next`."""
    source = """
        for e in range(2):
            it = iter(loader)
            for i in range(2):
                x = next(it)
                f(x, beta).backward()
                optimizer.step()
                beta = beta + 1
    """
    text = ast.unparse(instrumented(ScriptLoops(textwrap.dedent(source)), "script.py").tree)
    assert text.count(BY_EPOCH) == 1


def test_one_that_is_not_there_yet_stays_so() -> None:
    run(
        "for x in loader:\n  if x > 'a': f(x, beta)\n  f(x).backward()\n  beta = 3\nassert beta == 3",
        **{BY_BATCH: lambda *_: ()},
    )


def in_loop(head: str, body: str) -> str:
    return f"{head}:\n{textwrap.indent(textwrap.dedent(body), '  ')}"


TAKEN = """
    batches = iter(loader)
    for i in range(3):
        x = next(batches)
        f(x).backward()
        log.append((i, x))
"""


SEVERAL = """
    batches = iter(loader)
    def update(x):
        optimizer.step()
    for i in range(3):
        GATHERED
        for x in micro:
            f(x).backward()
        optimizer.step()
"""
AT_ONCE = """
    batches = iter(loader)
    def update(micro):
        for x in micro:
            f(x).backward()
        optimizer.step()
    for i in range(3):
        update([next(batches) for _ in range(k)])
"""
GATHERS = SEVERAL.replace("GATHERED", "micro = [next(batches) for _ in range(k)]")
DIRECT = SEVERAL.replace("for x in micro:\n            f(x).backward()", "pass")


@pytest.mark.parametrize(
    ("source", "restored"),
    [
        (TAKEN, [False]),
        (TAKEN.replace("x = next(batches)", "try: x = next(batches)\n        except StopIteration: x = next(batches)"),
         [False]),
        (TAKEN.replace("range(3)", "tqdm(range(3))"), [False]),
        (TAKEN.replace("range(3)", "trange(3, disable=True)"), [False]),
        (TAKEN.replace("range(3)", "tqdm.trange(0, 3)"), [False]),
        (TAKEN.replace("range(3)", "trange(start, 3)"), []),
        (TAKEN.replace("range(3)", "enumerate(range(3))"), []),
        (in_loop("for e in range(2)", TAKEN), [True]),
        (in_loop("def one()", TAKEN) + "for e in range(2):\n  one()", [True]),
        # more than one in an iteration, or less
        (TAKEN.replace("x = next(batches)", "x = next(batches)\n        x = next(batches)"), []),
        (SEVERAL.replace("GATHERED", "micro = [next(batches) for _ in range(k)]"), [False]),
        (SEVERAL.replace("GATHERED", "for _ in range(k): micro += [next(batches)]"), [False]),
        (DIRECT.replace("GATHERED", "for _ in range(k): f(next(batches)).backward()"), [False]),
        (DIRECT.replace("GATHERED", "f(next(batches)).backward()\n        f(next(batches)).backward()"), [False]),
        (in_loop("for e in range(2)", SEVERAL.replace("GATHERED", "micro = [next(batches) for _ in range(k)]")),
         [True]),
        (SEVERAL.replace("GATHERED", "while len(micro) < 3: micro += [next(batches)]"), []),
        (SEVERAL.replace("GATHERED", "micro = [next(batches) for _ in range(k) if i]"), []),
        (SEVERAL.replace("GATHERED", "for _ in range(k):\n          if i: break\n          f(next(batches))"), []),
        (SEVERAL.replace("GATHERED", "for _ in range(k): f(next(batches)).backward(); optimizer.step()"), []),
        (SEVERAL.replace("GATHERED", "for _ in range(k): update(next(batches))"), []),
        (TAKEN.replace("x = next(batches)", "if i % 2: x = next(batches)"), []),
        (TAKEN.replace("x = next(batches)", "for _ in range(2): f(next(batches)).backward()\n        x = 0"), []),
        (TAKEN.replace("next(batches)", "next(iter(loader))"), []),
        (TAKEN.replace("x = next(batches)", "if i < 2: continue\n        x = next(batches)"), []),
        (TAKEN.replace("log.append", "if i < 2: continue\n        log.append"), [False]),
        (TAKEN.replace("next(batches)", "next(batches, None)"), []),
        (TAKEN.replace("x = next(batches)", "try: x = next(batches)\n        except: x = next(batches)"), []),
        (TAKEN.replace("range(3)", "range(0, 3)"), [False]),
        (TAKEN.replace("range(3)", "range(start, 3)"), []),
        (SEVERAL.replace("GATHERED", "for _ in range(k): b = next(batches); micro.append(b)"), [False]),
        (SEVERAL.replace("GATHERED", "for _ in range(k): x, y = next(batches); micro.append((x, y))"), [False]),
        # random numbers in front of the batch, which puts the random states back
        (TAKEN.replace("x = next", "z = torch.randn(2)\n        x = next"), []),
        (TAKEN.replace("x = next(batches)", "x = augment(next(batches), random.random())"), [False]),
        (TAKEN.replace("f(x).backward()", "f(x, torch.randn(2)).backward()"), [False]),
        (SEVERAL.replace("GATHERED", "micro = [next(batches) for _ in range(random.randint(1, 3))]"), []),
        (DIRECT.replace("GATHERED", "for _ in range(k): z = rng.normal(); f(next(batches), z).backward()"), []),
        (TAKEN.replace("x = next(batches)", "x = augment(random.random(), next(batches))"), []),
        ("def noisy(): return torch.randn(2)\n" + textwrap.dedent(TAKEN.replace("x = next", "x = noisy(), next")), []),
        # in one statement with the update
        (AT_ONCE, [False]),
        (AT_ONCE.replace("update([", "loss = update(["), [False]),
        (AT_ONCE.replace("update([", "update(torch.randn(2), ["), []),
        (AT_ONCE.replace("update([next(batches)", "update([update(next(batches))"), []),
        # as many as a count says, which is put back with a batch
        (GATHERS.replace("micro =", "k = 2 if n < 9 else 3; n += 1; micro ="), []),
        (GATHERS.replace("micro =", "k = 2 if i < 9 else 3; n += 1; micro ="), [False]),
        # what begins it again is not shown
        (in_loop("def one()", GATHERS), []),
        (in_loop("def one()", GATHERS) + "one()", [False]),
        (in_loop("def one()", GATHERS) + "one()\none()", []),
        (in_loop("def one()", GATHERS) + "def all():\n  one()\nall()", [False]),
        (in_loop("def one()", GATHERS) + "def all():\n  one()\nall()\nall()", []),
        (in_loop("def one()", GATHERS) + "def all():\n  all()\n  one()", []),
        (in_loop("def one()", GATHERS) + "each = one\nfor e in range(2): each()", []),
        (in_loop("def one()", GATHERS) + "[one() for e in range(2)]", []),
        (in_loop("class T", in_loop("def train(self)", GATHERS)) + "for e in range(2): T().train()", []),
        (in_loop("def one()", TAKEN), [False]),
        (in_loop("def one()", TAKEN.replace("log.append", "if i > 3: break\n        log.append")), []),
        # something else takes from it
        (TAKEN.replace("iter(loader)", "iter(loader)\n    first = next(batches)"), []),
        (TAKEN + textwrap.indent(textwrap.dedent(TAKEN), "    ").replace("    batches = iter(loader)\n", ""), []),
        # in iterations of another loop
        ("for e in range(2):\n  batches = iter(loader)\n  for s in range(2):\n    for i in range(3):\n"
         "      f(next(batches)).backward()", []),
        ("for e in range(2):\n  batches = iter(loader)\n  while more:\n    for i in range(3):\n"
         "      f(next(batches)).backward()", []),
        (in_loop("while more", TAKEN), []),
        (in_loop("for fold in folds", in_loop("for e in range(2)", TAKEN)), []),
        # where the iterator outlives the epochs, and other loops train
        ("batches = iter(loader)\nfor e in range(2):\n  for i in range(3):\n    f(next(batches)).backward()", []),
        (textwrap.dedent(TAKEN) + "for x in loader:\n  f(x).backward()", []),
        (textwrap.dedent(TAKEN) * 2, []),
    ],
)  # fmt: skip
def test_a_loop_over_a_range_that_takes_the_batches_of_an_update_in_each_turn_is_led(
    source: str, restored: list[bool]
) -> None:
    assert [each.in_epochs for each in ScriptLoops(textwrap.dedent(source)).step_loops] == restored


def test_such_a_loop_begins_another_turn_where_it_is_told_to() -> None:
    taken: list[Any] = []

    def take(filename: str, line: int, batches: Any) -> Any:
        taken.append((filename, line))
        if len(taken) == 2:
            raise Moved
        return next(batches)

    log: list[tuple[int, str]] = []
    iterations = lambda numbers, filename, line, in_epochs, counted: [*numbers, 9]  # noqa: E731
    run(TAKEN, log=log, **{STEPS: iterations, NEXT: take})
    assert log == [(0, "a"), (2, "b"), (9, "c")]
    assert {*taken} == {("script.py", 3)}


STOPPER = """
class Base:
    def step(self, value):
        self.note()
        self.seen = [*self.seen, value]

    def note(self):
        self.counter += 1

class Stopper(Base):
    def __call__(self, value):
        self.step(value)

stopper = Stopper()
def decay():
    global tau
    tau = tau * 0.9
for epoch in range(9):
    for x in loader:
        f(x).backward()
    stopper(value)
    decay()
    if stopper.stop:
        break
"""


@pytest.mark.parametrize(
    ("old", "new", "restored"),
    [
        ("stopper", "stopper", ["stopper.counter", "stopper.seen", "tau"]),
        ("stopper(value)", "stopper.step(value)", ["stopper.counter", "stopper.seen", "tau"]),
        ("stopper", "run.stopper", ["run.stopper.counter", "run.stopper.seen", "tau"]),
        ("stopper = Stopper()", "stopper = made_elsewhere()", ["tau"]),
        ("    stopper(value)", "    stopper = Stopper()\n    stopper(value)", ["tau"]),
    ],
)
def test_what_is_carried_by_way_of_calls_is_restored(old: str, new: str, restored: list[str]) -> None:
    found = loop_variables(ScriptLoops(STOPPER.replace(old, new)))
    assert sorted(variable.name for variable in found) == restored


OF_FILE = """
    tau, seen, cfg = 1, [], {"tau": 1}
    def decay():
        global tau
        tau += 1
    def main():
        "Of others' variables."
        for x in loader:
            f(x, tau, cfg["tau"]).backward()
            decay()
            cfg["tau"] += 1
            seen.append(x)
            if len(seen) > 99: break
    main()
"""
OF_FUNCTION_AROUND = """
    def around():
        tau, seen, cfg = 1, [], {"tau": 1}
        def decay():
            nonlocal tau
            tau += 1
        def main():
            for x in loader:
                f(x, tau, cfg["tau"]).backward()
                decay()
                cfg["tau"] += 1
                seen.append(x)
                if len(seen) > 99: break
        main()
        return tau, seen, cfg
    tau, seen, cfg = around()
"""


@pytest.mark.parametrize("source", [OF_FILE, OF_FUNCTION_AROUND, OF_FILE.replace("def main():", "def main(tau=0):")])
def test_a_variable_that_is_not_the_functions_own_is_set_where_it_is(source: str) -> None:
    own = "main(tau" in source
    restored = {variable.name for variable in loop_variables(ScriptLoops(textwrap.dedent(source)))}
    assert restored == ({"seen", "cfg"} if own else {"tau", "seen", "cfg"})
    asked: list[str] = []

    def by_batch(read: Callable[[], Any], name: str, filename: str, *_: bool) -> list[Any]:
        asked.append(name)
        return [100] * (read() == 3)

    found = run(source, loader="abcd", **{BY_BATCH: by_batch})
    assert {name.partition(" ")[0] for name in asked} == restored
    assert (found["tau"], found["seen"], found["cfg"]) == (5 if own else 102, ["a", "b", "c", "d"], {"tau": 5})


def test_so_is_an_attribute_that_a_closure_in_a_method_changes() -> None:
    source = (
        "class A:\n  def one(self):\n    self.b *= 0.9\n  def fit(self):\n    lam = 0\n    def objective(x):\n"
        "      nonlocal lam\n      lam += 1\n      self.one()\n      return f(x, self.b) + lam\n"
        "    for x in loader:\n      objective(x).backward()\n"
    )
    assert sorted(variable.name for variable in loop_variables(ScriptLoops(source))) == ["lam", "self.b"]


RUNNING = """
    def running(momentum):
        mean, seen, unread = 0, {"n": 0}, []
        def update(x):
            nonlocal mean
            mean += momentum
            seen["n"] += len(x) + len(unread)
            return mean
        return update
    mean = running(2)
    def train(loader, mean):
        for x in loader:
            f(x, mean(x)).backward()
    train(loader, mean)
    other = running(1)
    last = mean(""), other(""), [cell.cell_contents for cell in mean.__closure__]
"""


def test_so_is_what_a_function_keeps_that_another_one_has_made() -> None:
    found = loop_variables(ScriptLoops(textwrap.dedent(RUNNING)))
    assert [(variable.shown, variable.affects_training) for variable in found] == [
        ("mean of mean", True),
        ("seen of mean", True),
    ]

    def by_batch(read: Callable[[], Any], name: str, filename: str, *_: bool) -> list[Any]:
        return [100] * (read() == 6)

    assert run(RUNNING, loader="abcd", **{BY_BATCH: by_batch})["last"] == (104, 1, [104, 2, {"n": 4}, []])


def test_so_it_is_where_it_is_decorated() -> None:
    decorated = "import functools\n" + textwrap.dedent(RUNNING).replace("    def update", "    @quiet\n    def update")
    quiet = "def quiet(f):\n    @functools.wraps(f)\n    def g(x): return f(x)\n    return g\n"
    source = decorated.replace("def running", f"{quiet}def running").replace(
        "mean.__closure__", "mean.__wrapped__.__closure__"
    )
    found = loop_variables(ScriptLoops(source))
    assert [variable.shown for variable in found] == ["mean of mean", "seen of mean"]

    def by_batch(read: Callable[[], Any], name: str, filename: str, *_: bool) -> list[Any]:
        return [100] * (read() == 6)

    assert run(source, loader="abcd", **{BY_BATCH: by_batch})["last"] == (104, 1, [104, 2, {"n": 4}, []])


def test_a_function_of_the_file_is_looked_into_though_another_one_gets_its_name_elsewhere() -> None:
    source = (
        "count = 0\ndef step(x):\n  global count\n  count += 1\n  return count\n"
        "def made():\n  seen = 0\n  def inner():\n    nonlocal seen\n    seen += 1\n  return inner\n"
        "def other():\n  step = made()\n  step()\n"
        "def train():\n  for x in loader: f(x, step(x)).backward()\ntrain()"
    )
    assert "count" in {variable.name for variable in loop_variables(ScriptLoops(source))}


@pytest.mark.parametrize(
    ("definition", "call", "restored"),
    [
        ("def one(x, s):\n  s['tau'] *= 0.9\n  f(x, s).backward()", "one(x, state)", ["state"]),
        ("def one(x, s):\n  s.tau *= 0.9\n  f(x, s).backward()", "one(x, s=run.state)", ["run.state.tau"]),
        ("def one(x, s):\n  def two(y):\n    s.n += y\n  two(1)\n  f(x, s).backward()", "one(x, st)", ["st.n"]),
        ("def two(k):\n  k.append(1)\ndef one(x, *, s):\n  two(s.h)\n  f(x, s).backward()", "one(x, s=a)", ["a.h"]),
        ("class S:\n  def go(this, by):\n    this.n += by\nkept: S = S()\ndef one(x, s):\n  s.go(1)\n"
         "  f(x, s.n).backward()", "one(x, kept)", ["kept.n"]),
        ("class S:\n  def go(self): self.n += 1\nm, k = [], S()\ndef one(x, s):\n  s.go()\n  f(x, s.n).backward()",
         "one(x, k)", ["k.n"]),
        ("class S:\n  @staticmethod\n  def put(h, x): h.append(x)\ns = S()\ndef one(x, h):\n  s.put(h, x)\n"
         "  f(x, h).backward()", "one(x, hist)", ["hist"]),
        ("class S:\n  @classmethod\n  def go(k): k.n += 1\ns = S()\ndef one(x, s):\n  s.go()\n  f(x, s.n).backward()",
         "one(x, s)", []),
        # the function's own, a copy, what cannot be told
        ("def one(x, s):\n  s = {}\n  s['n'] += 1\n  f(x, s).backward()", "one(x, state)", []),
        ("def one(x, s):\n  if x: s = wrapped(s)\n  f(x, s).backward()", "one(x, state)", []),
        ("def one(x, s):\n  s['n'] += 1\n  f(x, s).backward()", "one(x, {**state})", []),
        ("def one(x, s):\n  s['n'] += 1\n  f(x, s).backward()", "one(*x, state)", []),
        ("class S:\n  def one(self, x): self.n += 1", "one(x, state); f(x, state).backward()", []),
    ],
)  # fmt: skip
def test_so_is_what_a_function_changes_of_what_it_is_given(definition: str, call: str, restored: list[str]) -> None:
    found = loop_variables(ScriptLoops(f"{definition}\nfor x in loader:\n  {call}\n  o.step()"))
    assert [variable.name for variable in found] == restored


@pytest.mark.parametrize(
    ("at_end", "trains"),
    [("sampler.set_epoch(epoch)", True), ("print(epoch)", False), ("evaluate(model, epoch)", False)],
)
def test_a_count_of_epochs_beside_the_next_of_a_batch_is_trained_by_where_it_orders_the_data(
    at_end: str, trains: bool
) -> None:
    source = (
        "epoch, batches = 0, iter(loader)\nfor step in range(9):\n  try: x = next(batches)\n"
        f"  except StopIteration:\n    epoch += 1\n    {at_end}\n    batches = iter(loader)\n    x = next(batches)\n"
        "  model(x).backward()\n  o.step()"
    )
    found = {each.name: (each.trains, each.restored) for each in loop_counters(ScriptLoops(source))}
    assert found["epoch"] == (trains, False)


def test_an_object_that_has_one_of_its_kind_is_looked_at_once() -> None:
    node = "class A:\n  def __init__(self): self.child = A()\n  def go(self):\n    self.n += 1\n    self.child.go()\n"
    found = loop_variables(ScriptLoops(f"{node}a = A()\nfor x in loader:\n  f(x, a.n).backward()\n  a.go()"))
    assert [variable.name for variable in found] == ["a.n"]


def test_classes_of_one_name_are_looked_at_once() -> None:
    classes = "class A: pass\nclass B(A): pass\nclass A(B): pass\na = A()\n"
    assert not loop_variables(ScriptLoops(f"{classes}for x in loader:\n  f(x).backward()\n  a.step(x)"))


@pytest.mark.parametrize(("made", "named"), [("EarlyStopping(patience=3)", True), ("Evaluator()", False)])
def test_so_is_an_object_of_another_file_that_stops_early(made: str, named: bool) -> None:
    source = f"stopper = {made}\nfor epoch in range(9):\n  for x in loader: f(x).backward()\n  if stopper(x): break"
    found = [(each.name, each.line, each.ends) for each in loop_counters(ScriptLoops(source))]
    assert found == [("stopper", 1, True)] * named
