"""How often a probe batch gives the right answer: `python scripts/bench_probe.py [--seeds 3]`.

Small jobs are trained with one fault each, of several sizes, and watched by the sentinel. When it would have the model
asked, the model is asked, by the guard's rule. A row for each kind of fault: how many runs were called before, got each
answer, or were never asked. The sizes are not chosen by what comes out: some faults show at once, some never.

And without a fault: by how many noise units the loss of a known batch is up 64 to 230 steps later.
"""

import argparse
import collections
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rollback.sentinel import Kind, Observation, Sentinel
from rollback.sentinel.baseline import Baseline
from rollback.sentinel.probe import ProbeAnswer

FAULT_AT, STEPS, KEPT_EVERY = 300, 500, 100
INPUTS, CLASSES, VOCABULARY, LENGTH = 20, 10, 32, 16
FAULTS = {
    "labels": (0.1, 0.2, 0.3, 0.5),  # this share of them is random
    "weights": (0.2, 0.5, 1.0),  # noise of this share of each tensor's spread is added, once
    "weight decay": (0.01, 0.03, 0.1),  # so much of each weight is lost in each step
}


@dataclass
class Known:
    """A batch, as it was trained on."""

    step: int
    x: Tensor
    y: Tensor
    random: Tensor
    loss: float
    level: float


