"""The true gradient of KL(π‖ref) on sequences, twice: by kltest, and by autograd through a sum over all rollouts."""

import itertools

import numpy as np
import torch

from kltest.environments import Instance, sequence
from kltest.truth import gradient

VOCABULARY, LENGTH = 2, 2
generator = np.random.default_rng(0)
# One row of probabilities a prefix: the root, then after token 0, then after token 1.
policy, reference = (generator.dirichlet(np.ones(VOCABULARY), size=3) for _ in range(2))

instance = Instance.of(sequence(VOCABULARY, LENGTH), np.log(policy), np.log(reference))
by_kltest = gradient("reverse_kl", instance)

logits = torch.tensor(np.log(policy), requires_grad=True)
log_policy, log_reference = logits.log_softmax(-1), torch.tensor(np.log(reference))
kl = 0.0
for first, second in itertools.product(range(VOCABULARY), repeat=LENGTH):
    log_p = log_policy[0, first] + log_policy[1 + first, second]
    log_q = log_reference[0, first] + log_reference[1 + first, second]
    kl = kl + log_p.exp() * (log_p - log_q)
(by_autograd,) = torch.autograd.grad(kl, logits)

print(by_kltest)
print("largest difference:", np.abs(by_kltest - by_autograd.numpy()).max())
assert np.allclose(by_kltest, by_autograd.numpy(), rtol=0, atol=1e-14)
