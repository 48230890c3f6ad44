"""Where the runner's references are kept: not among the user's own, and trained once for all tests of a process."""

import pytest


@pytest.fixture(scope="session")
def folder_of_models(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def models_folder(folder_of_models):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KLTEST_MODELS", str(folder_of_models))
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield folder_of_models
