import os

from kltest.adapters import Adapter, Setting

def setting(kind, **more):
    return Setting(f"penalty/{kind}", "kltest_made_up.losses:penalty", {"kind": kind}, **more)

ADAPTER = Adapter(
    name="made-up",
    distribution="kltest-made-up",
    version="1.0",
    installs=(("--no-deps", "--no-index", "--find-links", "WHEELS", "kltest-made-up=={version}"),),
    module="kltest_made_up.losses",
    homepage="https://example.org",
    settings=(
        setting("linear", default=True),
        setting("square", options={"expect": "local_reverse_kl"}),
        setting("raises"),
        setting("leaves"),
        setting("kills", options={"timeout": 4}),
        setting("fills"),
        setting("hangs", options={"timeout": float(os.environ.get("HANGS", 4))}),
        setting("straight", since="2.0"),
    ),
    history=(setting("square", options={"expect": "local_reverse_kl"}),),
)
