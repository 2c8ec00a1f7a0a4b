"""Five loops in the manner of published programs equal one process on ddp, fsdp and ZeRO 1 and 3.

``python -m tests.public_loops`` runs the published programs themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import accel
from tests.backends import need
from tests.distributed import run
from tests.models import distance, rows

#: Prepares a model and its optimizer, as accel.setup does.
Setup = Callable[[Any, Any], tuple[Any, Any]]


def share(*shape: int, seed: int) -> torch.Tensor:
    """Return this rank's share of a batch that all ranks have."""
    return rows(seed, *shape).chunk(accel.world_size())[accel.rank()]


def classifier(setup: Setup) -> list[Any]:
    """pytorch/examples mnist: Adadelta, StepLR, and an evaluation after each epoch."""
    net: nn.Module = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3))
    model, optimizer = setup(net, torch.optim.Adadelta(net.parameters(), lr=1.0))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
    for epoch in range(3):
        model.train()
        for step in range(3):
            x = share(8, 1, 8, 8, seed=10 * epoch + step)
            optimizer.zero_grad()
            output = F.log_softmax(model(x), dim=1)
            F.nll_loss(output, (x.mean((1, 2, 3)) > 0).long()).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            model(share(8, 1, 8, 8, seed=99)).argmax(1)
        scheduler.step()
    return [model]


def dcgan(setup: Setup) -> list[Any]:
    """pytorch/examples dcgan: two backwards for one step of the critic, and a step through it."""
    up, norm = nn.ConvTranspose2d(4, 4, 4), nn.GroupNorm(2, 4)
    g: nn.Module = nn.Sequential(up, norm, nn.ReLU(), nn.Conv2d(4, 1, 1), nn.Tanh())
    down, last = nn.Conv2d(1, 4, 3, 2, 1), nn.Linear(16, 1)
    d: nn.Module = nn.Sequential(down, nn.LeakyReLU(0.2), nn.Flatten(), last, nn.Sigmoid())
    critic, critic_optimizer = setup(d, torch.optim.Adam(d.parameters(), lr=1e-3, betas=(0.5, 0.999), eps=1e-3))
    generator, optimizer = setup(g, torch.optim.Adam(g.parameters(), lr=1e-3, betas=(0.5, 0.999), eps=1e-3))
    loss = nn.BCELoss()
    for step in range(4):
        real, noise = share(8, 1, 4, 4, seed=step), share(8, 4, 1, 1, seed=100 + step)
        critic.zero_grad()
        loss(critic(real).view(-1), torch.ones(len(real))).backward()
        fake = generator(noise)
        loss(critic(fake.detach()).view(-1), torch.zeros(len(real))).backward()
        critic_optimizer.step()
        generator.zero_grad()
        loss(critic(fake).view(-1), torch.ones(len(real))).backward()
        optimizer.step()
    return [critic, generator]


class LSTMModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.rnn, self.out = nn.Embedding(12, 8), nn.LSTM(8, 8, 2), nn.Linear(8, 12)
        self.out.weight = self.words.weight

    def init_hidden(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        weight = next(self.parameters())
        return weight.new_zeros(2, size, 8), weight.new_zeros(2, size, 8)

    def forward(self, words: torch.Tensor, hidden: Any) -> Any:
        output, hidden = self.rnn(self.words(words), hidden)
        return self.out(output), hidden


def language_model(setup: Setup) -> list[Any]:
    """pytorch/examples word_language_model: tied weights, a hidden state that goes on, clipping."""
    net = LSTMModel()
    model, optimizer = setup(net, torch.optim.SGD(net.parameters(), lr=0.5))
    hidden = model.init_hidden(8 // accel.world_size())
    for step in range(4):
        # The batch is the second dimension.
        words = (share(8, 6, seed=step).mul(7).long() % 12).t()
        hidden = tuple(h.detach() for h in hidden)
        optimizer.zero_grad()
        output, hidden = model(words[:-1], hidden)
        F.cross_entropy(output.flatten(0, 1), words[1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
    return [model]


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(12, 8), nn.Embedding(6, 8)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.head = nn.Linear(8, 12, bias=False)
        self.words.weight = self.head.weight

    def forward(self, words: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        x = self.words(words) + self.positions(torch.arange(words.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def generate(self, words: torch.Tensor) -> torch.Tensor:
        return torch.cat([words, self(words)[0][:, -1:].argmax(-1)], 1)


def nano_gpt(setup: Setup) -> list[Any]:
    """nanoGPT: groups with and without decay, accumulation, a learning rate for each step, a GradScaler that is off."""
    net = GPT()
    decayed = [p for p in net.parameters() if p.dim() > 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": [p for p in net.parameters() if p.dim() < 2]}]
    model, optimizer = setup(net, torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.0, eps=1e-3))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for step in range(3):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (step + 1)
        for micro in range(2):
            words = share(8, 6, seed=2 * step + micro).mul(7).long() % 12
            _, loss = model(words, words.roll(-1, 1))
            scaler.scale(loss / 2).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        model.generate(words[:, :5])
    return [model]


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.mean, self.variance = nn.Linear(6, 8), nn.Linear(8, 2), nn.Linear(8, 2)
        self.first, self.last = nn.Linear(2, 8), nn.Linear(8, 6)

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = F.relu(self.hidden(x))
        return self.mean(h), self.variance(h)

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.last(F.relu(self.first(z))))

    def forward(self, x: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mean, variance = self.encode(x)
        return self.decode(mean + noise * (0.5 * variance).exp()), mean, variance


def vae(setup: Setup) -> list[Any]:
    """pytorch/examples vae: a model with methods, and samples of one after each epoch."""
    net = VAE()
    model, optimizer = setup(net, torch.optim.Adam(net.parameters(), lr=1e-2, eps=1e-3))
    for step in range(4):
        x = share(8, 6, seed=step).sigmoid()
        output, mean, variance = model(x, share(8, 2, seed=50 + step))
        optimizer.zero_grad()
        loss = F.binary_cross_entropy(output, x) - 0.05 * (1 + variance - mean.square() - variance.exp()).mean()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            model.decode(rows(7, 3, 2))
    return [model]


PROGRAMS = [classifier, dcgan, language_model, nano_gpt, vae]


def trained(program: Callable[[Setup], list[Any]], backend: Any) -> list[dict[str, torch.Tensor]]:
    """Return the weights of a run in plain torch if there is no backend."""
    torch.manual_seed(0)
    if not backend:
        return [model.state_dict() for model in program(lambda model, optimizer: (model, optimizer))]
    models = program(lambda model, optimizer: accel.setup(model, optimizer, backend=backend)[:2])
    return [accel.full_state_dict(model) for model in models]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_equals_one_process(program: Callable[[Setup], list[Any]]) -> None:
    expected = run(1, trained, program, "")[0]
    for backend in ("ddp", "fsdp", "deepspeed:1", "deepspeed:3"):
        need(backend)
        for weights in run(2, trained, program, backend):
            assert distance(weights, expected) < 1e-5, backend
