"""Train a transformer with FSDP2 and activation checkpointing.

torchrun --nproc-per-node 2 examples/fsdp.py
torchrun --nproc-per-node 4 examples/fsdp.py --replicas 2
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel

WORDS = 32


class Model(nn.Module):
    def __init__(self, width, num_layers):
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.positions = nn.Embedding(16, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, dropout=0.0, batch_first=True
            )
            for _ in range(num_layers)
        )
        self.head = nn.Linear(width, WORDS)

    def forward(self, words):
        positions = torch.arange(words.shape[1], device=words.device)
        x = self.words(words) + self.positions(positions)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def main(args):
    torch.manual_seed(0)
    # The model learns to reverse a sequence.
    words = torch.randint(0, WORDS, (1024, 16))
    data = TensorDataset(words, words.flip(1))
    loader = DataLoader(data, batch_size=32, shuffle=True)

    # The parameters use no memory until setup has sharded them.
    with accel.deferred_init():
        model = Model(args.width, args.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    backend = accel.FSDP(
        activation_checkpointing=True, replicas=args.replicas
    )
    model, optimizer, loader = accel.setup(
        model, optimizer, loader, backend=backend, precision=args.precision
    )
    accel.print(accel.summary(model))

    for epoch in range(args.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            accel.clip_grad_norm_(model, 1.0)
            optimizer.step()
        mean = accel.all_reduce(loss.detach(), "mean").item()
        accel.print(f"epoch {epoch}: loss {mean:.3f}")

    # Write ordinary safetensors files with full weights.
    accel.save({"model": model}, args.out / "checkpoint")
    accel.export(
        args.out / "checkpoint", args.out / "weights", overwrite=True
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument(
        "--replicas", type=int, default=1, help="copies of the model"
    )
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("runs/fsdp"))
    main(parser.parse_args())
