"""A built-in loss_fn as the engine gets it: with its options and its facts."""

from typing import Any

from commands.train_parts import make_loss_part
from options.parts import chosen_part
from register import import_shelf
from stageline.training.loss_part import LossPart

import_shelf("loss_fn")


def shelf_loss(key: str, **options: Any) -> LossPart:
    """Return the registered loss of a key."""
    return make_loss_part(chosen_part("loss_fn", key, options))
