"""The training loop of a script, found in its source."""

import ast
import sys
from collections.abc import Iterable, Iterator
from textwrap import dedent
from typing import Any

import pytest

from rollback.errors import UsageError
from rollback.source.guard_diff import guard_diff
from rollback.source.instrumentation import BY_BATCH, BY_EPOCH, ENUMERATE, EPOCH_MOVED, EPOCHS, RAISED, instrumented
from rollback.source.loop_counters import LoopCounter, loop_counters
from rollback.source.loops import ScriptLoops
from rollback.source.syntax import catches_end, cycles_at, demands_item

PLAIN = """
for epoch in range(3):
    for x in loader:
        loss = f(x)
        loss.backward()
    for x in validation:
        f(x)
"""
IN_FUNCTIONS = """
def update(x):
    f(x).backward()

def train(batches):
    for x in batches:
        update(x)

for epoch in tqdm(range(3)):
    train(loader)
"""
IN_METHODS = """
class Trainer:
    def fit(self):
        for epoch in range(3):
            self.epoch()
    def epoch(self):
        for x in self.loader:
            self.loss(x).backward()
"""
WITHOUT_EPOCHS = """
while going:
    for x in loader:
        f(x).backward()
"""
MICRO = """
for epoch in range(3):
    for x in loader:
        for part in range(4):
            f(x, part).backward()
"""
CHUNKS = """
for epoch in range(3):
    for x, y in loader:
        for part, target in zip(x.chunk(2), torch.chunk(y, 2)):
            f(part, target).backward()
"""
CHUNKS_IN_A_FUNCTION = """
def update(x):
    parts = x.split(4)
    for i, part in enumerate(parts):
        f(part).backward()

for epoch in range(3):
    for x in loader:
        update(x)
"""
FILLED = (
    "micro = [next(batches) for _ in range(4)]",
    "for _ in range(4): micro.append(next(batches))",
    "for _ in range(4): micro += [next(batches)]",
    "micro = list(next(batches) for _ in range(4))",
    "micro: list = [next(batches) for _ in range(4)]",
    "micro = [next(batches), next(batches)]",
    "for k in range(4): micro[k] = next(batches)",
    "micro.extend([next(batches), next(batches)])",
    "def take(it, n): return [next(it) for _ in range(n)]\n    micro = take(batches, 4)",
)
"""Lists of the batches of one update."""
FOLDS = """
for data in all_data:
    for train, test in folds.split(data):
        for x in DataLoader(train):
            f(x).backward()
"""


def lines(source: str) -> tuple[list[int], list[int | None]]:
    """Of the loops over batches, and of the loops over epochs around them."""
    loops = ScriptLoops(source)
    around = [loops.epochs_around.get(loop) for loop in loops.batch_loops]
    return [loop.lineno for loop in loops.batch_loops], [loop.lineno if loop else None for loop in around]


STEPPED = """
class Task:
    def update(s, x):
        f(x).backward()
    def fit(s):
        for epoch in range(3):
            for x in s.loader:
                s.update(x)
"""
TRAINED = """
class Base:
    def train(self):
        for x in self.loader:
            f(x).backward()
class Task(Base):
    pass
task = Task()
for epoch in range(3):
    task.train()
"""
ALSO_COUNTED = """
class Meter:
    def update(self, x):
        self.sum += x
class Task:
    def __init__(self):
        self.meter = Meter()
    def update(self, x):
        f(x).backward()
    def evaluate(self):
        for x in validation:
            self.meter.update(x)
task = Task()
meter = Meter()
for epoch in range(3):
    for x in loader:
        task.update(x)
    task.evaluate()
    for x in validation:
        meter.update(x)
"""
OF_ITS_OWN_CLASS = """
class Task:
    def take(self, x):
        f(x).backward()
class Other(Task):
    def run(self):
        for x in loader:
            self.take(x)
class Evaluation:
    def take(self, x):
        self.count += 1
    def run(self):
        for x in validation:
            self.take(x)
for epoch in range(3):
    Other().run()
    Evaluation().run()
"""
OF_ONE_OF_TWO = """
class Plain:
    def update(self, x):
        f(x).backward()
class Other:
    def update(self, x):
        g(x).backward()
    def __enter__(self):
        return self
task = Plain() if plain else Other()
for epoch in range(3):
    for x in loader:
        task.update(x)
"""
DEFINED_TWICE = OF_ONE_OF_TWO.replace("Other", "Plain").replace("g(x).backward()", "g(x)")
IN_A_CONTEXT = OF_ONE_OF_TWO.replace("task = Plain() if plain else Other()", "with Other() as task: pass")
WITH_A_BAR = """
class Task:
    def update(self, x):
        f(x).backward()
def fit(task):
    for epoch in range(3):
        for x in loader:
            task.update(x)
        with tqdm(validation) as bar:
            for x in bar:
                bar.update(1)
"""
HANDED_ON = """
class Task:
    def step(self, x):
        f(x).backward()
def fit(task):
    for epoch in range(3):
        for x in loader:
            task.step(x)
    for x in validation:
        metric.step(x)
metric = Metric()
"""


