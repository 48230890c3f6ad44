import torch

def summed(u, mask):
    return ((u * mask).sum(-1) ** 2 / 2).mean()

def nested(data):
    batch = data.batch
    return summed(batch["log_probs"] - batch["ref_log_prob"], batch["response_mask"])

def attributes(batch, cfg):
    return cfg.algorithm.kl_coef * summed(batch.logps - batch.ref_logps, batch.completion_mask)

def mixed(batch, cfg):
    return cfg["scale"] * summed(batch["logps"].double() - batch["ref_logps"], batch["mask"].to(torch.float64))

def both(batch):
    return batch["weight"] * summed(batch["logprobs"] - batch.get("ref_logprobs"), batch["loss_mask"])

def packed(logps, ref_logps, cu_seqlens, max_seqlen):
    assert max_seqlen >= 1
    u = logps - ref_logps
    return torch.stack([u[a:b].sum() ** 2 / 2 for a, b in zip(cu_seqlens[:-1], cu_seqlens[1:])]).mean()

def per_token(model, input_ids, attention_mask):
    logp = model(input_ids=input_ids, attention_mask=attention_mask).logits[:, :-1].log_softmax(-1)
    return logp.gather(-1, input_ids[:, 1:, None])[..., 0], attention_mask[:, 1:]

def two_models(model, ref_model, input_ids, attention_mask):
    logp, mask = per_token(model, input_ids, attention_mask)
    return summed(logp - per_token(ref_model, input_ids, attention_mask)[0].detach(), mask)

def of_inputs(model, inputs, num_items=None):
    logp, mask = per_token(model, inputs["input_ids"], inputs["attention_mask"])
    return summed(logp - inputs["ref_per_token_logps"], mask)

def with_labels(model, input_ids, labels, ref_logps):
    logp, _ = per_token(model, input_ids, torch.ones_like(input_ids))
    return summed(logp - ref_logps, labels[:, 1:] != -100)

class Trainer:
    def compute_loss(self, model, inputs, return_outputs=False):
        prompt, mask = inputs["prompt_ids"], torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        logp, mask = per_token(model, torch.cat([prompt, inputs["completion_ids"]], dim=1), mask)
        return summed(logp - inputs["ref_per_token_logps"], mask)

def of_engines(inputs, scale):
    return scale * summed(inputs["trainer_logprobs"] - inputs["teacher_logprobs"], inputs["loss_mask"])

def unknown(x, y):
    return x.to(y.dtype) + y.sum(-1)
