"""Fine-tuning a causal language model with rewards and a KL term, and measuring what the term does.

*Gradient.* Each update follows the gradient of −E[R] + β·(KL term), rewards minus a baseline, with the KL term from
`kltest.estimators` or from any file that `kltest grade` takes. The defaults are unbiased for E[R] − β·KL(π‖ref):
leave-one-out baselines, no division by lengths or deviations, the KL in the reward with the whole return, and
full-sequence ratios for several inner epochs. Adam and the limit on the gradient's norm come after that.

*Policy.* Sampler, reference and update all use softmax(logits/temperature) over all tokens. A rollout ends with an end
token or at `max_tokens`. Dropout is off.

*Randomness.* Prompts and uniforms depend on the seed and the number of the step alone (`kltest.finetune.rollouts`).

*Measurements* are taken on fresh rollouts, never on the training batch; see METRICS in `kltest.finetune.settings`.

Read `kltest.finetune.run` first: it is the whole loop. `kltest.finetune.objective` computes the gradient with respect
to each log-prob and pulls it back through the model.
"""