@pytest.mark.parametrize(
    ("source", "batches", "epochs"),
    [
        (STEPPED, [7], [6]),
        (TRAINED, [4], [9]),
        (HANDED_ON, [7], [6]),
        (ALSO_COUNTED, [16], [15]),
        (OF_ITS_OWN_CLASS, [7], [15]),
        (WITH_A_BAR, [7], [6]),
        (OF_ONE_OF_TWO, [12], [11]),
        (IN_A_CONTEXT, [12], [11]),
        (DEFINED_TWICE, [12], [11]),
        (PLAIN, [3], [2]),
        (IN_FUNCTIONS, [6], [9]),
        (IN_METHODS, [7], [4]),
        (WITHOUT_EPOCHS, [3], [None]),
        (MICRO, [3], [2]),
        (CHUNKS, [3], [2]),
        (CHUNKS_IN_A_FUNCTION, [8], [7]),
        (FOLDS, [4], [None]),
        ("for part in x.split(4):\n    f(part).backward()", [1], [None]),
        ("for x in loader:\n    f(x)", [], []),
        ("for i in range(9):\n    f(next(batches)).backward()", [], []),
        *((f"for i in range(9):\n    {filled}\n    for x in micro: f(x).backward()", [], []) for filled in FILLED),
    ],
)
def test_it_is_the_loop_whose_body_calls_backward(source: str, batches: list[int], epochs: list[int | None]) -> None:
    assert lines(source) == (batches, epochs)


@pytest.mark.parametrize(
    ("call", "taken"),
    [
        ("update(micro)", True),
        ("update(batches=micro)", True),
        ("update([next(it) for _ in range(2)])", True),
        ("update(drawn(it))", True),
        ("passed_on(micro)", True),
        ("update(loader)", False),
        ("passed_on(loader)", False),
    ],
)
def test_a_loop_over_batches_that_a_call_gives_its_function_is_part_of_an_update(call: str, taken: bool) -> None:
    loops = ScriptLoops(
        "def update(batches):\n  for x in batches:\n    f(x).backward()\n"
        "def passed_on(given):\n  update(given)\n  if deep: passed_on(given)\n"
        "def drawn(it):\n  return [next(it), next(it)]\n"
        "for e in range(3):\n"
        "  it = iter(loader)\n"
        f"  for i in range(9):\n    micro = [next(it) for _ in range(2)]\n    {call}\n    optimizer.step()"
    )
    assert [loop.lineno for loop in loops.batch_loops] == ([] if taken else [2])


TRAIN_EPOCH = "def train_epoch(data):\n  for x in data:\n    f(x).backward()\n    optimizer.step()\n"


@pytest.mark.parametrize(
    "calls",
    [
        "if overfit:\n  train_epoch([next(iter(loader))])\nelse:\n  for e in range(3):\n    train_epoch(loader)",
        "def main():\n  data = list(next(iter(loader)))\n  for e in range(3):\n    train_epoch(loader)",
    ],
)
def test_a_loop_that_some_call_gives_a_loader_is_the_training_loop(calls: str) -> None:
    assert [loop.lineno for loop in ScriptLoops(TRAIN_EPOCH + calls).batch_loops] == [2]


@pytest.mark.parametrize("given", ["[next(it)]", "loader"])
def test_functions_that_give_on_what_they_are_given_are_each_looked_at_once(given: str) -> None:
    """There are 2**40 ways through them."""
    through = "".join(f"def f{n}(x):\n  f{n - 1}(x)\n  f{n - 1}(x)\n" for n in range(1, 41))
    source = f"def f0(x):\n  for y in x:\n    f(y).backward()\n{through}f40({given})"
    assert len(ScriptLoops(source).batch_loops) == (given == "loader")


def test_a_loop_over_what_a_method_is_given_is_part_of_an_update_too() -> None:
    loops = ScriptLoops(
        "class T:\n"
        "  def update(self, batches, n):\n    for x in batches:\n      f(x).backward()\n"
        "  def fit(self):\n    for i in range(9):\n      micro = [next(it), next(it)]\n      self.update(micro, i)"
    )
    assert loops.batch_loops == []


