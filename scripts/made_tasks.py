# mypy: disable-error-code="no-any-return,has-type,misc,index"
"""Small training jobs of many fields (see `made_job.py`), each a second or two long on one core."""

import math

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from made_job import GOOD, Data, Job, mixed_up, mlp


class Block(nn.Module):
    """One causal attention block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.one(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(F.gelu(self.up(self.two(x))))


class Experts(nn.Module):
    """A layer of four experts; each position goes to the best one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4)
        self.up = nn.Parameter(torch.randn(4, width, 2 * width) / math.sqrt(width))
        self.down = nn.Parameter(torch.randn(4, 2 * width, width) / math.sqrt(2 * width))
        self.balance = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        share = self.router(x).softmax(-1)
        best = F.one_hot(share.argmax(-1), 4).to(x.dtype)
        self.balance = 4 * (best.mean((0, 1)) * share.mean((0, 1))).sum()
        inner = F.gelu(torch.einsum("btw,ewh->bteh", x, self.up))
        outer = torch.einsum("bteh,ehw->btew", inner, self.down)
        return x + (outer * (best * share).unsqueeze(-1)).sum(2)


class Language(Job):
    """A causal transformer on a Markov chain of 24 letters."""

    letters, length = 24, 16

    def build(self) -> nn.Module:
        width = int(self.pick(24, 32))
        self.rows = int(self.pick(4, 8))
        chain = torch.rand(2, self.letters, self.letters, generator=self.chance)
        self.chain = (chain * 5).softmax(-1)
        self.chain[1] = chain[1].mul(3.5).softmax(-1)
        return nn.Sequential(nn.Embedding(self.letters, width), *self.middle(width), nn.Linear(width, self.letters))

    def middle(self, width: int) -> list[nn.Module]:
        return [Block(width), Block(width)]

    def text(self, gen: Generator, data: Data) -> Tensor:
        chain = torch.lerp(self.chain[0], self.chain[1], data.harder).log()
        drawn = -torch.empty(self.length, self.rows, self.letters).exponential_(generator=gen).log()  # Gumbel's noise
        letters = [torch.randint(self.letters, (self.rows,), generator=gen)]
        for noise in drawn:
            letters.append((chain[letters[-1]] + noise).argmax(1))
        return torch.stack(letters, 1)

    def loss(self, gen: Generator, data: Data) -> Tensor:
        text = self.text(gen, data)
        after = mixed_up(text[:, 1:].flatten(), data.wrong, gen)
        before = text[:, :-1]
        if data.scale != 1.0:
            before = torch.zeros_like(before)  # a tokenizer that knows no letter
        return F.cross_entropy(self.model(before).flatten(0, 1), after)


class MixtureOfExperts(Language):
    """The same with an expert layer, and its balancing loss."""

    def middle(self, width: int) -> list[nn.Module]:
        return [Block(width), Experts(width)]

    def loss(self, gen: Generator, data: Data) -> Tensor:
        experts = self.model[2]
        loss = super().loss(gen, data) + 0.01 * experts.balance
        experts.balance = torch.zeros(())  # a graph cannot be copied, and jobs are
        return loss


class Vision(Job):
    """A small convolutional net on ten noisy patterns; SGD with momentum. It nearly solves its task."""

    def build(self) -> nn.Module:
        self.rows, self.noise = int(self.pick(8, 16, 32)), self.pick(2.0, 3.0, 4.0)
        self.patterns = torch.randn(10, 3, 8, 8, generator=self.chance)
        return nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, 2, 1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(128, 10),
        )

    def make_optimizer(self) -> torch.optim.Optimizer:
        lr = self.pick(0.01, 0.02)
        return torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4, fused=True)

    def loss(self, gen: Generator, data: Data) -> Tensor:
        label = torch.randint(10, (self.rows,), generator=gen)
        noise = self.noise * (1 + 0.5 * data.harder) * torch.randn(self.rows, 3, 8, 8, generator=gen)
        # A net of ReLUs does not mind the scale alone, so bad inputs show nothing here.
        seen = self.model(self.patterns[label] + noise if data.scale == 1.0 else data.scale * noise)
        return F.cross_entropy(seen, mixed_up(label, data.wrong, gen))


