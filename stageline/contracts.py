"""What a part has to keep, in one line for each register, and the error of a part that does not.

Knows no register and no key: a part is named by what it is called and where it is written. Who
calls a part looks at what came back; docs/add_a_part.md says the same at more length.
"""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from stageline.errors import ContractError, UserError

CONTRACTS = {
    "dataset": "part(*, dataset_path, split, **own) -> an object with len(it), and it[i] -> "
    "(images or None, sample): a list of PIL images, and a dict",
    "prompt_fn": "part(sample, prompt, *, processor, for_generation, **own) -> Rendered",
    "image_token": "part(rendered, images, *, processor) -> Rendered",
    "collate_fn": "part(samples, *, prompt, prompt_fn, image_token, processor, pad_token_id, "
    "max_token_num, stage, num_stages, **own) -> a dict of tensors: input_ids, attention_mask and "
    "labels, each [B, T], and what else stages and loss need",
    "encode": "part.encode(images, sample, **common) -> EncodedSample, with the arguments of the "
    "collate_fn part",
    "loss_fn": "part(logits_BTV, micro_batch, *, num_targets, **own) -> a scalar, or (scalar, "
    "figures): sums over the micro-batch, divided by num_targets or another count of the batch",
    "sim_fn": "part(a_NV, b_NV, **own) -> similarities [N]",
    "reward": "part(prompts, completions, samples, **own) -> a list with a number or None for each "
    "completion; a sample has num_tokens and is_cut of its answer and the prompt's images (PIL, or "
    "None) besides its fields",
    "metric": "part(predictions, samples, **own) -> a dict: score, per_sample (0 or 1 for each "
    "sample), groups ({name: indices})",
    "optimizer": "part(param_groups, *, learning_rate, weight_decay, **own) -> a torch optimizer "
    "over all of these parameters",
    "lr_scheduler": "part(*, learning_rate, min_lr, warmup_steps, warmup_start_lr, total_steps, "
    "**own) -> a function: step -> rate",
    "tracker": "part(*, folder, config, start_step, **own) -> an object with "
    "log(kind, step, figures) and close(), or None",
    "train_model": "part(*, config_path, processor_path, checkpoint_path, stage, num_stages, "
    "**model_kwargs) -> (stage model, processor, id of the padding token)",
    "stage model": "forward(hidden_or_ids, *extras, **batch) -> the hidden states, or (hidden "
    "states, *extras), as get_example_input of the next stage says; on the last stage logits, or "
    "(logits, extra loss)",
    "get_example_input": "get_example_input(micro_batch_size, max_token_num) -> a tuple of tensors "
    "on the meta device: token ids [B, T] on stage 0, else what the stage before returns",
}
OF_MODELS = ("train_model", "stage model", "get_example_input")
_ROOT = Path(__file__).resolve().parents[1]
MOST_CHARACTERS = 60  # of a value that is shown


def broken(
    register: str,
    part: object,
    came: str,
    *,
    why: str,
    cure: str,
    kind: type[UserError] = ContractError,
    contract: str | None = None,
) -> UserError:
    """The error of a part that does not keep its contract.

    Args:
        came: what it did, "returned a dict".
        why: what was expected, and because of what.
        cure: what to do.
        kind: of error; DataError where a row is wrong.
        contract: which one it is, where it is not that of the register.
    """
    contract = contract or register
    guide = "add_a_model.md" if contract in OF_MODELS else "add_a_part.md"
    kept = f"Contract: {CONTRACTS[contract]} (docs/{guide})."
    return kind(f"the {register} {part_name(part)} {came}. {why}: {cure}. {kept}")


def call(register: str, part: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a part.

    Raises:
        ContractError: it does not take these arguments.
    """
    try:
        return part(*args, **kwargs)
    except TypeError:
        check_call(register, part, *args, **kwargs)
        raise  # a mistake inside, which its traceback tells


def check_call(register: str, part: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Refuse a part that does not take these arguments, without calling it."""
    problem = mismatch(part, *args, **kwargs)
    if problem is not None:
        signature = str(inspect.signature(_unwrapped(part)))
        shortened = signature if len(signature) < 200 else signature[:200] + " ...)"
        raise broken(
            register,
            part,
            f"has the signature {shortened} ({problem})",
            why="The run hands the arguments of the contract over by name",
            cure="change the signature; **others takes what the part does not need",
        )


def mismatch(part: Callable[..., Any], *args: Any, **kwargs: Any) -> str | None:
    """Why a part does not take these arguments; None: it does, or nobody can tell."""
    while isinstance(part, functools.partial):  # whose own signature hides what does not fit
        args, kwargs = (*part.args, *args), {**part.keywords, **kwargs}
        part = part.func
    try:
        inspect.signature(part).bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    except ValueError:  # built-in functions have no signature to read
        return None
    return None


def _unwrapped(part: Any) -> Any:
    """The part itself, without partials around it, and without the object made of it."""
    while True:
        if isinstance(part, functools.partial):
            part = part.func
        elif hasattr(part, "__wrapped__") and not inspect.isroutine(part):
            part = part.__wrapped__
        else:
            return part


def part_name(part: object) -> str:
    """What a part is called, and its file and line: `my_loss (my_parts.py:12)`."""
    inner = _unwrapped(part)
    is_named = inspect.isroutine(inner) or inspect.isclass(inner)
    target: Any = inspect.unwrap(inner) if is_named else type(inner)
    name = target.__qualname__
    try:
        file = Path(inspect.getsourcefile(target) or "")
        code = getattr(target, "__code__", None)
        line = code.co_firstlineno if code else inspect.getsourcelines(target)[1]
    except (TypeError, OSError):  # of the interpreter, or written without a file
        return name
    if file.is_relative_to(_ROOT):
        file = file.relative_to(_ROOT)
    return f"{name} ({file}:{line})"


def shown(value: object) -> str:
    """A value in a few words: its type, and of tensors their shape."""
    if isinstance(value, torch.Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        return f"a tensor of shape {list(value.shape)} in {kind}"
    if value is None:
        return "None (a forgotten return?)"
    name = type(value).__name__
    article = "an" if name[0] in "aeiouAEIOU" else "a"
    if isinstance(value, dict):
        return f"{article} {name} with {', '.join(map(repr, list(value)[:6])) or 'nothing in it'}"
    if isinstance(value, list | tuple):
        inside = ", ".join(type(item).__name__ for item in value[:4])
        more = ", ..." if len(value) > 4 else ""
        return f"{article} {name} of {len(value)} ({inside}{more})"
    text = repr(value[: 2 * MOST_CHARACTERS] if isinstance(value, str | bytes) else value)
    text = " ".join(text.split())
    more = " ..." if len(text) > MOST_CHARACTERS else ""
    return f"{article} {name}: {text[:MOST_CHARACTERS]}{more}"