GATHERED = """
def again(x):
    micro.append(x)

def update(batches):
    for x in batches:
        f(x).backward()
    optimizer.step()

for epoch in range(3):
    micro = []
    for x in loader:
        micro.append(x)
        if len(micro) == 2:
            update(micro)
            micro = []
    if micro:
        update(micro)
"""


BESIDE_AN_AGENT = """class Agent:
    def update(self, batch):
        loss(batch).backward()
class Meter:
    def update(self, batch):
        self.seen += len(batch)
def evaluate(loader, meter):
    for batch in loader:
        meter.update(batch)
def train(loader):
    agent = Agent()
    for batch in loader:
        agent.update(batch)
"""


def test_an_argument_is_no_object_that_trains_where_the_file_shows_one_that_does() -> None:
    """Only where no loop trains otherwise it may be one."""
    assert [loop.lineno for loop in ScriptLoops(BESIDE_AN_AGENT).batch_loops] == [12]
    guessed = BESIDE_AN_AGENT.partition("def train")[0]
    assert [loop.lineno for loop in ScriptLoops(guessed).batch_loops] == [8]


@pytest.mark.parametrize(
    ("old", "new", "gathers"),
    [
        ("micro", "micro", True),
        ("            micro = []", "            print(x)\n            micro.clear()", True),
        ("            micro = []", "            del micro[:]", True),
        ("micro.append(x)", "micro += [(x, 1)]", True),
        ("micro", "self.micro", True),
        ("    if micro:\n        update(micro)", "", True),
        # the list may have batches at a checkpoint
        ("            micro = []", "", False),
        ("            micro = []", "            micro = micro[1:]", False),
        ("            micro = []", "            micro[0] = []", False),
        ("            micro = []", "            if x: micro = []", False),
        ("            micro = []", "            if x: continue\n            micro = []", False),
        ("            micro = []", "            micro = []\n            micro.append(x)", False),
        ("            micro = []", "            micro = []\n        optimizer.step()", False),
        ("        micro.append(x)", "        if hard: update([x])\n        micro.append(x)", False),
        ("        micro.append(x)", "        micro.append(x)\n        if full: update(micro)", False),
        ("    if micro:\n        update(micro)", "    else:\n        update(micro)\n        micro = []", True),
        (
            "        if len(micro) == 2:\n            update(micro)\n            micro = []\n",
            "        print(x)\n    else:\n        update(micro)\n        micro = []\n",
            False,
        ),
        ("    micro = []\n    for", "    for", False),
        # or others than those that it was given since
        (
            "            update(micro)\n            micro",
            "            micro.extend(hard)\n            update(micro)\n            micro",
            False,
        ),
        ("            update(micro)\n            micro", "            update(micro + held)\n            micro", False),
        (
            "            update(micro)\n            micro",
            "            update(held)\n            held = micro\n            micro",
            False,
        ),
        ("            micro = []", "            micro = []\n            again(x)", False),
        ("    micro = []\n    for", "    micro = []\n    micro += held\n    for", False),
        ("    micro = []\n    for", "    micro = []\n    held = micro\n    for", False),
        # what the update does to the list is gone with it
        ("f(x).backward()", "f(x).backward()\n        micro.append(x)", True),
        # or the loop passes over some
        ("        micro.append", "        if x: continue\n        micro.append", False),
        ("        micro.append(x)", "        if x: micro.append(x)", False),
        ("        micro.append(x)", "        x and micro.append(x)", False),
    ],
)
def test_a_loop_that_gathers_the_batches_of_an_update_trains_on_them(old: str, new: str, gathers: bool) -> None:
    """Where its list is empty between updates."""
    source = GATHERED.replace(old, new)
    loops = ScriptLoops(source)
    line = next(at for at, text in enumerate(source.splitlines(), 1) if "in loader" in text)
    assert [loop.lineno == line for loop in loops.batch_loops] == [gathers]
    assert [loop.lineno for loop in loops.gathering_loops] == [line] * gathers
    assert len(loops.epoch_loops) == 1


def test_a_loop_that_gathers_may_go_over_its_list_by_itself() -> None:
    loops = ScriptLoops(
        "micro = []\nfor x in loader:\n  micro.append(x)\n"
        "  if full:\n    for m in micro: f(m).backward()\n    optimizer.step()\n    micro.clear()"
    )
    assert [loop.lineno for loop in loops.batch_loops] == [2]


