"""The guard that `rollback adopt` writes into a script."""

import codecs
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent, indent

import pytest
from warm_server import WarmPopen

from rollback.errors import UsageError
from rollback.source.guard_diff import guard_diff

HEAD = """\
    import torch
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = torch.utils.data.DataLoader(data)
"""
SIMPLE = "for x in loader:\n    loss.backward()\n"
PREPARED = """\
def train(accelerator, model, loader, optimizer):
    for step, x in enumerate(loader):
        loss = model(x)
        accelerator.backward(loss)
    print(loss)

def main():
    model = accelerator.prepare(make_model())
    optimizer, train_loader, eval_loader = accelerator.prepare(optimizer, train_loader, eval_loader)
    for epoch in range(3):
        train(accelerator, model, train_loader, optimizer)
"""
FOLDS = """\
def train(fold):
    for epoch in range(3):
        for x in loader:
            loss.backward()

for i in range(5):
    train(i)
"""


def added(body: str) -> list[str]:
    source = dedent(HEAD) + dedent(body)
    return [line[1:].strip() for line in guard_diff(source, "train.py").text.splitlines()[2:] if line.startswith("+")]


def test_a_plain_loop_gets_a_guard_and_tells_its_loss() -> None:
    assert added("""
        for epoch in range(3):
            for x in loader:
                loss = model(x).sum()
                loss.backward()
                optimizer.step()
    """) == [
        "import rollback",
        "guard = rollback.Guard(model=model, optimizer=optimizer, loader=loader)",
        "for epoch in guard.epochs(3):",
        "for x in guard:",
        "guard.observe(loss)",
    ]


@pytest.mark.parametrize(
    ("line", "made"),
    [
        ("f(model(x)).backward()", ["(loss := f(model(x))).backward()", "guard.observe(loss)"]),
        ("scaler.scale(f(x)).backward()", ["scaler.scale((loss := f(x))).backward()", "guard.observe(loss)"]),
        ("loss.mean().backward()", ["(observed := loss.mean()).backward()", "guard.observe(observed)"]),
        ("(loss / 4).backward(retain_graph=True)", ["guard.observe(loss / 4)"]),
    ],
)
def test_the_loss_is_not_computed_a_second_time_to_be_told(line: str, made: list[str]) -> None:
    """With dropout that would draw other random numbers, and with BatchNorm count each batch twice."""
    assert (
        added(f"""
        for x in loader:
            {line}
            optimizer.step()
    """)[3:]
        == made
    )


@pytest.mark.parametrize(
    ("step", "made"),
    [
        ("optimizer.step(closure)", ["observed = optimizer.step(closure)", "guard.observe(observed)"]),
        ("loss = optimizer.step(closure)", ["guard.observe(loss)"]),
        (
            "total += optimizer.step(closure=closure).item()",
            ["total += (observed := optimizer.step(closure=closure)).item()", "guard.observe(observed)"],
        ),
    ],
)
def test_the_loss_of_a_closure_is_told_once_behind_the_step_that_runs_it(step: str, made: list[str]) -> None:
    """LBFGS runs it many times for one update, along the way."""
    assert (
        added(f"""
        for x in loader:
            def closure():
                optimizer.zero_grad()
                loss = model(x).sum()
                loss.backward()
                return loss
            {step}
    """)[3:]
        == made
    )


@pytest.mark.parametrize(
    ("epochs", "guarded"),
    [
        ("range(3)", "guard.epochs(3)"),
        ("range(0, n)", "guard.epochs(n)"),
        ("range(1, n + 1)", "(1 + done for done in guard.epochs(n))"),
        ("range(1, n)", "(1 + done for done in guard.epochs(n - 1))"),
        ("range(1, n or 3)", "(1 + done for done in guard.epochs((n or 3) - 1))"),
        ("tqdm(range(n))", "tqdm(guard.epochs(n))"),
    ],
)
def test_epochs_count_as_they_did(epochs: str, guarded: str) -> None:
    body = f"""
        n = 3
        for epoch in {epochs}:
            for x in loader:
                model(x).sum().backward()
                optimizer.step()
    """
    assert f"for epoch in {guarded}:" in added(body)


def test_it_says_what_the_guard_is_handed() -> None:
    scaled = """\
        scaler = torch.amp.GradScaler("cpu")
        steps = 0
        for x in loader:
            scaler.scale(model(x).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            steps += 1
    """
    assert guard_diff(dedent(HEAD) + dedent(scaled), "train.py").keeps == {"model", "optimizer", "loader", "scaler"}


def test_the_guard_takes_no_name_that_the_script_has_given() -> None:
    """Its `guard`, a function or a number, would be another thing from there on."""
    assert added("""
        from lib import guard
        for x in loader:
            loss = guard(model(x)).sum()
            loss.backward()
    """) == [
        "import rollback",
        "run_guard = rollback.Guard(model=model, optimizer=optimizer, loader=loader)",
        "for x in run_guard:",
        "run_guard.observe(loss)",
    ]


