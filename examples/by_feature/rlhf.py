"""Train a policy with a frozen reference and a critic."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

import accel

VOCABULARY = 16
LENGTH = 8
REWARDED = 3


class Tokens(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.rnn = nn.GRU(VOCABULARY, 32, batch_first=True)
        self.head = nn.Linear(32, outputs)

    def forward(self, tokens):
        hidden, _ = self.rnn(F.one_hot(tokens, VOCABULARY).float())
        return self.head(hidden)

    @torch.no_grad()
    def generate(self, tokens):
        for _ in range(LENGTH):
            probabilities = self(tokens)[:, -1].softmax(-1)
            tokens = torch.cat(
                [tokens, torch.multinomial(probabilities, 1)], 1
            )
        return tokens


def log_probabilities(model, tokens):
    logits = model(tokens[:, :-1])
    return logits.log_softmax(-1).gather(2, tokens[:, 1:, None]).squeeze(2)


def main():
    accel.seed(0)
    policy = Tokens(VOCABULARY)
    critic = Tokens(1)
    reference = copy.deepcopy(policy).requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    critic_optimizer = torch.optim.AdamW(critic.parameters(), lr=1e-2)
    policy, optimizer, _ = accel.setup(policy, optimizer)
    critic, critic_optimizer, _ = accel.setup(critic, critic_optimizer)
    reference = accel.setup(reference).model

    accel.seed(1, per_rank=True)  # different texts on each rank
    rewards = []
    for _ in range(30):
        start = torch.zeros(32, 1, dtype=torch.long, device=accel.device())
        tokens = policy.generate(start)
        reward = (tokens[:, 1:] == REWARDED).float()
        with torch.no_grad():
            drift = log_probabilities(policy, tokens) - log_probabilities(
                reference, tokens
            )
        returns = (reward - 0.05 * drift).flip(1).cumsum(1).flip(1)

        values = critic(tokens[:, :-1]).squeeze(2)
        critic_optimizer.zero_grad()
        F.mse_loss(values, returns).backward()
        critic_optimizer.step()

        advantages = returns - values.detach()
        optimizer.zero_grad()
        loss = -(advantages * log_probabilities(policy, tokens)).mean()
        loss.backward()
        optimizer.step()
        rewards.append(accel.all_reduce(reward.sum(1).mean(), "mean").item())
    accel.print(f"reward {rewards[0]:.2f} to {rewards[-1]:.2f}")


if __name__ == "__main__":
    main()
