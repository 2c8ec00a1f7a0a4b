"""Cross validation: a new model for each fold, all of them trained by all processes, one after the other."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import accel

FOLDS = 4


def accuracy_of(data, train, test):
    model = nn.Linear(8, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loaders = DataLoader(Subset(data, train), 8, shuffle=True), DataLoader(Subset(data, test), 8)
    model, optimizer, (loader, test_loader) = accel.setup(model, optimizer, loaders)
    for _ in range(5):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    with torch.no_grad():
        right = [accel.gather_for_metrics(model(x).argmax(1) == y) for x, y in test_loader]
    accel.teardown(model)  # ends this fold's engine; the process group stays for the next one
    return torch.cat(right).float().mean().item()  # the same on all processes


def main():
    accel.seed(0)  # alike on all processes, and so are the data and the folds
    x = torch.randn(200, 8)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    folds = torch.randperm(len(data)).chunk(FOLDS)
    accuracies = []
    for number, test in enumerate(folds):
        train = torch.cat([fold for other, fold in enumerate(folds) if other != number])
        accuracies.append(accuracy_of(data, train.tolist(), test.tolist()))
        accel.print(f"fold {number}: accuracy {accuracies[-1]:.3f} on {len(test)} samples")
    accel.print(f"mean accuracy {sum(accuracies) / FOLDS:.3f}")


if __name__ == "__main__":
    main()
