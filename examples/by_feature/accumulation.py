"""Accumulate gradients over four batches per step."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel


def main():
    accel.seed(0)
    x = torch.randn(256, 8)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    loader = DataLoader(data, batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accel.setup(model, optimizer, loader)

    losses = []
    for _ in range(6):
        for group in accel.accumulate(loader, 4):
            for x, y in group:
                loss = F.mse_loss(model(x), y)
                (loss / len(group)).backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accel.all_reduce(loss.detach(), "mean").item())
    accel.print(f"loss {losses[0]:.4f} to {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