def test_a_model_s_own_train_is_not_the_script_s_method_of_that_name() -> None:
    source = dedent("""
        class Trainer:
            def train(self):
                loss.backward()
        for x in loader:
            model.train()
    """)
    assert lines(source) == ([], [])


@pytest.mark.parametrize(
    ("line", "trains"), [(3, True), (6, False), (9, None)], ids=["the loop", "another loop", "elsewhere"]
)
def test_what_a_line_iterates_is_trained_on_or_not(line: int, trains: bool | None) -> None:
    assert ScriptLoops(PLAIN).trains_at(line) is trains


@pytest.mark.parametrize(
    ("body", "sets"),
    [
        ("  model.train()\n  f(x).backward()\n", True),
        ("  update(x)\n\ndef update(x):\n  net.train()\n  net(x).backward()\n", True),
        ("  f(x).backward()\nmodel.train()\n", False),
        ("  model.train(is_training)\n  f(x).backward()\n", False),
        ("  f(x).backward()\n  look()\n\ndef look():\n  net.eval()\n  net.train()\n", False),
    ],
)
def test_a_training_loop_may_put_its_model_in_training_mode_by_itself(body: str, sets: bool) -> None:
    assert ScriptLoops("for x in loader:\n" + body).sets_mode_at(1) is sets


def test_a_look_at_one_batch_is_no_training_and_a_loop_that_yields_is_asked_by_its_caller() -> None:
    assert ScriptLoops("x = next(iter(loader))").trains_at(1) is False
    assert ScriptLoops("def endless():\n    for x in loader:\n        yield x").trains_at(2) is None


@pytest.mark.parametrize(
    ("source", "gathers"),
    [
        ("count = len(list(loader))", True),
        ("labels = [y for _, y in loader]", True),
        ("total = sum(y for _, y in loader)", True),
        ("batches = (to_device(x) for x in loader)", False),
        ("batches = iter(loader)", False),
    ],
)
def test_what_takes_all_batches_at_once_trains_on_none(source: str, gathers: bool) -> None:
    assert ScriptLoops(source).gathers_at(1) is gathers


def test_counts_of_the_script_s_own_are_named_with_what_they_decide() -> None:
    source = dedent("""
        for x in loader:
            f(x).backward()
            seen += 1
            steps += 1
            total += 8
            if steps == 100:
                break
    """)
    loops = ScriptLoops(source)
    seen, steps = LoopCounter("seen", 4, ends=False, restored=True), LoopCounter("steps", 5, ends=True, restored=True)
    assert loop_counters(loops) == [seen, steps]


@pytest.mark.parametrize(
    ("head", "end", "name", "ends"),
    [
        ("while True:", "if step >= 9: break", "step", True),
        ("while step < 9:", "pass", "step", True),
        ("while going:", "pass", "step", False),
        ("while True:", "if self.step >= self.steps: return", "self.step", True),
        ("while True:", "if state['step'] >= 9: break", "state['step']", True),
        ("for i in range(99):", "if step >= 9: break", "step", True),
    ],
)
def test_so_they_are_in_loops_that_take_their_batches_by_next(head: str, end: str, name: str, ends: bool) -> None:
    source = f"def run(self):\n  {head}\n    train(next(batches))\n    {name} += 1\n    {end}\n"
    found = loop_counters(ScriptLoops(source + "def train(x):\n  f(x).backward()\n"))
    carried = name.partition("[")[0]
    assert (carried, 4, ends) in [(counter.name, counter.line, counter.ends) for counter in found]


@pytest.mark.parametrize(
    ("turn", "named"),
    [("n += 1", True), ("n += 2", True), ("n = later(n)", True), ("m += 1", False)],
)
def test_a_count_by_which_a_loop_over_epochs_is_left_is_restored(turn: str, named: bool) -> None:
    """A patience."""
    loop = "for epoch in range(9):\n  for x in loader:\n    f(x).backward()\n"
    found = loop_counters(ScriptLoops(f"{loop}  if worse(): {turn}\n  if n > 3: break"))
    assert found == [LoopCounter("n", 4, ends=True, restored=True, counts="1" in turn)] * named


def test_a_patience_that_a_method_counts_which_the_loop_calls_is_named_and_its_variables_are_not() -> None:
    loop = "for x in loader:\n  f(x).backward()\n  if patience.over(x): break\n"
    method = (
        "class Patience:\n  def over(self, x):\n    n = 0\n    n += 1\n    self.count += 1\n    return self.count > 9"
    )
    assert loop_counters(ScriptLoops(loop + method)) == [LoopCounter("self.count", 8, ends=True)]


