"""Reinforcement learning with three models: a policy, its frozen reference and a critic, each with an engine of its own."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

import accel

VOCABULARY, LENGTH, WANTED = 16, 8, 3


class Tokens(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.rnn = nn.GRU(VOCABULARY, 32, batch_first=True)
        self.head = nn.Linear(32, outputs)

    def forward(self, tokens):
        return self.head(self.rnn(F.one_hot(tokens, VOCABULARY).float())[0])

    @torch.no_grad()
    def generate(self, tokens):
        for _ in range(LENGTH):
            tokens = torch.cat([tokens, torch.multinomial(self(tokens)[:, -1].softmax(-1), 1)], 1)
        return tokens


def log_probabilities(model, tokens):
    return model(tokens[:, :-1]).log_softmax(-1).gather(2, tokens[:, 1:, None]).squeeze(2)


def main():
    accel.seed(0)
    policy, critic = Tokens(VOCABULARY), Tokens(1)  # logits of the next token at each place, and a value
    reference = copy.deepcopy(policy).requires_grad_(False)  # copy raw modules, before setup
    policy, optimizer, _ = accel.setup(policy, torch.optim.AdamW(policy.parameters(), lr=1e-2))
    critic, critic_optimizer, _ = accel.setup(critic, torch.optim.AdamW(critic.parameters(), lr=1e-2))
    reference = accel.setup(reference).model  # no optimizer: it only answers

    accel.seed(1, per_rank=True)  # each process samples texts of its own
    rewards = []
    for _ in range(30):
        tokens = policy.generate(torch.zeros(32, 1, dtype=torch.long, device=accel.device()))
        reward = (tokens[:, 1:] == WANTED).float()  # a model of rewards would be one engine more
        drift = (log_probabilities(policy, tokens) - log_probabilities(reference, tokens)).detach()
        returns, values = (reward - 0.05 * drift).flip(1).cumsum(1).flip(1), critic(tokens[:, :-1]).squeeze(2)
        critic_optimizer.zero_grad()
        F.mse_loss(values, returns).backward()
        critic_optimizer.step()
        optimizer.zero_grad()
        ((values.detach() - returns) * log_probabilities(policy, tokens)).mean().backward()
        optimizer.step()
        rewards.append(accel.all_reduce(reward.sum(1).mean(), "mean").item())
    accel.print(f"reward {rewards[0]:.2f} to {rewards[-1]:.2f}")


if __name__ == "__main__":
    main()