def test_what_accelerate_has_prepared_is_handed_over_but_for_loaders_that_are_not_trained_on() -> None:
    """By the names of where it was prepared; and a loop that counts its batches counts from the place in the epoch."""
    assert added(PREPARED) == [
        "import rollback",
        "step = loader.guard.batch_in_epoch",
        "model, optimizer, train_loader = rollback.protect(accelerator, model, optimizer, train_loader)",
        "for epoch in train_loader.guard.epochs(3, rehearse=lambda: next(iter(train_loader.base_dataloader))):",
    ]


def test_it_is_handed_over_behind_what_is_registered_for_accelerates_checkpoints() -> None:
    registering = "    if average:\n        accelerator.register_for_checkpointing(average)\n    print()\n"
    source = PREPARED.replace("    for epoch", f"{registering}    for epoch")
    lines = guard_diff(source, "train.py").text.splitlines()
    place = next(number for number, line in enumerate(lines) if "rollback.protect" in line)
    assert lines[place - 1 : place + 2] == [
        "         accelerator.register_for_checkpointing(average)",
        "+    model, optimizer, train_loader = rollback.protect(accelerator, model, optimizer, train_loader)",
        "     print()",
    ]


@pytest.mark.parametrize(
    "given", ["model.head.parameters()", "[{'params': model[0].parameters()}, *model[1].parameters()]"]
)
def test_of_an_optimizer_of_parts_the_whole_model_is_kept(given: str) -> None:
    """Else buffers of the other parts would not go back with a rollback."""
    source = dedent(HEAD).replace("model.parameters()", given) + SIMPLE
    assert (
        "guard = rollback.Guard(model=model, optimizer=optimizer, loader=loader)" in guard_diff(source, "train.py").text
    )


@pytest.mark.parametrize(
    "made",
    ["copy.deepcopy(model)", "AveragedModel(model, avg_fn=f)", "ModelEma(model)", "EMA(model.parameters(), 0.9)"],
)
def test_an_average_of_the_model_is_kept(made: str) -> None:
    loop = "best = copy.deepcopy(model.state_dict())\nfor x in loader:\n    loss.backward()\n"
    assert "guard = rollback.Guard(model=model, optimizer=optimizer, loader=loader, ema=average)" in added(
        f"average = {made}\n{loop}"
    )
    (guard,) = (line for line in added(f"model = {made}\n{loop}") if "Guard" in line)
    assert "ema=" not in guard


@pytest.mark.parametrize(
    ("made", "none"),
    [
        ("if warm:\n    scheduler = StepLR(optimizer, 9)\n", True),
        ("if warm:\n    scheduler = StepLR(optimizer, 9)\nelif cold:\n    scheduler = OneCycleLR(optimizer)\n", True),
        ("with f():\n    if warm:\n        scheduler = StepLR(optimizer, 9)\n", True),
        ("if warm:\n    scheduler = StepLR(optimizer, 9)\nelse:\n    scheduler = OneCycleLR(optimizer)\n", False),
        ("if warm:\n    scheduler = StepLR(optimizer, 9)\nelse:\n    raise ValueError\n", False),
        ("with f():\n    scheduler = StepLR(optimizer, 9)\n", False),
        ("scheduler = None\nif warm:\n    scheduler = StepLR(optimizer, 9)\n", False),
    ],
)
def test_what_is_made_only_where_a_condition_holds_is_none_elsewhere(made: str, none: bool) -> None:
    source = "def main():\n" + indent(dedent(HEAD) + made + SIMPLE, "    ")
    lines = [line for line in guard_diff(source, "train.py").text.splitlines()[2:] if line.startswith("+")]
    assert ("+    scheduler = None" in lines) == none
    assert "scheduler=scheduler" in "".join(lines)


@pytest.mark.parametrize("arguments", ["scheduler=None", "*, scheduler=None", "scheduler, /"])
def test_what_a_function_may_be_given_is_not_taken_from_it(arguments: str) -> None:
    made = "if scheduler is None:\n    scheduler = StepLR(optimizer, 9)\n"
    source = f"def train({arguments}):\n" + indent(dedent(HEAD) + made + SIMPLE, "    ")
    text = guard_diff(source, "train.py").text
    assert "scheduler = None" not in text
    assert "scheduler=scheduler" in text