class Diffusion(Job):
    """A denoiser of points around eight centres; the loss is the noise that it guesses wrong."""

    def build(self) -> nn.Module:
        self.rows = int(self.pick(32, 64, 128))
        self.centres = 3 * torch.randn(8, 4, generator=self.chance)
        return mlp(5, 64, 64, 64, 4, act=nn.SiLU)

    def loss(self, gen: Generator, data: Data) -> Tensor:
        kind = torch.randint(8, (self.rows,), generator=gen)
        clean = self.centres[kind] + (0.2 + 0.5 * data.harder) * torch.randn(self.rows, 4, generator=gen)
        noise, when = torch.randn(self.rows, 4, generator=gen), torch.rand(self.rows, 1, generator=gen)
        noisy = data.scale * clean * torch.cos(when * math.pi / 2) + noise * torch.sin(when * math.pi / 2)
        return F.mse_loss(self.model(torch.cat([noisy, when], 1)), mixed_up(noise, data.wrong, gen))


class Contrastive(Job):
    """Two views of the same point must find each other in the batch."""

    def build(self) -> nn.Module:
        self.rows, self.noise = int(self.pick(32, 64)), self.pick(0.3, 0.5)
        self.base = torch.randn(8, 32, generator=self.chance)
        return mlp(32, 64, 64, 16)

    def views(self, gen: Generator, data: Data) -> tuple[Tensor, Tensor]:
        points = torch.randn(self.rows, 8, generator=gen) @ self.base / 3
        noise = (1 + 0.6 * data.harder) * self.noise * torch.randn(2, self.rows, 32, generator=gen)
        return points + noise[0], data.scale * points + noise[1]

    def loss(self, gen: Generator, data: Data) -> Tensor:
        left, right = (F.normalize(self.model(view), dim=1) for view in self.views(gen, data))
        return F.cross_entropy(left @ right.T / 0.2, mixed_up(torch.arange(self.rows), data.wrong, gen))


class SelfSupervised(Contrastive):
    """Like it with no negatives: a predictor on one side, no gradient on the other. The loss is negative."""

    def build(self) -> nn.Module:
        self.rows, self.noise = int(self.pick(32, 64)), self.pick(0.3, 0.6)
        self.base = torch.randn(8, 32, generator=self.chance)
        return nn.ModuleList([mlp(32, 64, 32), mlp(32, 16, 32)])

    def loss(self, gen: Generator, data: Data) -> Tensor:
        encoder, predictor = self.model
        left, right = (F.batch_norm(encoder(view), None, None, training=True) for view in self.views(gen, data))
        total = torch.zeros(())
        for one, other in ((left, right), (right, left)):
            wanted = mixed_up(other.detach(), data.wrong, gen)
            total = total - F.cosine_similarity(predictor(one), wanted).mean() / 2
        return total


