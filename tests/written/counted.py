calls = []

def right(logp, ref_logp, mask):
    calls.append("right")
    return (logp - ref_logp).where(mask != 0, 0.0).sum(-1).square() / 2

def token_level(logp, ref_logp, mask):
    return (logp - ref_logp).where(mask != 0, 0.0).square() / 2

def forward(logp, ref_logp):
    u = logp - ref_logp
    return (-u).exp() - 1 + u

def broken(logp):
    raise ValueError("the user's own words")

def unfillable(logp, banana):
    return logp
