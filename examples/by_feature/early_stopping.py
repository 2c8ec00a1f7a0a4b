"""Early stopping: all processes leave the loop in the same epoch, and go back to the best weights."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel


@torch.no_grad()
def validate(model, loader):
    model.eval()
    errors = [accel.gather_for_metrics(F.mse_loss(model(x), y, reduction="none")) for x, y in loader]
    model.train()
    return torch.cat(errors).mean().item()  # of all samples, once each: the same number on all processes


def main(args):
    accel.seed(0)
    x = torch.randn(96, 8)
    data = TensorDataset(x, x.sum(1, keepdim=True) + torch.randn(96, 1))
    loader = DataLoader(data, 8, sampler=torch.utils.data.SubsetRandomSampler(range(32)))
    validation = DataLoader(torch.utils.data.Subset(data, range(32, 96)), 8)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, (loader, validation) = accel.setup(model, optimizer, [loader, validation])

    state = {"model": model, "best": float("inf"), "epoch": 0}
    for epoch in range(200):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
        if accel.any_rank(bool(loss.isnan())):  # what one process sees alone: any_rank tells the others
            break
        score = validate(model, validation)
        if score < state["best"]:
            state |= {"best": score, "epoch": epoch}
            accel.save(state, args.out)
        elif epoch - state["epoch"] >= args.patience:  # equal on all processes, so no call is needed
            break
    accel.load(args.out, state)
    accel.print(f"stopped after epoch {epoch}; best is epoch {state['epoch']}, error {state['best']:.4f}")
    accel.print(f"error of the weights that came back {validate(model, validation):.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--patience", type=int, default=5)
    parser.add_argument("--out", default="runs/early_stopping")
    main(parser.parse_args())