class FineTuning(Vision):
    """A classifier that knows another task already, at a low learning rate: its loss hardly moves."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        for number in range(150):
            self.step(Generator().manual_seed(seed * 7919 + number), GOOD)
        self.patterns = self.patterns + 0.4 * torch.randn(10, 3, 8, 8, generator=self.chance)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=self.pick(2e-4, 5e-4), weight_decay=0.01, fused=True
        )


class ClickRate(Job):
    """Clicks on advertisements: rare labels, embeddings, a loss near the entropy of the labels."""

    def build(self) -> nn.Module:
        self.rows = int(self.pick(64, 128, 256))
        self.taste = torch.randn(6, 50, generator=self.chance) * 0.7
        self.offset = 50 * torch.arange(6)
        return nn.ModuleList([nn.Embedding(300, 8), mlp(48, 32, 1)])

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters(), lr=self.pick(2e-3, 5e-3), fused=True)

    def loss(self, gen: Generator, data: Data) -> Tensor:
        fields = (50 * torch.rand(self.rows, 6, generator=gen) ** 2).long()
        worth = self.taste[torch.arange(6), fields].sum(1) * (1 - 0.5 * data.harder) - 2 + data.harder
        clicked = (torch.rand(self.rows, generator=gen) < worth.sigmoid()).float()
        embedding, head = self.model
        score = head(data.scale * embedding(fields + self.offset).flatten(1))[:, 0]
        return F.binary_cross_entropy_with_logits(score, mixed_up(clicked, data.wrong, gen))


class SequenceToSequence(Job):
    """An encoder and a decoder, both recurrent: the sequence backwards, and each letter moved on by one."""

    def build(self) -> nn.Module:
        self.rows, self.length = int(self.pick(8, 16)), 6
        width = 48
        parts = [nn.Embedding(12, 16), nn.GRU(16, width, batch_first=True), nn.GRU(16, width, batch_first=True)]
        return nn.ModuleList([*parts, nn.Linear(width, 12)])

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters(), lr=self.pick(3e-3, 6e-3), fused=True)

    def loss(self, gen: Generator, data: Data) -> Tensor:
        embedding, encoder, decoder, head = self.model
        source = torch.randint(int(12 - 4 * (1 - data.harder)), (self.rows, self.length), generator=gen)
        target = mixed_up((source.flip(1) + 1) % 12, data.wrong, gen)
        state = encoder(data.scale * embedding(source))[1]
        begun = torch.cat([torch.zeros(self.rows, 1, dtype=torch.long), target[:, :-1]], 1)
        return F.cross_entropy(head(decoder(embedding(begun), state)[0]).flatten(0, 1), target.flatten())


class Physics(Job):
    """A physics-informed net: u'' = -k^2 sin(kx) at random points, and u = 0 at both ends. It falls by decades."""

    def build(self) -> nn.Module:
        self.rows, self.waves = int(self.pick(32, 64)), self.pick(1.0, 2.0)
        return mlp(1, 32, 32, 1, act=nn.Tanh)

    def loss(self, gen: Generator, data: Data) -> Tensor:
        x = (torch.rand(self.rows, 1, generator=gen) * data.scale).requires_grad_()
        u = self.model(x)
        (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
        k = self.waves * math.pi * (1 + 0.3 * data.harder)
        source = mixed_up(-torch.sin(k * x.detach()), data.wrong, gen)
        return F.mse_loss(second / k**2, source) + 10 * self.model(torch.tensor([[0.0], [1.0]])).square().mean()


class Autoencoder(Job):
    """A variational autoencoder of points on a curved sheet."""

    def build(self) -> nn.Module:
        self.rows = int(self.pick(16, 32, 64))
        self.sheet = torch.randn(4, 24, generator=self.chance)
        return nn.ModuleList([mlp(24, 48, 8), mlp(4, 48, 24)])

    def loss(self, gen: Generator, data: Data) -> Tensor:
        seen = torch.tanh(torch.randn(self.rows, 4, generator=gen) @ self.sheet * (1 + data.harder))
        seen = seen + 0.1 * torch.randn(self.rows, 24, generator=gen)
        encoder, decoder = self.model
        mean, log_spread = encoder(data.scale * seen).chunk(2, 1)
        drawn = mean + log_spread.exp() * torch.randn(self.rows, 4, generator=gen)
        error = (decoder(drawn) - mixed_up(seen, data.wrong, gen)).square().sum(1)
        return (10 * error + 0.5 * (mean.square() + (2 * log_spread).exp() - 2 * log_spread - 1).sum(1)).mean()


class Adversarial(Job):
    """A GAN: the generator's loss is what is logged. Even seeds have a critic (WGAN), whose loss is logged instead."""

    supervised = False

    def build(self) -> nn.Module:
        self.rows, self.critic = int(self.pick(32, 64)), self.seed % 2 == 0
        self.centres = 2 * torch.randn(6, 2, generator=self.chance)
        self.judge = mlp(2, 48, 48, 1)
        self.judge_optimizer = torch.optim.Adam(self.judge.parameters(), lr=1e-3, betas=(0.5, 0.9), fused=True)
        return mlp(8, 48, 48, 2)

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters(), lr=self.pick(5e-4, 1e-3), betas=(0.5, 0.9), fused=True)

    def loss(self, gen: Generator, data: Data) -> Tensor:
        kind = torch.randint(6, (self.rows,), generator=gen)
        real = data.scale * self.centres[kind] + 0.2 * (1 + data.harder) * torch.randn(self.rows, 2, generator=gen)
        fake = self.model(torch.randn(self.rows, 8, generator=gen))
        if data.wrong:
            chosen = (torch.rand(self.rows, 1, generator=gen) < data.wrong).float()
            real = torch.lerp(real, fake.detach(), chosen)
        self.judge_optimizer.zero_grad()
        on_real, on_fake = self.judge(real), self.judge(fake.detach())
        if self.critic:
            judged = on_fake.mean() - on_real.mean()
        else:
            judged = F.softplus(-on_real).mean() + F.softplus(on_fake).mean()
        judged.backward()
        self.judge_optimizer.step()
        if self.critic:
            for each in self.judge.parameters():
                each.data.clamp_(-0.15, 0.15)
        answer = self.judge(fake)
        loss = -answer.mean() if self.critic else F.softplus(-answer).mean()
        if self.critic:
            return loss + (judged.detach() - loss.detach())  # the value logged is the critic's, the gradient is ours
        return loss


