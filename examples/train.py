"""Handwritten digits: a raw PyTorch loop, made distributed by one call of accel.setup; start it by python or torchrun."""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from tqdm import tqdm

import accel


def load_data():
    digits = load_digits()  # 1797 scans of 8 x 8 pixels
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    return random_split(TensorDataset(images, torch.tensor(digits.target)), [1440, 357])


def build_model():
    features = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*features, nn.Flatten(), nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10))


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    right = [accel.gather_for_metrics(model(x).argmax(1) == y) for x, y in loader]
    model.train()
    return torch.cat(right)  # one answer for each test image, whatever the number of processes


def save_curves(path, curves):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3), layout="constrained")
    for axes, (title, values) in zip(figure.subplots(1, len(curves)), curves.items(), strict=True):
        axes.plot(range(1, len(values) + 1), values)
        axes.set_title(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main(args):
    accel.seed(0)
    batch_size = 64 // accel.world_size()  # a loader's batch is that of one process, as in raw PyTorch
    train_data, test_data = load_data()
    loader, test_loader = DataLoader(train_data, batch_size, shuffle=True), DataLoader(test_data, batch_size)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters())

    # The same order of images on any number of processes; without a seed one process has raw PyTorch's.
    order = accel.LoaderOptions(seed=0)
    model, optimizer, (loader, test_loader) = accel.setup(model, optimizer, [loader, test_loader], loader_options=order)

    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, args.epochs * len(loader))
    accel.print(f"{repr(model).partition('(')[0]}, {accel.world_size()} x {accel.device().type}")
    losses, accuracies = [], []
    for epoch in range(1, args.epochs + 1):
        for x, y in tqdm(loader, f"epoch {epoch}", leave=False, disable=not accel.is_main()):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(accel.all_reduce(loss, "mean").item())
        right = evaluate(model, test_loader)
        accuracies.append(right.float().mean().item())
        accel.print(f"epoch {epoch}: loss {losses[-1]:.4f}, accuracy {accuracies[-1]:.4f} on {len(right)} test images")
    if accel.is_main():
        save_curves(args.out, {"training loss by step": losses, "test accuracy by epoch": accuracies})
        print(f"curves: {args.out}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("runs/digits.png"))
    main(parser.parse_args())
