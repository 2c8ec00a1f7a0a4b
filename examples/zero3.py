"""Train with DeepSpeed ZeRO-3, a config file and your own optimizer.

torchrun --nproc-per-node 2 examples/zero3.py
torchrun --nproc-per-node 2 examples/zero3.py --config my_config.json
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel

CONFIG = Path(__file__).with_name("zero3.json")


def build_model():
    layers = [nn.Linear(8, 128), nn.GELU()]
    for _ in range(4):
        layers += [nn.Linear(128, 128), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(128, 1))


def main(args):
    torch.manual_seed(0)
    x = torch.randn(512, 8)
    data = TensorDataset(x, x.sin().sum(1, keepdim=True))
    loader = DataLoader(data, batch_size=32, shuffle=True)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    backend = accel.DeepSpeed(config=args.config)
    model, optimizer, loader = accel.setup(
        model, optimizer, loader, backend=backend
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, args.epochs
    )
    accel.print(accel.summary(model))

    for epoch in range(args.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
        scheduler.step()
        mean = accel.all_reduce(loss.detach(), "mean").item()
        accel.print(f"epoch {epoch}: loss {mean:.4f}")

    # You can load the checkpoint with any backend and number of processes.
    accel.save({"model": model, "optimizer": optimizer}, args.out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--out", type=Path, default=Path("runs/zero3"))
    main(parser.parse_args())