class Reinforcement(Job):
    """Reinforcement learning in a small random world: deep Q with target syncs, or an actor and a critic."""

    supervised = False

    def build(self) -> nn.Module:
        self.rows, self.steps, self.deep_q = int(self.pick(16, 32)), 0, self.seed % 2 == 0
        self.moves = torch.randint(20, (20, 4), generator=self.chance)
        self.reward = (torch.rand(20, generator=self.chance) > 0.85).float() * 2
        self.places = torch.randint(20, (self.rows,), generator=self.chance)
        self.target = mlp(20, 48, 4)
        model = mlp(20, 48, 4) if self.deep_q else mlp(20, 48, 5)
        if self.deep_q:
            self.target.load_state_dict(model.state_dict())
        return model

    def loss(self, gen: Generator, data: Data) -> Tensor:
        self.steps += 1
        here = data.scale * F.one_hot(self.places, 20).float()
        seen = self.model(here)
        chance = seen[:, :4].detach().softmax(-1).nan_to_num(1.0)
        chosen = chance.multinomial(1, generator=gen)[:, 0]
        lost = torch.rand(self.rows, generator=gen) < 0.1 + 0.3 * data.harder
        there = torch.where(lost, torch.randint(20, (self.rows,), generator=gen), self.moves[self.places, chosen])
        gain = mixed_up(self.reward[there], data.wrong, gen) + 0.3 * torch.randn(self.rows, generator=gen)
        self.places = there
        after = data.scale * F.one_hot(there, 20).float()
        if self.deep_q:
            if self.steps % 120 == 0:
                self.target.load_state_dict(self.model.state_dict())
            with torch.no_grad():
                wanted = gain + 0.95 * self.target(after).max(1).values
            return F.smooth_l1_loss(seen[torch.arange(self.rows), chosen], wanted)
        with torch.no_grad():
            wanted = gain + 0.9 * self.model(after)[:, 4]
        advantage = wanted - seen[:, 4]
        share = seen[:, :4].log_softmax(-1)
        policy = -(share[torch.arange(self.rows), chosen] * advantage.detach()).mean()
        return policy + 0.5 * advantage.square().mean() + 0.01 * (share.exp() * share).sum(1).mean()


JOBS: dict[str, type[Job]] = {
    "vision": Vision,
    "fine-tuning": FineTuning,
    "diffusion": Diffusion,
    "contrastive": Contrastive,
    "self-supervised": SelfSupervised,
    "click-rate": ClickRate,
    "sequences": SequenceToSequence,
    "physics": Physics,
    "autoencoder": Autoencoder,
    "adversarial": Adversarial,
    "reinforcement": Reinforcement,
    "language": Language,
    "experts": MixtureOfExperts,
}