@pytest.mark.parametrize(
    ("before", "counts", "named"),
    [
        ("i = i", "i", False),  # torchvision's similarity prints the number of the batch from 1 on so
        ("n = 0", "n", False),
        ("n = n % 4", "n", True),
        ("if i % 4 == 0: n = 0", "n", True),
        ("lst[n] = 0", "n", True),
    ],
)
def test_what_each_turn_of_the_loop_sets_anew_is_no_count(before: str, counts: str, named: bool) -> None:
    source = f"for i, x in enumerate(loader):\n  f(x).backward()\n  {before}\n  if i % 4: {counts} += 1\n"
    found = [counter for counter in loop_counters(ScriptLoops(source)) if counter.line > 1]
    assert [(counter.name, counter.ends) for counter in found] == [(counts, False)] * named


@pytest.mark.parametrize(("does", "named"), [("scaler.step(optimizer)", True), ("print(x)", False)])
def test_the_place_of_the_last_update_is_led_where_the_next_one_waits_for_it(does: str, named: bool) -> None:
    """As YOLOv5 accumulates gradients: behind a resume its first update would have one batch."""
    source = f"for i, x in enumerate(loader):\n  f(x).backward()\n  if i - last >= n:\n    {does}\n    last = i\n"
    found = LoopCounter("last", 5, ends=False, restored=True, counts=False)
    assert (found in loop_counters(ScriptLoops(source))) is named


def test_a_while_around_a_training_loop_may_be_ended_by_a_count_in_it() -> None:
    loops = ScriptLoops("while steps < 9:\n  for x in loader:\n    f(x).backward()\n    steps += 1")
    assert loop_counters(loops) == [LoopCounter("steps", 4, ends=True, restored=True)]


@pytest.mark.parametrize(
    ("call", "restored"),
    [("enumerate(loader)", True), ("enumerate(loader, epoch * 9)", True), ("enumerate(loader, i + 1)", False)],
)
def test_what_enumerate_counts_is_restored_unless_it_goes_on_from_where_it_was(call: str, restored: bool) -> None:
    loops = ScriptLoops(f"for i, x in {call}:\n  f(x).backward()\n  if i == 9: break")
    assert loop_counters(loops) == [LoopCounter("i", 1, ends=True, restored=restored)]


@pytest.mark.parametrize(
    ("source", "named"),
    [
        (
            "for x in itertools.islice(loader, 10):\n    f(x).backward()",
            [("itertools.islice(loader, 10)", 1, True, True)],
        ),
        ("for x in islice(loader, 2, 10):\n    f(x).backward()", [("islice(loader, 2, 10)", 1, True, False)]),
        ("for i, x in zip(range(10), loader, strict=False):\n    f(x).backward()",
         [("zip(range(10), loader, strict=False)", 1, True, True)]),
        ("for x, i in zip(loader, range(10)):\n    f(x).backward()", [("zip(loader, range(10))", 1, True, True)]),
        ("for i, x in zip(count(), loader):\n    f(x).backward()", [("zip(count(), loader)", 1, False, False)]),
        ("for x, y in zip(loader, other):\n    f(x).backward()", []),
        ("for s in range(60):\n    if s % 2: x = next(batches)\n    f(x).backward()", [("s", 1, True, False)]),
        *(
            (
                f"for s in range(60):\n    {filled}\n    for i, x in enumerate(micro): f(x).backward()",
                [("s", 1, True, False)],
            )
            for filled in FILLED
        ),
        # epochs, whatever takes their batches
        ("for e in range(3):\n  it = iter(loader)\n  while True:\n    f(next(it)).backward()", []),
        ("for e in range(3):\n  it, i = iter(loader), 0\n  while i < 9:\n    f(next(it)).backward()\n    i += 1",
         [("i", 5, True, True)]),
        ("def one(it):\n  for s in range(9):\n    if s: f(next(it)).backward()\nfor e in range(3):\n  one(iter(load))",
         [("s", 2, True, False)]),
        ("for s in range(9):\n  if s: x = next(it)\n  try: x = next(it)\n  except StopIteration: it = iter(loader)\n"
         "  f(x).backward()", [("s", 1, True, False)]),
        ("for s in range(9):\n  if s: x = next(it)\n  for m in range(3):\n    f(next(it)).backward()",
         [("s", 1, True, False)]),
        *(
            (f"for s in {numbers}:\n    micro = [next(batches) for _ in range(4)]\n"
             "    for x in micro: f(x).backward()\n    optimizer.step()", [("s", 1, True, False)])
            for numbers in ("list(range(9))", "np.arange(9)", "itertools.count()")
        ),
        ("while True:\n    for micro in range(4):\n        f(next(batches)).backward()", []),
        ("for epoch in range(3):\n    for x in loader:\n        f(x).backward()\n    next(other)", []),
    ],
)  # fmt: skip
def test_what_limits_a_training_loop_from_outside_is_named_too(
    source: str, named: list[tuple[str, int, bool, bool]]
) -> None:
    found = [counter for counter in loop_counters(ScriptLoops(source)) if counter.counts]
    assert found == [LoopCounter(*given) for given in named]