@pytest.mark.parametrize(
    ("loop", "leaves"),
    [
        ("for x in loader:\n    loss.backward()\n    if enough:\n        break\n", [8]),
        ("for n in range(3):\n    for x in loader:\n        loss.backward()\n    if enough:\n        break\n", []),
        (
            "for n in range(3):\n    for x in loader:\n        loss.backward()\n        if enough:\n            break\n"
            "    if enough:\n        break\n",
            [11],
        ),
        (
            "for n in range(3):\n    for x in loader:\n        loss.backward()\n        if short:\n            break\n",
            [],
        ),
    ],
)
def test_it_says_where_the_script_may_leave_its_training_in_the_midst_of_an_epoch(loop: str, leaves: list[int]) -> None:
    """Behind a whole epoch the end counts as one; such a run is complete."""
    assert guard_diff(dedent(HEAD) + loop, "train.py").leaves == leaves


def test_an_optimizer_of_several_modules_is_refused_with_what_to_do() -> None:
    source = dedent(HEAD).replace("model.parameters()", "[*a.parameters(), *b.parameters()]") + SIMPLE
    with pytest.raises(UsageError, match="this loop has an optimizer of a and b") as refused:
        guard_diff(source, "train.py")
    assert "ModuleDict" in str(refused.value.hint)


def test_it_is_indented_as_the_script_is() -> None:
    body = "for x in loader:\n\tfor y in x: pass\n\ta = 1; loss = f(x); loss.backward(); optimizer.step()\n"
    lines = guard_diff(dedent(HEAD) + body, "train.py").text.splitlines()
    assert lines[-2:] == [" \ta = 1; loss = f(x); loss.backward(); optimizer.step()", "+\tguard.observe(loss)"]


def test_the_import_goes_behind_what_a_file_has_to_begin_with() -> None:
    lines = guard_diff(
        "#!/usr/bin/env python\n# -*- coding: utf-8 -*-\nn = 3\n" + dedent(HEAD) + SIMPLE, "train.py"
    ).text.splitlines()
    assert lines[3:6] == [" #!/usr/bin/env python", " # -*- coding: utf-8 -*-", "+import rollback"]


def test_a_progress_bar_goes_over_the_guard() -> None:
    lines = added("""
        for epoch in range(3):
            bar = tqdm(enumerate(loader), total=len(loader))
            for i, x in bar:
                loss = model(x)
                loss.backward()
    """)
    assert "guard = rollback.Guard(model=model, optimizer=optimizer, loader=loader)" in lines
    assert "bar = tqdm(enumerate(guard), total=len(loader))" in lines
    assert "i = guard.batch_in_epoch" in lines


@pytest.mark.parametrize(("start", "counted"), [("1", "1"), ("a if b else 1", "(a if b else 1)")])
def test_batches_count_from_where_they_did(start: str, counted: str) -> None:
    body = f"""
        for i, x in enumerate(loader, start={start}):
            model(x).sum().backward()
    """
    assert f"i = guard.batch_in_epoch + {counted}" in added(body)


@pytest.mark.parametrize("parameters", ["model, batches", "model, *, batches"])
def test_a_function_that_is_given_its_loader_is_given_the_guard(parameters: str) -> None:
    assert "train(model, batches=guard)" in added(f"""
        def train({parameters}):
            for x in batches:
                model(x).sum().backward()

        for epoch in range(3):
            train(model, batches=loader)
    """)


