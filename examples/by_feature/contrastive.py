"""A contrastive loss (InfoNCE): each pair is compared with the samples of all processes, and gradients flow to all of them."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel


def loss_of(a, b):
    """Rows of ``a`` and ``b`` with the same number belong together; the negatives are the rows of all processes."""
    all_b = accel.all_gather(b, gradients=True)
    mine = accel.rank() * len(a) + torch.arange(len(a), device=a.device)  # where this process's rows are
    return F.cross_entropy(a @ all_b.T / 0.1, mine)


def main():
    accel.seed(0)
    x = torch.randn(256, 16)
    views = TensorDataset(x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x))
    loader = DataLoader(views, batch_size=32 // accel.world_size(), shuffle=True, drop_last=True)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accel.setup(model, optimizer, loader, loader_options=accel.LoaderOptions(seed=0))

    losses = []
    for _ in range(5):
        for first, second in loader:
            optimizer.zero_grad()
            a, b = F.normalize(model(torch.cat([first, second])), dim=1).chunk(2)  # one forward for both
            loss = loss_of(a, b)
            loss.backward()
            optimizer.step()
        losses.append(accel.all_reduce(loss, "mean").item())
    accel.print(f"loss {losses[0]:.4f} to {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