COUNTED_IN_TURNS = """
for epoch in range(5):
  it = iter(loader)
  for i in range(40):
    x = next(it)
    f(x).backward()
    optimizer.step()
    steps += 1
  if steps >= 130: break
"""
LEFT_BY_VALIDATION = """
for epoch in range(5):
  for x in loader: f(x).backward()
  for x in validation:
    if shown >= 1: break
  else:
    HERE
  shown += 1
"""


@pytest.mark.parametrize(
    ("source", "named"),
    [
        (COUNTED_IN_TURNS, []),
        (LEFT_BY_VALIDATION.replace("HERE", "pass"), []),
        (LEFT_BY_VALIDATION.replace("HERE", "if shown > 3: break"), []),
        (LEFT_BY_VALIDATION.replace("HERE", "if shown > 3: break").replace("range(5)", "epochs"), []),
    ],
)
def test_what_is_led_or_ends_another_loop_does_not_end_the_epochs(source: str, named: list[str]) -> None:
    found = loop_counters(ScriptLoops(source))
    assert [counter.name for counter in found if counter.ends and not counter.restored] == named


def run(source: str, **names: object) -> dict[str, object]:
    space: dict[str, object] = {BY_BATCH: lambda *_: (), **names}
    exec(compile(instrumented(ScriptLoops(source), "script.py").tree, "script.py", "exec"), space)
    return space


class Moved(BaseException):
    pass


def test_a_led_loop_asks_for_its_epochs_and_leaves_a_body_that_is_moved() -> None:
    log: list[object] = []

    def f(x: int) -> object:
        if x == 20:
            raise Moved
        log.append(x)
        return type("Loss", (), {"backward": lambda self: None})()

    source = "for epoch in range(3):\n    for x in loader(epoch):\n        f(x).backward()\n    log.append('behind')"
    given = {
        EPOCHS: lambda numbers, filename, line: [numbers[0], numbers[2]],
        EPOCH_MOVED: Moved,
        RAISED: tuple,
        BY_EPOCH: lambda *_: (),
    }
    run(source, loader=lambda epoch: [epoch * 10, epoch * 10 + 1], f=f, log=log, **given)
    assert log == [0, 1, "behind"]


@pytest.mark.parametrize(
    ("source", "counted"),
    [
        ("for i, x in enumerate(loader, 1):\n    seen.append(i)\n    f(x).backward()", [101, 102]),
        ("i = 1\nfor i, x in enumerate(loader, start=i):\n    seen.append(i)\n    f(x).backward()", [101, 102]),
        ("for x in (x for i, x in enumerate(loader)):\n    seen.append(x)\n    f(x).backward()", ["a", "b"]),
    ],
)
def test_a_loop_counts_its_batches_by_what_steers_it_from_the_start_that_the_script_gives(
    source: str, counted: list[Any]
) -> None:
    loss = type("Loss", (), {"backward": lambda self: None})()
    seen: list[Any] = []
    run(source, loader="ab", f=lambda x: loss, seen=seen, **{ENUMERATE: from_hundred})
    assert seen == counted


@pytest.mark.parametrize(
    ("before", "around", "counts"),
    [
        ("bar = tqdm(enumerate(loader, 1))", "for i, x in bar", True),
        ("bar = enumerate(loader, 1)\nif first:\n    bar = tqdm(bar, total=2)", "for i, x in bar", True),
        ("with tqdm(enumerate(loader, 1)) as bar:\n  pass", "for i, x in bar", True),
        ("bar = enumerate(loader, 1)", "for i, x in tqdm(bar)", True),
        ("bar = tqdm(enumerate(loader, 1))\nbar = pairs", "for i, x in bar", False),
        ("def f2():\n    bar = tqdm(enumerate(loader, 1))\nbar = pairs", "for i, x in bar", False),
        ("n = len([*enumerate(loader)])\nbar = pairs", "for i, x in tqdm(bar, total=n)", False),
    ],
)
def test_a_count_by_enumerate_in_a_variable_is_found_and_no_other_pair_is_taken_for_one(
    before: str, around: str, counts: bool
) -> None:
    loss = type("Loss", (), {"backward": lambda self: None})()
    seen: list[int] = []
    given = {"loader": "ab", "pairs": [(1, "a"), (2, "b")], "tqdm": lambda items, total=0: Bar(items), "first": True}
    source = f"{before}\n{around}:\n    seen.append(i)\n    f(x).backward()"
    run(source, **given, f=lambda x: loss, seen=seen, **{ENUMERATE: from_hundred})
    assert seen == ([101, 102] if counts else [1, 2])


