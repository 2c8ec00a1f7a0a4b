"""The largest batch size that fits: half of it each time a process runs out of memory, the same one on all processes."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel


class Net(nn.Linear):
    def forward(self, x):
        if (
            len(x) > 20 and accel.rank() == accel.world_size() - 1
        ):  # as a device does that is full; on one process alone
            raise torch.OutOfMemoryError("out of memory")
        return super().forward(x)


def train(batch_size):
    accel.print(f"trying {batch_size}")
    accel.seed(0)
    x = torch.randn(256, 8)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size, shuffle=True)
    model = Net(8, 1)  # built in here: each try begins anew
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-2)
    model, optimizer, loader = accel.setup(model, optimizer, loader)
    losses = []
    for _ in range(4):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
        losses.append(accel.all_reduce(loss.detach(), "mean").item())
    return losses


def main():
    batch_size, losses = accel.largest_batch(train, start=64)
    accel.print(f"batch size {batch_size}: loss {losses[0]:.4f} to {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
