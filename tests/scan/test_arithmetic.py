"""What is lifted out of a tree is run only if it is arithmetic on tensors: everything else is refused by name."""

import ast

import pytest

from kltest.scanning.arithmetic import refusal

HOSTILE = (
    "def f(logp):\n    import os\n    return logp",
    "def f(logp):\n    return __import__('os').system('true')",
    "def f(logp):\n    return eval('1')",
    "def f(logp):\n    return exec('1')",
    "def f(logp):\n    return open('x')",
    "def f(logp):\n    return getattr(logp, 'device')",
    "def f(logp):\n    return logp.__class__",
    "def f(logp):\n    return logp.__class__.__bases__[0].__subclasses__()",
    "def f(logp):\n    return (lambda: 0).__globals__",
    "def f(logp):\n    return torch.load('x')",
    "def f(logp):\n    return torch.save(logp, 'x')",
    "def f(logp):\n    return torch.hub.load('x', 'y')",
    "def f(logp):\n    return torch.ops.load_library('x')",
    "def f(logp):\n    return torch.utils.cpp_extension.load('x', [])",
    "def f(logp):\n    return np.fromfile('x')",
    "def f(logp):\n    return np.load('x', allow_pickle=True)",
    "def f(logp):\n    return logp.numpy().tofile('x')",
    "def f(logp):\n    return logp.numpy().dump('x')",
    "def f(logp):\n    return torch.from_file('x')",
    "def f(logp):\n    return '{0.__class__}'.format(logp)",
    "def f(logp):\n    return f'{logp.__class__}'",
    "def f(logp):\n    return logp.register_hook(print)",
    "def f(logp):\n    return logp.apply_(print)",
    "def f(logp):\n    return logp.map_(logp, print)",
    "def f(logp):\n    global torch\n    torch = logp\n    return torch",
    "def f(logp):\n    torch = logp\n    return torch.exp()",
    "def f(logp):\n    len = logp\n    return len",
    "def f(torch):\n    return torch.exp()",
    "def f(logp):\n    def refusal(x):\n        return builtins.open(x)\n    return refusal(logp)",
    "def f(logp):\n    class A:\n        pass\n    return A()",
    "@print\ndef f(logp):\n    return logp",
    "def f(logp):\n    with open('x') as file:\n        return file",
    "def f(logp):\n    with torch.autocast('cpu'), torch.profiler.profile():\n        return logp",
    "def f(logp):\n    del logp\n    return 1",
    "def f(logp):\n    try:\n        return logp\n    except Exception:\n        return 1",
    "async def f(logp):\n    return await logp",
    "def f(logp):\n    yield logp",
    "def f(logp):\n    return sys.exit()",
    "def f(logp):\n    return os.environ",
    "def f(logp):\n    return logp.share_memory_()",
    "def f(logp):\n    return logp.storage()",
    "def f(logp):\n    return logp.data_ptr()",
    "def f(logp):\n    return unknown(logp)",
    "def f(logp):\n    return vars(logp)",
    "def f(logp):\n    return (x := logp)",
)
HARMLESS = (
    "def f(logp, ref_logp, mask):\n    kl = torch.exp(ref_logp - logp) - 1\n    return (kl * mask).sum()",
    "def f(logits, ref_logits):\n    return F.kl_div(logits, ref_logits, log_target=True, reduction='none').sum(-1)",
    "def f(logp):\n    with torch.no_grad():\n        x = logp.detach().clamp(min=-10.0)\n    return math.log(2.0) * x",
    "def helper(x, dim=None):\n    return x.sum(dim=dim)\n\n"
    "def f(logp):\n    if len(logp.shape) > 1:\n        logp = helper(logp, -1)\n"
    "    return logp if logp.numel() else torch.zeros_like(logp)",
    "def f(logp):\n    return sum(x.mean() for x in logp) + np.log(2)",
)


@pytest.mark.parametrize("text", HOSTILE)
def test_what_is_more_than_arithmetic_is_refused(text: str) -> None:
    assert refusal(ast.parse(text))[0]


@pytest.mark.parametrize("text", HARMLESS)
def test_arithmetic_is_not_refused(text: str) -> None:
    assert refusal(ast.parse(text)) == ("", 0)
    compile(text, "lifted", "exec")