def test_where_backward_is_called_in_another_file_each_loop_of_this_one_counts_by_what_steers_it() -> None:
    """As in MAE and Swin: a helper of a further file makes the update."""
    seen: list[int] = []
    for body in ("scaler(optimizer)", "layer()"):  # a loop over layers is to stay what a compiler knows
        for is_script in (True, False):
            source = f"for i, x in enumerate(logged(loader)):\n    seen.append(i)\n    {body}"
            given = {"loader": "ab", "logged": iter, "seen": seen, "scaler": print, "layer": print, "optimizer": ""}
            tree = instrumented(ScriptLoops(source, is_script=is_script), "engine.py").tree
            exec(compile(tree, "engine.py", "exec"), {**given, ENUMERATE: from_hundred})
    assert seen == [100, 101] * 2 + [0, 1] * 2


@pytest.mark.parametrize(
    ("loop", "asks"),
    [
        ("for epoch in range(3):\n    train()", True),
        ("for n in range(3):\n    train(optimizer)", True),
        ("for n in range(3):\n    layers[n]()", False),
    ],
)
def test_where_another_file_trains_the_script_s_loops_over_epochs_are_led_and_no_others(loop: str, asks: bool) -> None:
    assert (EPOCHS in ast.unparse(instrumented(ScriptLoops(loop), "script.py").tree)) == asks
    assert EPOCHS not in ast.unparse(instrumented(ScriptLoops(loop, is_script=False), "module.py").tree)


@pytest.mark.parametrize(
    ("before", "head", "inside"),
    [
        ("", "for epoch in trange(3, disable=True)", False),
        ("", "for epoch in tqdm.auto.trange(3)", False),
        ("", "for run.epoch in tqdm(range(3), desc='epochs')", True),
        ("bar = tqdm(range(3))", "for epoch in bar", False),
        ("with trange(3) as bar:\n  pass", "for epoch in bar", False),
        ("run.epochs = range(3)", "for run.epoch in run.epochs", None),
        ("run.epochs = range(3)", "for epoch in tqdm(run.epochs)", None),
        ("bar = range(3)\nbar = [0, 1]", "for epoch in bar", None),
        ("", "for epoch in epochs()", None),
    ],
)
def test_a_loop_over_epochs_is_led_also_by_way_of_a_bar_or_a_variable(
    before: str, head: str, inside: bool | None
) -> None:
    """inside: whether it is the range in the loop's head that is exchanged, and not all that the loop goes over."""
    body = "    for phase in ['train', 'val']:\n        for x in loaders[phase]:\n            f(x).backward()"
    (loop,) = [
        node
        for node in ast.walk(instrumented(ScriptLoops(f"{before}\n{head}:\n{body}"), "a.py").tree)
        if isinstance(node, ast.For)
    ][:1]
    assert (EPOCHS in ast.unparse(loop.iter)) == (inside is not None)
    assert ast.unparse(loop.iter).startswith(EPOCHS) == (inside is False)
    assert ast.unparse(loop).count(EPOCHS) == (inside is not None), "not the loop over phases"


@pytest.mark.parametrize(
    ("source", "line", "found"),
    [
        ("while i < 3:\n    for x in loader:\n        f(x).backward()", 2, 1),
        ("for e in epochs:\n    train(e)", 2, 1),
        ("for x in loader:\n    f(x).backward()", 1, None),
        ("def cycle(loader):\n    while True:\n        for x in loader:\n            yield x", 3, None),
        ("for i in range(9):\n    f(next(batches)).backward()", 2, None),
    ],
)
def test_what_begins_a_loader_anew_is_the_loop_around_its_own(source: str, line: int, found: int | None) -> None:
    loop = ScriptLoops(source).restarting_loop_at(line)
    assert (loop.lineno if loop is not None else None) == found


def from_hundred(items: Iterable[Any], start: int = 0) -> Iterator[tuple[int, Any]]:
    return enumerate(items, 100 + start)


