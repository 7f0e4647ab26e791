"""What crosses the border between two stages, and whether both sides agree on it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stageline.contracts import broken, mismatch, shown
from stageline.errors import UserError
from stageline.stage import Stage

PROBE = (2, 8)  # micro-batch size and tokens, for which neighbours compare


@dataclass(frozen=True)
class BorderFacts:
    """One stage's side of its borders.

    Attributes:
        trains: it has a trainable parameter.
        takes, gives: shapes and types of what comes and goes, for the probe.
    """

    stage: int
    trains: bool
    takes: list[str]
    gives: list[str]


def describe_borders(model: Stage) -> BorderFacts:
    """The facts of a stage model."""
    return BorderFacts(
        stage=model.stage,
        trains=any(parameter.requires_grad for parameter in model.parameters()),
        takes=_describe(model.get_example_input(*PROBE)),
        gives=_describe(model.get_example_output(*PROBE)),
    )


def batch_input(model: Stage, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """What a stage receives for one micro-batch, on the meta device."""
    if hasattr(model, "get_batch_input"):
        return model.get_batch_input(batch)
    return model.get_example_input(*batch["input_ids"].shape)


def batch_output(model: Stage, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """What a stage sends on for one micro-batch."""
    if hasattr(model, "get_batch_output"):
        return model.get_batch_output(batch)
    return model.get_example_output(*batch["input_ids"].shape)


def check_borders(facts: Sequence[BorderFacts]) -> None:
    """Compares neighbours.

    Raises:
        UserError: a stage gives something else than the next one takes.
    """
    for before, behind in zip(facts, facts[1:], strict=False):
        if before.gives != behind.takes:
            raise UserError(
                f"stage {before.stage} sends {before.gives}, stage {behind.stage} expects "
                f"{behind.takes} for a micro-batch of {PROBE}: get_example_input and "
                "get_example_output of the stage model must agree."
            )


def _describe(tensors: Sequence[torch.Tensor]) -> list[str]:
    return [f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in tensors]


# -- whether what a train_model part built is a stage: what it says of its input, and what it gives
# Looked at when a stage is built, and in each forward pass, whose output the next stage waits for.
# Knows no rank.

PROBE = (2, 8)  # rows and tokens of the example
_METHODS = ("get_example_input", "get_example_output", "parts", "forward")
_ATTRIBUTES = ("stage", "num_stages", "is_first", "is_last")


def check_stage(made: object, *, part: Callable[..., Any]) -> Any:
    """The stage model that a train_model part returned.

    Args:
        made: what it returned.

    Raises:
        ContractError: it is no (model, processor, id), or the model is no stage, or says nothing
            usable of its input; the class, its file and line, and what came are named.
    """
    if not (isinstance(made, tuple) and len(made) == 3 and isinstance(made[0], nn.Module)):
        raise broken(
            "train_model",
            part,
            f"returned {shown(made) if not isinstance(made, nn.Module) else 'a model alone'}",
            why="A stage model, its processor and the id of the padding token were expected, "
            "because a checkpoint is saved with its processor",
            cure="return (model, processor, pad_token_id), as MyStage.build(**kwargs) does",
        )
    model = made[0]
    lacks = [name for name in _METHODS if not callable(getattr(model, name, None))]
    lacks += [name for name in _ATTRIBUTES if not hasattr(model, name)]
    if lacks:
        raise _of_stage(
            model,
            f"has no {', '.join(lacks)}",
            why="A StageModel was expected, because ranks compute from these what travels between "
            "stages, without asking each other",
            cure="subclass StageModel of pp_models (docs/add_a_model.md)",
        )
    _check_example(model)
    return model


def _check_example(model: Any) -> None:
    """Refuses a wrong `get_example_input`, of this stage and of the next one."""
    try:
        examples = [(model.stage, model.get_example_input(*PROBE))]
        if not model.is_last:
            examples.append((model.stage + 1, model.get_example_output(*PROBE)))
    except (AttributeError, NotImplementedError, TypeError) as error:
        raise _of_stage(
            model,
            f"cannot say what it receives ({type(error).__name__}: {error})",
            why="The shapes of its input were expected, because each rank takes the shapes of what "
            "travels from there; without one of its own a class has that of StageModel, which "
            "reads hidden_size of the config",
            cure="define get_example_input",
            contract="get_example_input",
        ) from error
    for stage, tensors in examples:
        problem = _problem_of(tensors, is_first=stage == 0)
        if problem is not None:
            raise _of_stage(
                model,
                f"said of the input of stage {stage}: {problem}",
                why=f"A tuple of tensors for {PROBE[0]} rows of {PROBE[1]} tokens was expected, "
                "because the shapes of what travels follow from it",
                cure="correct get_example_input",
                contract="get_example_input",
            )


def _problem_of(tensors: object, *, is_first: bool) -> str | None:
    if not isinstance(tensors, tuple | list) or not tensors:
        return shown(tensors)
    if not all(isinstance(value, torch.Tensor) for value in tensors):
        return shown(tensors)
    first = tensors[0]
    if is_first:
        is_right = tuple(first.shape) == PROBE and not first.is_floating_point()
        return None if is_right else f"{shown(first)}, which are no token ids"
    floats = [value.is_floating_point() for value in tensors]
    if not all(floats):
        place = floats.index(False)
        return f"{shown(tensors[place])} at place {place}, and floats alone travel"
    return None


def check_values_kept(stages: Sequence[Stage]) -> None:
    """Refuses stages with tensors that were made under meta and have no values.

    Parameters and buffers get theirs when the stage is filled; what is a plain attribute does not.

    Raises:
        ContractError: names the tensors.
    """
    for stage in stages:
        lost = [
            f"{path}.{name}" if path else name
            for path, module in stage.named_modules()
            for name, value in vars(module).items()
            if _is_lost(value)
        ]
        if not lost:
            continue
        raise _of_stage(
            stage,
            f"has {len(lost)} tensors without values: {', '.join(lost[:6])}",
            why="Values were expected: what is made inside `with torch.device('meta')` has a shape "
            "alone, and only parameters and buffers are filled afterwards",
            cure="make it a parameter, or a buffer that a module's reset_parameters() fills, or "
            "make it outside of that block (device='cpu')",
        )


def _is_lost(value: object) -> bool:
    if isinstance(value, list | tuple):
        return any(_is_lost(item) for item in value[:100])
    # parameters and buffers, which lie in dicts, are looked at where they are filled
    return isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter) and value.is_meta


def run_stage(
    model: nn.Module, inputs: Sequence[torch.Tensor], batch: Mapping[str, torch.Tensor]
) -> Any:
    """The output of a forward pass.

    Args:
        inputs: token ids on the first stage, else what the stage before returned.
        batch: what the model's forward takes besides.

    Raises:
        ContractError: the stage takes other arguments, or returns something else than tensors.
    """
    try:
        output = model(*inputs, **batch)
    except TypeError as error:
        problem = mismatch(model.forward, *inputs, **batch)
        if problem is None:
            raise  # a mistake inside, which its traceback tells
        raise _of_stage(
            model,
            f"cannot be called with {len(inputs)} tensors and {', '.join(batch)} ({problem})",
            why="It was expected to take what the stage before sends, and the whole micro-batch",
            cure="define forward(self, hidden_or_ids, *extras, **batch)",
        ) from error
    _check_output(model, output, batch)
    return output


def _check_output(model: Any, output: object, batch: Mapping[str, torch.Tensor]) -> None:
    """Refuses what is no tensor and no tuple of them, and logits of other rows or tokens."""
    values = output if isinstance(output, tuple) else (output,)
    is_last = getattr(model, "is_last", False)
    most = 2 if is_last else len(values)
    if not (0 < len(values) <= most and all(isinstance(value, torch.Tensor) for value in values)):
        raise _of_stage(
            model,
            f"returned {shown(output)} from forward",
            why="Logits, or (logits, extra loss), were expected, because the loss takes them"
            if is_last
            else "Hidden states, or a tuple with them, were expected, because tensors travel on",
            cure="take them out of the library's output: output.logits, output.last_hidden_state",
        )
    ids = batch.get("input_ids")
    if is_last and ids is not None and values[0].shape[:2] != ids.shape:
        raise _of_stage(
            model,
            f"returned {shown(values[0])} as logits of {len(ids)} rows of {ids.shape[1]} tokens",
            why="Numbers for each token of each row were expected, because the logits of token t "
            "predict label t + 1",
            cure="return [rows, tokens, vocabulary]",
        )


def check_border(
    model: Stage, came: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], index: int
) -> None:
    """Refuses an output that is not what the next stage was said to receive.

    A wrong shape would be read as garbage, or hang the peer: two comparisons prevent it.

    Args:
        expected: on meta, of this micro-batch.
        index: of the micro-batch.

    Raises:
        ContractError: as above.
    """
    found = [(tuple(value.shape), value.dtype) for value in came]
    wanted = [(tuple(value.shape), value.dtype) for value in expected]
    if found == wanted:
        return
    differs = "number" if len(found) != len(wanted) else "shape or dtype"
    raise _of_stage(
        model,
        f"made {found} of micro-batch {index}, stage {model.stage + 1} expects {wanted}",
        why=f"The same {differs} was expected, because the next rank waits for exactly that",
        cure="get_example_input has to give the true shape and dtype of what the stage before "
        "returns, extras included; in half precision self.dtype",
        contract="get_example_input",
    )


def _of_stage(
    model: Any, came: str, *, why: str, cure: str, contract: str = "stage model"
) -> UserError:
    came = f"of stage {getattr(model, 'stage', '?')} {came}"
    return broken("stage model", type(model), came, why=why, cure=cure, contract=contract)