def test_code_behind_the_loop_that_needs_a_name_of_its_body_has_a_rehearsal() -> None:
    needs = """
        for epoch in range(3):
            for x in loader:
                loss = model(x).sum()
                loss.backward()
                optimizer.step()
            print(loss)
    """
    assert "for epoch in guard.epochs(3, rehearse=lambda: next(iter(loader))):" in added(needs)
    given_before = needs.replace("for epoch in range(3):", "loss = None\n        for epoch in range(3):", 1)
    assert "for epoch in guard.epochs(3):" in added(given_before)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("print(model)", "0 loops over batches"),
        (
            "for x in loader:\n    model(x).backward()\nfor x in loader:\n    model(x).backward()",
            "2 loops over batches",
        ),
        ("for x in batches():\n    model(x).backward()", "this loop goes over batches()"),
        ("guard = rollback.Guard(model=model)", "has a guard already"),
        (
            "while n < 3:\n    for x in loader:\n        loss.backward()\n    n += 1",
            "begun anew by the `while` in line 5",
        ),
        ("for epoch in trange(3):\n    for x in loader:\n        loss.backward()", "begun anew by the `for` in line 5"),
        (
            "for x in loader:\n    fabric.backward(loss)",
            "line 6: this line calls backward() of fabric with an argument",
        ),
        (
            "for x in loader:\n    (scaler.scale(f(x)) if scaler else f(x)).backward()",
            "this line calls backward() on scaler.scale(f(x)) if scaler else f(x)",
        ),
        (
            "for x in loader:\n    if x: a(); loss.backward()",
            "line 6: this line is on the line that its block begins with",
        ),
        (
            "for x in loader:\n    def f():\n        loss.backward()\n    optimizer.step(f)",
            "line 6: this line is a closure that returns no loss",
        ),
        (
            "for x in loader:\n    def f():\n        loss.backward()\n        return loss\n"
            "    if optimizer.step(f) > 9:\n        break",
            "line 9: this line decides by optimizer.step(f)",
        ),
        ("for i, x in enumerate(loader): loss.backward()", "this line is on the line that its block begins with"),
        ("for x in loader:\n    loss.backward(); print(\n        x)", "where no line of its own can be"),
        (
            PREPARED.replace("train(accelerator, model, train_loader", "train(accelerator, model, active_loader"),
            "goes over active_loader, which is none of what is prepared here",
        ),
        (FOLDS, "line 6: this loop is begun anew by the `for` in line 10"),
        ("for i in range(3):\n    loader = f(i)\n    for x in loader:\n        loss.backward()", "sets loader inside"),
        ("bar = tqdm(loader)\nfor x in bar:\n    loss.backward()", "goes over bar, which line 5 makes of loader"),
        (
            "def train(batches):\n    batches.sampler.set_epoch(1)\n    for x in batches:\n        loss.backward()\n"
            "for epoch in range(3):\n    train(loader)",
            "is in a function that asks batches.sampler in line 6",
        ),
        (
            "for i in range(3):\n    scheduler = StepLR(optimizer, 9)\n    for x in loader:\n        loss.backward()",
            "this loop sets scheduler inside of it (line 6); by hand: make it in front of the loop",
        ),
        (
            "for x, y in zip(loader, other):\n    model(x, y).backward()",
            "as its loader an object whose __iter__ returns zip(loader, other)",
        ),
        (
            "for x in islice(loader, 9):\n    model(x).backward()",
            "what counts or goes beside it begins anew after a resume: guard.batch_in_epoch",
        ),
        (
            "for i, x in enumerate(loader, start=i + 1):\n    model(x).backward()",
            "counts by enumerate from i + 1 on, which it sets itself; by hand: let guard.keep keep",
        ),
        ("def rollback(step):\n    pass\n" + SIMPLE, "something of its own `rollback` (line 5)"),
        ("from db import rollback\n" + SIMPLE, "something of its own `rollback` (line 5)"),
        (
            "for epoch in range(\n        9):\n    for x in loader:\n        model(x).backward()",
            "line 5: what goes over several lines is not changed here; write it on one line: range(9)",
        ),
        ("for epoch in range(0, 9, 3):\n    for x in loader:\n        model(x).backward()", "goes over range(0, 9, 3)"),
        (
            "for epoch in range(first, 9):\n    for x in loader:\n        model(x).backward()",
            "goes over range(first, 9)",
        ),
    ],
)
def test_what_it_cannot_do_is_refused_with_what_to_do_by_hand(body: str, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        guard_diff(dedent(HEAD) + body + "\n", "train.py")
    assert said in f"{refused.value.message}; {refused.value.hint}"
    assert refused.value.hint


def test_a_file_that_is_no_python_is_refused() -> None:
    with pytest.raises(UsageError, match="is not Python that this interpreter reads: line 1"):
        guard_diff("for:", "train.py")


@pytest.mark.parametrize(
    "as_in_file",
    [
        lambda text: text.encode(),
        lambda text: text.replace("\n", "\r\n").encode(),
        lambda text: codecs.BOM_UTF8 + text.encode(),
        lambda text: b"# coding: latin-1\n" + text.replace("train", "entra\xeene").encode("latin-1"),
        lambda text: text.replace("# the data", "# \f the\u2028data").encode(),
    ],
    ids=["plain", "windows", "byte order mark", "latin-1", "form feed"],
)
def test_the_diff_fits_the_bytes_of_the_file(tmp_path: Path, as_in_file: Callable[[str], bytes]) -> None:
    """As an editor on another system has left them; Python takes all of these, and counts no line at a form feed."""
    plain = "# the data\n" + dedent(HEAD) + "for x in loader:\n    loss = f(x)  # train\n    loss.backward()\n"
    made = plain.replace("import torch\n", "import torch\nimport rollback\n").replace("in loader", "in guard")
    made = made.replace("for x", "guard = rollback.Guard(model=model, optimizer=optimizer, loader=loader)\nfor x")
    script = tmp_path / "train.py"
    script.write_bytes(as_in_file(plain))
    with WarmPopen[bytes]([sys.executable, "-m", "rollback", "adopt", script], stdout=subprocess.PIPE) as adopt:
        diff, _ = adopt.communicate()
    subprocess.run(["patch", script], input=diff, cwd=tmp_path, check=True, capture_output=True)
    assert script.read_bytes() == as_in_file(made + "    guard.observe(loss)\n")
