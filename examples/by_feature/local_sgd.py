"""Local SGD: average the copies of all ranks every four steps."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel


@torch.no_grad()
def average(model):
    """Replace parameters and buffers with their means over all ranks."""
    tensors = [
        t for t in model.state_dict().values() if t.is_floating_point()
    ]
    means = accel.all_reduce(tensors, "mean")
    for tensor, mean in zip(tensors, means, strict=True):
        tensor.copy_(mean)


@torch.no_grad()
def difference(model):
    """Return the largest difference from rank 0's weights."""
    weights = nn.utils.parameters_to_vector(model.parameters())
    distance = (weights - accel.broadcast(weights)).abs().max().item()
    return accel.all_reduce(distance, "max")


def main():
    accel.seed(0)  # all ranks start with the same weights
    x = torch.randn(256, 8)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    loader = DataLoader(data, batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    model.to(accel.device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # The model isn't passed to setup, so its gradients stay local.
    loader = accel.setup(None, None, loader).dataloaders

    step = 0
    losses = []
    before = []
    after = []
    for _ in range(8):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(accel.all_reduce(loss.detach(), "mean").item())
            step += 1
            if step % 4 == 0:
                before.append(difference(model))
                average(model)
                after.append(difference(model))
    accel.print(f"loss {losses[0]:.4f} to {losses[-1]:.4f}")
    accel.print(f"{len(after)} averages, largest difference of weights:")
    accel.print(f"before {max(before):.1e}, after {max(after):.1e}")


if __name__ == "__main__":
    main()
