"""Trajectories of Local SGD, made with torch's own modules and optimizers.

    python tools/golden/local_sgd.py > tests/local_sgd/local_sgd_golden.h

Two replicas in one process. Replica r's batch of step t has 1 + (t + r) % 3 rows,
whose numbers are sines; everything is fp64. Accumulation: gradients of the rows of
all batches of a step, as one batch. `uneven`: replica 1 has one step fewer in each
epoch of 5. Printed: all parameters (and running statistics) of replica 0 after the
last average, as hexadecimal numbers.
"""

import torch


def rows(replica, turn):
    count = 1 + (turn + replica) % 3
    start = 100 * replica + 10 * turn
    x = torch.arange(start, start + count * 4, dtype=torch.float64).sin().view(count, 4)
    return x, x.sum(1, keepdim=True).cos()


class Plain(torch.nn.Module):
    def __init__(self, normed):
        super().__init__()
        self.first = torch.nn.Linear(4, 5)
        self.norm = torch.nn.BatchNorm1d(5) if normed else None
        self.second = torch.nn.Linear(5, 1)
        self.double()
        with torch.no_grad():
            for i, p in enumerate(self.parameters()):
                p.copy_(torch.arange(p.numel()).double().add(7 * i + 1).cos().view_as(p) / 2)

    def forward(self, x):
        h = self.first(x)
        if self.norm is not None:
            h = self.norm(h)
        return self.second(torch.tanh(h))


def average(replicas, stepped):
    """Mean over the replicas that have stepped; statistics are pooled."""
    with torch.no_grad():
        contributors = [r for r, s in zip(replicas, stepped) if s]
        for ps in zip(*[r.parameters() for r in replicas]):
            chosen = [p for p, s in zip(ps, stepped) if s]
            mean = sum(chosen) / len(chosen)
            for p in ps:
                p.copy_(mean)
        if replicas[0].norm is not None:
            means = [r.norm.running_mean.clone() for r in contributors]
            seconds = [r.norm.running_var + r.norm.running_mean**2 for r in contributors]
            mean = sum(means) / len(means)
            variance = sum(seconds) / len(seconds) - mean**2
            for r in replicas:
                r.norm.running_mean.copy_(mean)
                r.norm.running_var.copy_(variance)


def run(optimizer, h, accumulation=1, uneven=False, normed=False, epochs=2):
    replicas = [Plain(normed) for _ in range(2)]
    optimizers = [optimizer(r.parameters()) for r in replicas]
    stepped = [0, 0]
    clock = 0
    for epoch in range(epochs):
        for step in range(5):
            for r in range(2):
                if uneven and r == 1 and step == 4:
                    continue
                batches = [rows(r, 5 * epoch + step + 50 * a) for a in range(accumulation)]
                if normed:  # one batch of three rows and more: statistics need them
                    batches = [rows(r, 5 * epoch + step + 50 * a) for a in range(3)]
                x = torch.cat([b[0] for b in batches])
                y = torch.cat([b[1] for b in batches])
                optimizers[r].zero_grad()
                torch.nn.functional.mse_loss(replicas[r](x), y).backward()
                optimizers[r].step()
                stepped[r] += 1
            clock += 1
            if clock % h == 0:
                average(replicas, stepped)
                stepped = [0, 0]
    if any(stepped):
        average(replicas, stepped)
    values = [v for p in replicas[0].parameters() for v in p.flatten().tolist()]
    if normed:
        values += replicas[0].norm.running_mean.tolist() + replicas[0].norm.running_var.tolist()
    return values


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.02)


CASES = {
    "kSgdEvery1": run(sgd, 1),
    "kSgdEvery3": run(sgd, 3),
    "kSgdEvery4Accumulated": run(sgd, 4, accumulation=2),
    "kAdamWEvery3Uneven": run(adamw, 3, uneven=True),
    "kAdamWEvery2Normed": run(adamw, 2, normed=True),
}

print("// Made by tools/golden/local_sgd.py. Do not edit.")
print("#pragma once\n\n#include <vector>\n\nnamespace hasten::local_sgd_golden {\n")
for name, values in CASES.items():
    print(f"inline const std::vector<double> {name}{{")
    for v in values:
        print(f"    {v.hex()},")
    print("};\n")
print("} // namespace hasten::local_sgd_golden")
