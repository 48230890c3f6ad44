import ctypes, os, signal, sys, time
import torch

def truth(logp, ref_logp):
    return 0.5 * (logp - ref_logp).sum(-1) ** 2

def k3(logp, ref_logp):
    u = logp - ref_logp
    return torch.exp(-u) - 1 + u

def raises(logp):
    helper(logp)

def helper(logp):
    raise ValueError("the user's own words")

def prints(logp, ref_logp):
    print("to standard output")
    print("to standard error", file=sys.stderr)
    os.write(1, b"below Python\n")
    return truth(logp, ref_logp)

def slow(logp, ref_logp, mask):
    time.sleep(0.02)
    return 0.5 * (logp - ref_logp).where(mask != 0, 0.0).sum(-1) ** 2

def slow_and_wrong(logp, ref_logp, mask):
    time.sleep(0.02)
    return (logp - ref_logp).where(mask != 0, 0.0)

def deaf_in_a_branch(logp, ref_logp):
    if len(logp) == 2 and logp.shape[1] == 3:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
        time.sleep(300)
    return truth(logp, ref_logp)

def floods(logp):
    while True:
        print("x" * 1000)

def never(logp):
    while True:
        try:
            time.sleep(1)
        except BaseException:
            pass

def leaves(logp):
    print("last words", flush=True)
    os._exit(7)

def exhausts(logp):
    return torch.zeros(10**14)

def asks(logp):
    return logp * float(input())
