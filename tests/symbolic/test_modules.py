"""Which file an import means."""

import pytest

from kltest.symbolic.modules import Modules

FILES = ("src/pkg/__init__.py", "src/pkg/losses.py", "src/pkg/sub/__init__.py", "src/pkg/sub/kl.py", "other/losses.py")


@pytest.mark.parametrize(
    ("importer", "name", "file"),
    [
        ("src/pkg/sub/kl.py", ".", "src/pkg/sub/__init__.py"),
        ("src/pkg/sub/kl.py", "..losses", "src/pkg/losses.py"),
        ("src/pkg/losses.py", ".sub.kl", "src/pkg/sub/kl.py"),
        ("src/pkg/losses.py", "pkg.sub", "src/pkg/sub/__init__.py"),
        ("other/train.py", "losses", "other/losses.py"),
        ("src/pkg/sub/kl.py", "losses", "src/pkg/losses.py"),
        ("other/train.py", "torch.nn", None),
        ("other/train.py", "....deep", None),
    ],
)
def test_an_import_means_the_nearest_file_of_that_name(importer, name, file):
    assert Modules({one: lambda: None for one in FILES}).find(importer, name) == file
