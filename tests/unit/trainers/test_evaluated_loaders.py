"""Workers of an evaluation's loader that persist: whether a pass draws a seed goes by the passes that count."""

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from rollback.trainers.evaluated_loaders import EvaluatedLoaders


def made() -> DataLoader[tuple[torch.Tensor, ...]]:
    return DataLoader(TensorDataset(torch.arange(6)), num_workers=1, persistent_workers=True)


def drawn(evaluated: EvaluatedLoaders, loader: DataLoader[tuple[torch.Tensor, ...]]) -> bool:
    """Whether a pass over it draws from the random states, as which it gives all that there is."""
    before = torch.get_rng_state()
    evaluated.begin("eval", loader)
    assert [int(item) for (item,) in loader] == [*range(6)]
    return not torch.equal(before, torch.get_rng_state())


def test_a_pass_draws_where_it_is_the_first_one_that_counts_and_nowhere_else() -> None:
    loader, evaluated = made(), EvaluatedLoaders()
    fresh = evaluated.state_dict()
    assert (drawn(evaluated, loader), drawn(evaluated, loader)) == (True, False)
    later = evaluated.state_dict()
    evaluated.load_state_dict(fresh)
    assert (drawn(evaluated, loader), drawn(evaluated, loader)) == (True, False), "behind a rollback"

    resumed = EvaluatedLoaders()
    resumed.load_state_dict(later)
    assert not drawn(resumed, made()), "in a new process"
    assert not drawn(EvaluatedLoaders({"eval": loader}), loader), "evaluated before there was a guard"


def test_a_loader_whose_workers_do_not_persist_draws_for_each_pass() -> None:
    loader, evaluated = DataLoader(TensorDataset(torch.arange(6))), EvaluatedLoaders()
    assert drawn(evaluated, loader)
    assert drawn(evaluated, loader)


class Noisy(Dataset[torch.Tensor]):
    """Draws at each reading: a sample's masked words, so to speak."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(())


class Masking:
    """A collator with a generator that it makes at its first call, as that of Hugging Face for masked words."""

    generator: torch.Generator | None = None
    tokenizer = "a tokenizer"

    def __call__(self, samples: list[torch.Tensor]) -> torch.Tensor:
        self.generator = self.generator or torch.Generator().manual_seed(5)
        return torch.stack([*samples, torch.rand((), generator=self.generator)])


def test_what_workers_that_persist_draw_goes_by_the_passes_that_count() -> None:
    def noisy() -> DataLoader[torch.Tensor]:
        return DataLoader(Noisy(), 2, num_workers=2, persistent_workers=True, collate_fn=Masking())

    def read(evaluated: EvaluatedLoaders, loader: DataLoader[torch.Tensor]) -> list[float]:
        evaluated.begin("eval", loader)
        return torch.cat(list(loader)).tolist()

    loader, evaluated = noisy(), EvaluatedLoaders()
    first = read(evaluated, loader)
    state = evaluated.state_dict()
    second, third = read(evaluated, loader), read(evaluated, loader)
    assert first != second != third, "each pass draws other numbers"
    assert loader.collate_fn.tokenizer == "a tokenizer", "as a callback may ask for"
    evaluated.load_state_dict(state)
    assert [read(evaluated, loader), read(evaluated, loader)] == [second, third], "behind a rollback"

    torch.manual_seed(1)
    resumed, anew = EvaluatedLoaders(), noisy()
    resumed.load_state_dict(state)
    assert [read(resumed, anew), read(resumed, anew)] == [second, third], "in a new process"
