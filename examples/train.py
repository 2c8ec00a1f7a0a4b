"""Classify handwritten digits with accel. train_torch.py is the plain loop.

python examples/train.py
torchrun --nproc-per-node 2 examples/train.py
ACCEL_BACKEND=fsdp torchrun --nproc-per-node 2 examples/train.py
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import accel


def load_data():
    digits = load_digits()  # 1,797 scans of 8 x 8 pixels
    images = (
        torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    )
    dataset = TensorDataset(images, torch.tensor(digits.target))
    return random_split(dataset, [1440, 357])


def build_model():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


@torch.no_grad()
def count_correct(model, loader):
    correct = 0
    for x, y in loader:
        hits = accel.gather_for_metrics(model(x).argmax(1) == y)
        correct += hits.sum().item()
    return correct


def main(args):
    torch.manual_seed(0)
    train_data, test_data = load_data()
    loader = DataLoader(train_data, batch_size=64, shuffle=True)
    test_loader = DataLoader(test_data, batch_size=64)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    # Each step uses the same samples for any number of processes.
    options = accel.LoaderOptions(split_batches=True, seed=0)
    model, optimizer, (loader, test_loader) = accel.setup(
        model, optimizer, [loader, test_loader], loader_options=options
    )
    for epoch in range(args.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        correct = count_correct(model, test_loader)
        accel.print(f"epoch {epoch}: {correct} of {len(test_data)} correct")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    main(parser.parse_args())