class Classes:
    """Noisy classes of normal inputs; with `size`, so many samples that come again."""

    def __init__(self, seed: int, batch: int, size: int | None = None) -> None:
        self.source = torch.Generator().manual_seed(seed)
        self.batch, self.way = batch, torch.randn(INPUTS, CLASSES, generator=self.source)
        self.all = self.draw(size) if size is not None else None
        wide = [nn.Linear(INPUTS, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2)]
        self.model: nn.Module = nn.Sequential(*wide, nn.Linear(64, CLASSES))
        self.kinds = CLASSES

    def draw(self, count: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, INPUTS, generator=self.source)
        return x, (x @ self.way + 2 * torch.randn(count, CLASSES, generator=self.source)).argmax(1)

    def next(self) -> tuple[Tensor, Tensor]:
        if self.all is None:
            return self.draw(self.batch)
        chosen = torch.randint(len(self.all[0]), (self.batch,), generator=self.source)
        return self.all[0][chosen], self.all[1][chosen]


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Embedding(VOCABULARY, 32)
        self.layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True)
        self.out = nn.Linear(32, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.out(self.layer(self.into(x), src_mask=mask, is_causal=True)).flatten(0, 1)  # type: ignore[no-any-return]


class Texts:
    """Texts of a Markov chain."""

    def __init__(self, seed: int, batch: int) -> None:
        self.source = torch.Generator().manual_seed(seed)
        self.batch, self.chain = batch, (2 * torch.randn(VOCABULARY, VOCABULARY, generator=self.source)).softmax(-1)
        self.model: nn.Module = Decoder()
        self.kinds = VOCABULARY

    def next(self) -> tuple[Tensor, Tensor]:
        text = [torch.randint(VOCABULARY, (self.batch,), generator=self.source)]
        for _ in range(LENGTH):
            text.append(torch.multinomial(self.chain[text[-1]], 1, generator=self.source)[:, 0])
        whole = torch.stack(text, 1)
        return whole[:, :-1], whole[:, 1:].flatten()


JOBS: dict[str, tuple[Callable[[int], Any], float]] = {
    "classes": (lambda seed: Classes(seed, 32), 3e-3),
    "classes, fast": (lambda seed: Classes(seed, 32), 3e-2),
    "small batches": (lambda seed: Classes(seed, 8), 1e-2),
    "many epochs": (lambda seed: Classes(seed, 32, 1024), 3e-3),
    "texts": (lambda seed: Texts(seed, 16), 3e-3),
}


class Training:
    def __init__(self, job: str, seed: int) -> None:
        torch.manual_seed(seed)
        make, rate = JOBS[job]
        self.task = make(seed)
        self.optimizer = torch.optim.AdamW(self.task.model.parameters(), lr=rate)
        self.loss = nn.CrossEntropyLoss()

    def step(
        self, step: int, fault: str | None = None, size: float = 0.0
    ) -> tuple[Tensor, Tensor, Tensor, float, float]:
        """Returns the batch, the random state before it, its loss, and the gradient norm."""
        model, (x, y) = self.task.model, self.task.next()
        if fault == "labels":
            wrong = torch.rand(len(y), generator=self.task.source) < size
            y = torch.where(wrong, torch.randint(self.task.kinds, y.shape, generator=self.task.source), y)
        if fault == "weights" and step == FAULT_AT:
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(size * p.std(correction=0) * torch.randn(p.shape, generator=self.task.source))
        if fault == "weight decay":
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(1 - size)
        before = torch.get_rng_state()
        self.optimizer.zero_grad()
        loss = self.loss(model(x), y)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        self.optimizer.step()
        return x, y, before, loss.item(), norm.item()

    @torch.no_grad()
    def ask(self, known: Known) -> float:
        now = torch.get_rng_state()
        torch.set_rng_state(known.random)
        loss = self.loss(self.task.model(known.x), known.y).item()
        torch.set_rng_state(now)
        return float(loss)


def run(job: str, seed: int, fault: str, size: float) -> str:
    """What comes first of the fault: a call, an answer, or nothing."""
    training, sentinel, kept = Training(job, seed), Sentinel(), list[Known]()
    for step in range(STEPS):
        x, y, random, loss, norm = training.step(step, fault if step >= FAULT_AT else None, size)
        called = sentinel.update(Observation(step, loss, norm)).kind in (Kind.SPIKE, Kind.NONFINITE)
        if step and step % KEPT_EVERY == 0 and (level := sentinel.settled_level) is not None:
            kept.append(Known(step, x, y, random, loss, level))
        if step < FAULT_AT:
            continue
        if called:
            return "called"
        if (question := sentinel.question(step)) is not None:
            known = next((each for each in reversed(kept) if each.step < question.onset), None)
            if known is None:
                return "no batch"
            return str(ProbeAnswer(known.step, known.level, known.loss, training.ask(known)).finding(question))
    return "never asked"


def healthy(job: str, seed: int) -> list[float]:
    """Rises of known batches, in noise units."""
    training, baseline, kept, rises = Training(job, seed), Baseline(tail_aware=True), list[Known](), list[float]()
    for step in range(STEPS):
        x, y, random, loss, _ = training.step(step)
        baseline.accept(loss)
        if step >= 100 and step % 5 == 0:
            kept.append(Known(step, x, y, random, loss, baseline.level))
        if step >= 260 and step % 20 == 0:
            old = [known for known in kept if 64 <= step - known.step <= 230]
            rises += [(training.ask(known) - known.loss) / baseline.noise() for known in old]
    return rises


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    seeds = range(parser.parse_args().seeds)
    torch.set_num_threads(1)
    print("| fault | called | model | data | unclear | no batch | never asked |\n|---|---|---|---|---|---|---|")
    for fault, sizes in FAULTS.items():
        found = collections.Counter(
            run(job, seed, fault, size) for job, seed, size in itertools.product(JOBS, seeds, sizes)
        )
        told = ("called", "model", "data", "unclear", "no batch", "never asked")
        print(f"| {fault} | {' | '.join(str(found[each]) for each in told)} |", flush=True)
    print("\n| no fault | looks | up by 0.75 | up by 1.5 |\n|---|---|---|---|")
    for job in JOBS:
        rises = [rise for seed in seeds for rise in healthy(job, seed)]
        shares = " | ".join(f"{100 * sum(rise > bound for rise in rises) / len(rises):.1f} %" for bound in (0.75, 1.5))
        print(f"| {job} | {len(rises)} | {shares} |", flush=True)


if __name__ == "__main__":
    main()
