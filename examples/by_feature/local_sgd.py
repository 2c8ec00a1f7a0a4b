"""Local SGD: each process trains its own copy of the weights, and the copies are averaged every few steps."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel


@torch.no_grad()
def average(model):
    """Replace the parameters and floating-point buffers by their means over all processes."""
    tensors = [t for t in model.state_dict().values() if t.is_floating_point()]
    for tensor, mean in zip(tensors, accel.all_reduce(tensors, "mean"), strict=True):
        tensor.copy_(mean)


@torch.no_grad()
def difference(model):
    """Return the largest difference of a parameter from rank 0's, over all processes."""
    parameters = [p.detach() for p in model.parameters()]
    pairs = zip(parameters, accel.broadcast(parameters), strict=True)
    return accel.all_reduce(max((a - b).abs().max().item() for a, b in pairs), "max")


@torch.no_grad()
def error(model, data):
    x, y = (tensor.to(accel.device()) for tensor in data.tensors)
    return F.mse_loss(model(x), y).item()


def main():
    accel.seed(0)  # all processes start from the same weights
    inputs = torch.randn(256, 8)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).to(accel.device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # The model stays a raw module, so gradients are not averaged. Only the data is divided over the processes.
    loader = accel.setup(None, None, DataLoader(data, batch_size=8, shuffle=True)).dataloaders

    step, between, after = 0, [], []
    first = error(model, data)
    for _ in range(8):
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            step += 1
            if step % 4 == 0:
                between.append(difference(model))
                average(model)
                after.append(difference(model))
    average(model)  # one model for evaluation and saving
    accel.print(f"error {first:.4f} to {error(model, data):.4f}")
    accel.print(f"{len(after)} averages; largest difference before {max(between):.1e}, after {max(after):.1e}")


if __name__ == "__main__":
    main()
