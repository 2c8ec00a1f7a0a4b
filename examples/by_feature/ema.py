"""A moving average of the weights (EMA) by torch's own AveragedModel: each process keeps the same one, without communication."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import accel


@torch.no_grad()
def error_of(model, loader):
    return torch.cat([accel.gather_for_metrics((model(x) - y).square()) for x, y in loader]).mean().item()


def main(args):
    accel.seed(0)
    x = torch.randn(256, 8)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True) + torch.randn(256, 1)), batch_size=8, shuffle=True)
    net = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
    model, optimizer, loader = accel.setup(net, optimizer, loader)
    # After setup: all processes have rank 0's weights, on their device. A copy of the handle is a raw module, and whole.
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))

    for _ in range(4):
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            ema.update_parameters(model)  # the weights are equal on all processes now, so the averages are
    accel.print(f"error {error_of(model, loader):.4f} to {error_of(ema, loader):.4f} with the averaged weights")
    accel.save({"model": model, "ema": ema}, args.out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="runs/ema")
    main(parser.parse_args())
