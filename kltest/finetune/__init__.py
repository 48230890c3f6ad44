"""Fine-tuning a causal language model with rewards and a KL term, and measuring what the term does.

Conventions.

*What is followed.* The gradient of −E[R] + β·(KL term), rewards less a baseline, with the KL term as it stands in
`kltest.estimators` or in any file that `kltest grade` takes. The defaults are unbiased for E[R] − β·KL(π‖ref):
leave-one-out baselines, nothing divided by lengths or deviations, the KL in the reward with the whole return, and, for
several inner epochs, full-sequence ratios. Adam and the shortening of long gradients come after that.

*The policy* is softmax(logits/temperature) over all tokens, for the sampler, the reference and the update alike; it
ends with an end token or at `max_tokens`. Dropout is off.

*Randomness.* Prompts and uniforms depend on the seed and the number of the step alone (`kltest.finetune.drawing`).

*What is measured* is on fresh rollouts, never on the training batch: see METRICS in `kltest.finetune.metrics`.

`run(settings, folder)` is the whole; `kltest.finetune.objective` works out what each log-prob is pulled with, and
`kltest.finetune.update` chains that into a model.
"""
