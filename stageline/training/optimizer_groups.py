"""Parameter groups: no weight decay on norms and biases."""

from torch import nn


def optimizer_groups(
    named_parameters: dict[str, nn.Parameter], *, weight_decay: float
) -> list[dict[str, object]]:
    """Splits parameters into those that decay and those that do not.

    Matrices decay (embeddings too); vectors, which are norms and biases, do not.

    Returns:
        Groups for a torch optimizer; the names stand in `param_names`. Empty groups are left out.
    """
    groups: list[dict[str, object]] = []
    for decays in (True, False):
        chosen = {
            name: parameter
            for name, parameter in named_parameters.items()
            if (parameter.ndim >= 2 and not name.endswith("bias")) is decays
        }
        if chosen:
            groups.append(
                {
                    "params": list(chosen.values()),
                    "param_names": list(chosen),
                    "weight_decay": weight_decay if decays else 0.0,
                }
            )
    return groups
