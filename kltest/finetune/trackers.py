"""Metrics sent to TensorBoard, Weights & Biases, trackio or any other tracker that accelerate knows."""

import json
from pathlib import Path
from typing import Any

from kltest.errors import UsageError, did_you_mean
from kltest.finetune.settings import NONE, Settings


def tracker_of(settings: Settings, folder: Path | None) -> Any:
    """Return the run's tracker, with `log(values, step)` and `finish()`; None if the settings name none.

    Raises:
        UsageError: There is no such tracker, or it is not installed.
    """
    if settings.tracker == NONE:
        return None
    try:
        from accelerate import PartialState
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        kinds = {str(name): kind for name, kind in LOGGER_TYPE_TO_CLASS.items()}
        if settings.tracker not in kinds:
            hint = did_you_mean(settings.tracker, kinds)
            raise UsageError(f"tracker: {hint}{settings.tracker!r} is none of {', '.join(kinds)}")
        PartialState(cpu=settings.device == "cpu")  # trackers ask which process is the first
        kind = kinds[settings.tracker]
        tracker = kind("kltest", **({"logging_dir": folder or "."} if kind.requires_logging_directory else {}))
        tracker.start()
    except ImportError as error:
        raise UsageError(f"tracker: {settings.tracker} is not installed ({error})") from error
    tracker.store_init_configuration({**settings.plain(), "kl_options": json.dumps(dict(settings.kl_options))})
    return tracker
