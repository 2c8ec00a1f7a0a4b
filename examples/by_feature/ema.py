"""Keep a moving average of the weights (EMA) with any backend."""

import argparse
import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import accel


@torch.no_grad()
def error_of(model, loader):
    errors = []
    for x, y in loader:
        errors.append(accel.gather_for_metrics((model(x) - y).square()))
    return torch.cat(errors).mean().item()


def main(args):
    accel.seed(0)
    x = torch.randn(256, 8)
    y = x.sum(1, keepdim=True) + torch.randn(256, 1)
    loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    # Copy before setup, because some backends shard the model.
    full = copy.deepcopy(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    options = accel.LoaderOptions(seed=0)
    model, optimizer, loader = accel.setup(
        net, optimizer, loader, loader_options=options
    )
    full.to(accel.device())
    full.load_state_dict(accel.full_state_dict(model))

    if args.library == "torch":
        ema = AveragedModel(full, multi_avg_fn=get_ema_multi_avg_fn(0.95))
    else:
        from diffusers.training_utils import EMAModel

        ema = EMAModel(full.parameters(), decay=0.95)

    for _ in range(4):
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            # Every rank must call full_state_dict.
            full.load_state_dict(accel.full_state_dict(model))
            if args.library == "torch":
                ema.update_parameters(full)
            else:
                ema.step(full.parameters())

    if args.library == "torch":
        averaged = ema
    else:
        averaged = full
        ema.copy_to(averaged.parameters())
    before = error_of(model, loader)
    after = error_of(averaged, loader)
    accel.print(
        f"error {before:.4f} to {after:.4f} with the averaged weights"
    )
    accel.save({"model": model, "ema": averaged}, args.out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--library", choices=["torch", "diffusers"], default="torch"
    )
    parser.add_argument("--out", default="runs/ema")
    main(parser.parse_args())