class Bar:
    def __init__(self, items: Iterable[Any]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_an_error_that_leaves_a_loop_that_trains_is_told_of_and_goes_on() -> None:
    told: list[object] = []
    source = (
        "try:\n  for x in (1, 2):\n    f(x).backward()\nexcept ValueError as e:\n  caught = e.__traceback__.tb_lineno"
    )

    def note() -> tuple[()]:
        told.append(type(sys.exc_info()[1]))
        return ()

    assert run(source, f=lambda x: int("a"), **{RAISED: note})["caught"] == 3
    assert told == [ValueError]


def test_lines_of_tracebacks_stay() -> None:
    tree = instrumented(ScriptLoops(PLAIN), "script.py").tree
    assert tree.body[0].lineno == 2


@pytest.mark.parametrize(
    ("line", "trains"),
    [
        ("x = next(iter(loader))", False),
        ("x = next(batches)", False),
        ("batches = iter(loader); x = next(batches)", None),
        ("batches = iter(loader)", None),
    ],
)
def test_an_iterator_that_is_made_and_taken_from_in_one_line_is_no_look_at_a_batch(
    line: str, trains: bool | None
) -> None:
    assert ScriptLoops(line).trains_at(1) is trains


@pytest.mark.parametrize(
    ("source", "trains"),
    [
        ("while step < 9:\n    for _ in range(2):\n        x = next(batches)\n        loss(x).backward()", None),
        ("for i in range(9):\n    part = 2\n    x = next(batches)\n    optimizer.step(engine(x))", None),
        ("def train_step(batches):\n    part = 2\n    x = next(batches)\n    loss(x).backward()", None),
        ("for i in range(9):\n    part = 2\n    x = next(batches)\n    show(x)", False),
        ("def main():\n    part = 2\n    x = next(batches)\n    for y in loader: loss(y).backward()", False),
    ],
)
def test_a_batch_of_a_generator_is_trained_on_where_it_is_taken_in_a_loop_that_trains(
    source: str, trains: bool | None
) -> None:
    assert ScriptLoops(source).trains_at(3) is trains


@pytest.mark.parametrize(
    ("source", "cycles"),
    [
        ("import itertools as it\nfor x in enumerate(it.cycle(loader)): pass", True),
        ("from itertools import cycle\nbatches = cycle(loader)", True),
        ("def cycle(loader): ...\nbatches = cycle(loader)", False),
        ("from itertools import cycle\nfor x in zip(loader, cycle(prompts)): pass", False),
        ("import itertools\nfor x in loader: pass", False),
    ],
)
def test_itertools_cycle_is_known_by_its_import(source: str, cycles: bool) -> None:
    assert cycles_at(ast.parse(source), 2) is cycles


@pytest.mark.parametrize(
    ("taken", "demanded"),
    [
        ("x = next(batches)", True),
        ("for x in batches: pass", False),
        ("x = next(batches, None)", False),
        ("try:\n    x = next(batches)\nexcept StopIteration:\n    pass", False),
        ("try:\n    x = next(batches)\nexcept:\n    pass", False),
        ("try:\n    x = next(batches)\nexcept OSError:\n    pass", True),
        ("try:\n    pass\nexcept StopIteration:\n    x = next(batches)", True),
        ("try:\n    for _ in range(3):\n        x = next(batches)\nexcept Exception:\n    raise", True),
        ("try:\n    for _ in range(3):\n        x = next(batches)\nexcept StopIteration:\n    pass", False),
    ],
)
def test_who_asks_by_next_may_be_prepared_for_an_end(taken: str, demanded: bool) -> None:
    line = next(number for number, text in enumerate(taken.splitlines(), 1) if "batches" in text)
    tree = ast.parse(taken)
    assert (demands_item(tree, line) and not catches_end(tree, line)) is demanded


@pytest.mark.parametrize("read", [ScriptLoops, lambda source: guard_diff(source, "train.py")])
def test_what_is_nested_too_deeply_to_be_read_is_refused(read: Any) -> None:
    """Python compiles it; who reads its tree by functions that call themselves does not come to its end."""
    source = PLAIN + "total = " + "1 + " * 600 + "1\nbatches = iter(loader)\nfor i in range(3):\n  f(next(batches))\n"
    compile(source, "train.py", "exec")
    with pytest.raises(UsageError, match=r"line 8 of the source is nested 280 levels deep or more"):
        read(source)
    with pytest.raises(UsageError if read is not ScriptLoops else SyntaxError, match="is nested too deeply"):
        read(f"total = {'1 + ' * 30_000}1")
