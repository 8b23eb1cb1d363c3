"""Counts of a script that are led: which, and that they stay what they are where nobody leads them."""

import textwrap
from typing import Any

import pytest

from rollback.source.loops import ScriptLoops
from rollback.source.own_counters import led_counts, own_counters
from rollback.source.steering import COUNT, TAKE, TURNED, TURNS, steered


class Loss:
    def backward(self) -> None:
        """Of no interest."""


class Turned(BaseException):
    pass


def run(source: str, **names: Any) -> dict[str, Any]:
    space: dict[str, Any] = {"f": lambda x: Loss(), "loader": "abcdef", TURNED: Turned, **names}
    exec(compile(steered(textwrap.dedent(source), "script.py")[0], "script.py", "exec"), space)
    return space


@pytest.mark.parametrize(
    ("source", "led"),
    [
        ("for x in loader:\n  f(x).backward()\n  if x: n += 1\n  n += 1", ["n"]),
        ("for x in loader:\n  f(x).backward()\n  self.n += 1\n  n.m[0] += 1", ["self.n"]),
        ("n = 0\nfor e in range(3):\n  for x in loader:\n    f(x).backward()\n    n += 1", ["n"]),
        ("def one():\n  n = 0\n  for e in range(3):\n    for x in loader:\n      f(x).backward()\n      n += 1", ["n"]),
        ("def main():\n  n = 0\n  while n < 9:\n    x = next(it)\n    f(x).backward()\n    n += 1\nmain()", ["n"]),
        ("class A:\n  def __init__(self): self.n = 0\n  def fit(self):\n    for x in loader:\n      f(x).backward()\n"
         "      self.n += 1", ["self.n"]),
        ("while n < 9:\n  f(next(it)).backward()\n  n += 1", ["n"]),
        ("while n < 9:\n  x = next(it)\n  f(x, n).backward()\n  n += 1", ["n"]),
        # set while the training goes on
        ("while n < 9:\n  f(next(it), n).backward()\n  n += 1", []),
        ("for x in loader:\n  f(x).backward()\n  n += 1\n  if n == 4: n = 0", []),
        ("for x in loader:\n  n = 0\n  f(x).backward()\n  n += 1", []),
        ("for e in range(3):\n  n = 0\n  for x in loader:\n    f(x).backward()\n    n += 1", []),
        ("for e in range(3):\n  m, n = 0, 0\n  for x in loader:\n    f(x).backward()\n    n += 1", []),
        ("for e in range(3):\n  n: int = 0\n  for x in loader:\n    f(x).backward()\n    n += 1", []),
        ("for e in range(3):\n  m = M()\n  for x in loader:\n    f(x).backward()\n    m.n += 1", []),
        ("for g in groups:\n  for x in loader:\n    f(x).backward()\n    g.n += 1", []),
        ("class A:\n  def reset(self): self.n = 0\n  def fit(self):\n    for x in loader:\n      f(x).backward()\n"
         "      self.n += 1\n      if self.n == 4: self.reset()", []),
        # at the loop's end, and where a function takes the batch
        ("for x in loader:\n  f(x).backward()\nelse:\n  n += 1", []),
        ("def get(): return next(it)\nwhile n < 9:\n  f(get()).backward()\n  n += 1", []),
        # perhaps called for each epoch, or for each of two phases
        ("def main():\n  n = 0\n  while n < 9:\n    x = next(it)\n    f(x).backward()\n    n += 1\nmain()\nmain()", []),
        ("def one():\n  n = 0\n  for x in loader:\n    f(x).backward()\n    n += 1\nfor e in range(3):\n  one()", []),
        ("def one():\n  n = 0\n  for x in loader:\n    f(x).backward()\n    n += 1", []),
        ("def one(n):\n  for x in loader:\n    f(x).backward()\n    n += 1\n  return n\none(0)", []),
        ("for x in loader:\n  f(x).backward()\n  n += 2\n  total += x", []),
        ("for x in loader:\n  n += 1\nfor x in loader:\n  f(x).backward()\n  m -= 1", []),
        ("for x in loader:\n  f(x).backward()\n  n += 1\nfor x in loader:\n  f(x).backward()\n  n += 1", []),
    ],
)  # fmt: skip
def test_what_a_training_loop_adds_1_to_and_nothing_sets_meanwhile_is_led(source: str, led: list[str]) -> None:
    loops = ScriptLoops(source)
    assert [count.name for count in led_counts(loops)] == led
    assert {count.name for count in own_counters(loops) if count.led} == {*led}


def test_a_count_is_made_what_it_was_with_the_batch_and_told_what_is_added() -> None:
    source = """
        n = seen = 0
        for x in loader:
            at_top = n
            f(x).backward()
            n += 1
            log.append((at_top, n))
    """
    told: list[tuple[int, int, str, str]] = []

    def count(present: int, by: int, *place: Any) -> int:
        told.append((present, by, *place))
        return by + 10 * (len(told) == 3)  # with the second batch

    log: list[tuple[int, int]] = []
    run(source, log=log, **{COUNT: count})
    assert log[:3] == [(0, 1), (11, 12), (12, 13)]
    assert [each[:2] for each in told[:3]] == [(0, 0), (0, 1), (1, 0)]
    assert {each[2:] for each in told} == {("n", "script.py")}


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
    ("source", "led"),
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
        # more than one in a turn, or less
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
        # in turns of another loop
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
    source: str, led: list[bool]
) -> None:
    assert [each.in_epochs for each in ScriptLoops(textwrap.dedent(source)).by_turns] == led


def test_such_a_loop_begins_another_turn_where_it_is_told_to() -> None:
    taken: list[Any] = []

    def take(filename: str, line: int, batches: Any) -> Any:
        taken.append((filename, line))
        if len(taken) == 2:
            raise Turned
        return next(batches)

    log: list[tuple[int, str]] = []
    turns = lambda numbers, filename, line, in_epochs, counted: [*numbers, 9]  # noqa: E731
    run(TAKEN, log=log, **{TURNS: turns, TAKE: take})
    assert log == [(0, "a"), (2, "b"), (9, "c")]
    assert {*taken} == {("script.py", 3)}


STOPPER = """
class Stopper:
    def __call__(self, value):
        self.counter += 1

stopper = Stopper()
for epoch in range(9):
    for x in loader:
        f(x).backward()
    stopper(value)
    if stopper.stop:
        break
"""


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("stopper", "stopper", True),
        ("stopper.stop", "stopper(value)", True),
        ("stopper", "self.stopper", True),
        ("if stopper.stop", "if value < 1", False),
        ("stopper = Stopper()\nfor epoch in range(9):", "for epoch in range(9):\n    stopper = Stopper()", False),
    ],
)
def test_what_an_object_counts_that_ends_the_epochs_is_named(old: str, new: str, named: bool) -> None:
    found = own_counters(ScriptLoops(STOPPER.replace(old, new)))
    assert [(each.name, each.ends, each.led) for each in found] == [("self.counter", True, False)] * named
