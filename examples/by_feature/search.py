"""Search for hyper-parameters: trials follow each other in one job, and accel.teardown gives each a fresh engine."""

import argparse
import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import accel


def trial(train_data, test_data, lr, width):
    accel.seed(0)
    model = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    loaders = {"train": DataLoader(train_data, 8, shuffle=True), "test": DataLoader(test_data, 8)}
    model, optimizer, loaders = accel.setup(model, optimizer, loaders)
    try:
        for _ in range(3):
            for x, y in loaders["train"]:
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                optimizer.step()
        with torch.no_grad():
            errors = [accel.gather_for_metrics((model(x) - y).square()) for x, y in loaders["test"]]
        return torch.cat(errors).mean().item()  # the same on all processes, so that they choose alike
    finally:
        accel.teardown(model)


def main(args):
    accel.seed(0)
    x = torch.randn(160, 8)
    train_data, test_data = random_split(TensorDataset(x, x.sin().sum(1, keepdim=True)), [128, 32])
    draw = random.Random(0)  # seeded: all processes try the same; a search tool asks on rank 0 and broadcasts
    errors = {}
    for _ in range(args.trials):
        values = {"lr": 10 ** draw.uniform(-4, -1), "width": draw.choice([8, 32])}
        error = trial(train_data, test_data, **values)
        accel.print(f"lr {values['lr']:.5f}, width {values['width']:2}: error {error:.4f}")
        errors[error] = values
    accel.print(f"best: {errors[min(errors)]} with error {min(errors):.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=5)
    main(parser.parse_args())
