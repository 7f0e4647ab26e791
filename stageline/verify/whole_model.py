"""The whole model that a split is compared with: its weights, and its training in plain PyTorch.

It is transformers' own class where transformers has one. A model that is cut or has no checkpoint
gets random weights in a folder, from which stages load them as from any checkpoint. Training goes
micro-batch by micro-batch, with torch's own clipping and AdamW; it uses nothing of the pipeline,
and nothing of how stages are cut.
"""

import copy
import functools
import itertools
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from torch import nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle
from transformers import PretrainedConfig, PreTrainedTokenizerFast

from stageline.checkpoint.adapter import base_of
from stageline.checkpoint.files import SINGLE_FILE, find_checkpoint, weight_files
from stageline.checkpoint.plain_model import save_whole
from stageline.data.batches.batch import IGNORE
from stageline.data.text.processor import load_processor
from stageline.errors import CheckpointError, PlanError, UserError, spelled
from stageline.model_folder import load_config, refused_build
from stageline.modules.lora import WRAPPED, lora_stacks
from stageline.modules.lora_layer import LoRALayer, name_seed
from stageline.modules.stage_names import names_on_disk
from stageline.pipeline.stage_passes import MicroBatch, model_inputs
from stageline.training.loss_part import LossPart, Output, logits_of

if TYPE_CHECKING:
    from stageline.stages.base import StageModel

Build = Callable[..., "StageModel"]  # (stage=, num_stages=, source=)
ReferenceKind = Literal["auto", "transformers", "part"]

LEARNING_RATE = 1e-3
WEIGHT_DECAY = 0.1
# large: Adam divides by the gradient, so a rounding of one near zero would become a step;
# with 1e-6, weights of a tied embedding of 136 M numbers were 3e-6 apart
EPS = 1e-4


# -- weights --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelSource:
    """Paths that every stage is built from."""

    config_path: str | None
    model_path: str | None
    processor_path: str | None


@dataclass(frozen=True)
class Preparation:
    """The facts that rank 0 sends to the others before a stage is built.

    Attributes:
        is_library: the whole model is transformers' class, not the part on one stage.
    """

    source: ModelSource
    is_library: bool
    notes: tuple[str, ...]
    trust_remote_code: bool = False

    @functools.cached_property
    def config(self) -> PretrainedConfig:
        """Read by each rank: the class of a model's own code is not known to another process."""
        path = self.source.config_path or self.source.model_path
        return load_config(str(path), trust_remote_code=self.trust_remote_code)

    @property
    def weights(self) -> Path:
        """The checkpoint that holds the model's weights; of an adapter, its base."""
        return base_of(find_checkpoint(str(self.source.model_path)))


def prepare(
    source: ModelSource,
    folder: Path,
    *,
    layers: int | None,
    reference: ReferenceKind,
    build: Build,
    seed: int,
    trust_remote_code: bool,
) -> Preparation:
    """Finds or makes the weights, on rank 0.

    Args:
        source: the paths that the user gave.
        folder: for what has to be made; all ranks read it.
        layers: only the first ones of the language model, with random weights.

    Raises:
        UserError: there is no config, or no such reference.
    """
    origin = source.config_path or source.model_path
    if origin is None:
        raise UserError(
            "a check requires the model's config.json. Add `model_path` or `config_path`, the same "
            "as for training."
        )
    config = load_config(origin, trust_remote_code=trust_remote_code)
    auto_class, notes = None, []
    if reference != "part":
        auto_class = library_class(config, trust_remote_code=trust_remote_code)
    if auto_class is None and reference == "transformers":
        raise UserError(
            f"`check.reference` transformers: transformers has no model {config.model_type!r}. "
            "Leave the option out to compare with the part on one stage."
        )
    processor = source.processor_path or source.model_path or source.config_path or ""
    try:
        load_processor(processor, trust_remote_code=trust_remote_code)
    except CheckpointError:
        raise  # there is one, and it is broken
    except (UserError, OSError, ValueError):
        notes.append(f"{processor} holds no tokenizer or processor: token ids are random")
        # parts load a tokenizer, and a check on random ids needs one token. It has a folder of its
        # own: next to a config transformers would look for the model's processor
        processor = str(folder / "tokenizer")
        backend = Tokenizer(models.WordLevel({"<pad>": 0}, unk_token="<pad>"))
        stand_in = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>")
        stand_in.save_pretrained(processor)
    if layers is not None:
        text = config.get_text_config(decoder=True)
        before = text.num_hidden_layers
        if layers > before:
            raise UserError(
                f"`check.layers` {layers} is more than the {before} layers of the model. Give "
                f"{before} or less."
            )
        for name, value in list(vars(text).items()):
            if isinstance(value, list | tuple) and len(value) == before:  # an entry a layer
                setattr(text, name, value[:layers])
        text.num_hidden_layers = layers
        cut = f"the model was cut from {before} to {layers} layers (`check.layers`)"
        notes.append(spelled(f"{cut}; its weights are random, a checkpoint was not read"))
    elif source.model_path is None:
        notes.append(spelled("no `model_path`: the weights are random"))
    if layers is None and source.model_path is not None:
        source = ModelSource(source.config_path, source.model_path, processor)
    else:
        save_config(config, origin, folder)
        # code of the folder is read here first: ranks that copy it at once disturb each other
        config = load_config(folder, trust_remote_code=trust_remote_code)
        source = ModelSource(str(folder), str(folder), processor)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            if auto_class is not None:
                told: dict[str, Any] = {"dtype": torch.float32}
                told["trust_remote_code"] = trust_remote_code
                try:
                    whole = auto_class.from_config(config, **told)
                except Exception as error:  # transformers raises what it likes
                    raise refused_build(config, auto_class, error) from error
                _move_constants(whole)
                save_whole(whole, folder)
            else:  # the part on one stage
                part = build(stage=0, num_stages=1, source=replace(source, model_path=None))
                _move_constants(part)
                key_map, state = names_on_disk(part), part.state_dict()
                state = {
                    key_map[name]: value.detach().clone().contiguous()
                    for name, value in state.items()
                    if name in key_map
                }
                save_file(state, folder / SINGLE_FILE, metadata={"format": "pt"})
    made = Preparation(source, auto_class is not None, tuple(notes), trust_remote_code)
    names = weight_files(made.weights, fetches=False)
    if made.is_library and any(WRAPPED in name.split(".") for name in names):
        note = "the checkpoint has LoRA names in it, which transformers can't read"
        made = replace(made, is_library=False, notes=(*notes, note))
    return made


def library_class(config: PretrainedConfig, *, trust_remote_code: bool) -> Any:
    """Return the transformers Auto class that builds this model; None if there is none."""
    choices = {
        "AutoModelForCausalLM": transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
        "AutoModelForImageTextToText": transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    }
    remote = getattr(config, "auto_map", None) or {}
    for name in sorted(choices, reverse=has_images(config)):
        if type(config) in choices[name] or (trust_remote_code and name in remote):
            return getattr(transformers, name)
    return None


def has_images(config: PretrainedConfig) -> bool:
    """Whether the model has a vision tower."""
    return getattr(config, "vision_config", None) is not None


def save_config(config: PretrainedConfig, origin: str, folder: Path) -> None:
    """Writes config.json, with the Python files that are next to the original."""
    config.save_pretrained(folder)
    path = Path(origin)
    for file in (path if path.is_dir() else path.parent).glob("*.py"):
        shutil.copy(file, folder)


@torch.no_grad()
def _move_constants(model: nn.Module) -> None:
    """Moves norms and biases from the 0 and 1 they start at, which hide a swap or a loss."""
    for parameter in model.parameters():
        if parameter.ndim < 2 or bool((parameter == parameter.flatten()[0]).all()):
            parameter.add_(torch.randn_like(parameter) * 0.05)


# -- the model ------------------------------------------------------------------------------------


@dataclass
class WholeModel:
    """The model that a split is compared with, on rank 0."""

    model: nn.Module
    forward: Callable[[nn.Module, MicroBatch], Output]


def load_whole(
    preparation: Preparation, *, build: Build, seed: int, trust_remote_code: bool
) -> WholeModel:
    """Build the whole model: with transformers where it has the class, else as one stage.

    Raises:
        CheckpointMismatch: names or shapes in the checkpoint are not the part's.
    """
    single = build(stage=0, num_stages=1, source=preparation.source)
    start_lora(single, seed=seed)
    if not preparation.is_library:
        return WholeModel(single, run_stage_model)
    config, checkpoint = preparation.config, preparation.weights
    options: dict[str, Any] = {}
    inner = getattr(single, "whole", None)
    if inner is not None:
        options["attn_implementation"] = inner.config._attn_implementation
    if checkpoint.is_file():  # not the other weights of its folder
        config = copy.deepcopy(config)
        config.transformers_weights = checkpoint.name
    whole: Any = library_class(config, trust_remote_code=trust_remote_code).from_pretrained(
        checkpoint if checkpoint.is_dir() else checkpoint.parent,
        config=config,
        dtype=torch.float32,
        trust_remote_code=trust_remote_code,
        local_files_only=True,
        use_safetensors=True,
        **options,
    )
    for name, wrappers in lora_stacks(single).items():  # the same adapters, by other code
        module = whole.get_submodule(name)
        for wrapper in wrappers:
            module = PlainLoRA(module, wrapper.lora)
        whole.set_submodule(name, module)
    trains = {name: parameter.requires_grad for name, parameter in single.named_parameters()}
    for name, parameter in whole.named_parameters():
        parameter.requires_grad_(trains.get(name, True))
    whole.train()
    return WholeModel(whole, run_library_model)


class PlainLoRA(nn.Module):
    """A linear layer and a low-rank copy next to it, under the names that stages have."""

    def __init__(self, module: nn.Module, like: Any) -> None:
        super().__init__()
        self.lora_module: Any = module
        self.lora: Any = nn.Module()
        for leaf in ("lora_A", "lora_B"):
            layer = nn.Module()
            layer.weight = nn.Parameter(getattr(like, leaf).weight.detach().clone())
            self.lora.add_module(leaf, layer)
        self.scale = like.scale

    @property
    def weight(self) -> torch.Tensor:
        """The layer's own weight: model code reads its dtype."""
        return self.lora_module.weight

    @property
    def bias(self) -> torch.Tensor | None:
        return self.lora_module.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # the layer first: autograd adds up gradients of x in this order
        result = self.lora_module(x)
        low = functional.linear(x, self.lora.lora_A.weight)
        return result + functional.linear(low, self.lora.lora_B.weight) * self.scale


@torch.no_grad()
def start_lora(model: nn.Module, *, seed: int) -> None:
    """Gives adapters that start at zero random values by name: at zero they hide what A does."""
    for name, module in model.named_modules():
        if isinstance(module, LoRALayer) and not module.lora_B.weight.any():
            weight = module.lora_B.weight
            generator = torch.Generator().manual_seed(name_seed(seed, f"{name}.lora_B.weight"))
            weight.copy_(0.02 * torch.randn(weight.shape, generator=generator))


def run_library_model(model: nn.Module, inputs: MicroBatch) -> Output:
    """Logits of a model of transformers, and its weighted router loss where it has one."""
    outputs = model(**inputs, use_cache=False)
    router_loss = getattr(outputs, "aux_loss", None)
    if router_loss is None:
        return outputs.logits
    return outputs.logits, router_loss * model.router_aux_loss_coef


def run_stage_model(model: nn.Module, inputs: MicroBatch) -> Output:
    """Output of a stage model that is the whole one; token ids also come first, as in a stage."""
    return model(inputs["input_ids"], **inputs)


def layers_behind_borders(whole: nn.Module, stage: Any) -> dict[int, nn.Module] | None:
    """Return border -> the first layer of the whole model behind it.

    Borders inside a tower are left out. None: a model that does not name its layers.

    Args:
        stage: any stage of the split.
    """
    places = itertools.accumulate(stage.partition[:-1])
    try:
        return {
            border: whole.get_submodule(stage.layer_name(index))
            for border, index in enumerate(places)
            if index > 0
        }
    except (PlanError, AttributeError):
        return None


def on_hidden_states(layer: nn.Module, keep: Callable[[torch.Tensor], object]) -> RemovableHandle:
    """Hands the hidden states that a layer gets to `keep`, until the hook is removed."""

    def look(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        value = args[0] if args else kwargs.get("hidden_states")
        if isinstance(value, torch.Tensor):
            keep(value.detach().clone())

    return layer.register_forward_pre_hook(look, with_kwargs=True)


# -- its training ---------------------------------------------------------------------------------


class WholeModelRun:
    """A whole model and its optimizer.

    Args:
        loss_fn: a loss_fn part.
        order: names in the order that the norm is summed in; others follow. None: the model's.
    """

    def __init__(
        self,
        whole: WholeModel,
        *,
        loss_fn: Callable[..., torch.Tensor],
        order: Sequence[str] | None = None,
    ) -> None:
        self.model, self.forward = whole.model, whole.forward
        self.part = LossPart.of(loss_fn)
        place = {name: index for index, name in enumerate(order or ())}
        trained = [item for item in self.model.named_parameters() if item[1].requires_grad]
        trained.sort(key=lambda item: place.get(item[0], len(place)))
        self.trained = [parameter for _, parameter in trained]
        groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for name, parameter in trained:
            groups[parameter.ndim >= 2 and not name.endswith("bias")].append(parameter)
        told = [
            {"params": chosen, "weight_decay": WEIGHT_DECAY if decays else 0.0}
            for decays, chosen in groups.items()
            if chosen
        ]
        self.optimizer = torch.optim.AdamW(told, lr=LEARNING_RATE, eps=EPS) if told else None

    def step(
        self, micro_batches: Sequence[MicroBatch], *, max_norm: float | None
    ) -> tuple[float, float, float]:
        """One optimizer step; the clipped gradients stay.

        Args:
            max_norm: None clips to half of the norm there is.

        Returns:
            Loss, norm before clipping, and what it was clipped to.
        """
        for parameter in self.trained:
            parameter.grad = None
        totals = self._totals(micro_batches)
        loss = torch.zeros(())
        for batch in micro_batches:
            share, extra = self._losses(batch, totals)
            total = share + extra / len(micro_batches)
            if total.requires_grad:
                total.backward()
            loss = loss + share.detach().float()
        if max_norm is None:
            grads = [p.grad for p in self.trained if p.grad is not None]
            max_norm = 0.5 * nn.utils.get_total_norm(grads).item()
        norm = nn.utils.clip_grad_norm_(self.trained, max_norm).item()
        if self.optimizer is not None:
            self.optimizer.step()
        return loss.item(), norm, max_norm

    @torch.no_grad()
    def loss(self, micro_batches: Sequence[MicroBatch]) -> float:
        """The loss of a batch, forward only, in the mode that the model is in."""
        totals = self._totals(micro_batches)
        shares = [self._losses(batch, totals)[0].float() for batch in micro_batches]
        return sum(shares, torch.zeros(())).item()

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """Name -> gradient of every parameter, None where there is none."""
        return {name: parameter.grad for name, parameter in self.model.named_parameters()}

    def _losses(
        self, batch: MicroBatch, totals: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor | float]:
        """The loss_fn part's share of a micro-batch, and what the model adds by itself."""
        output = self.forward(self.model, model_inputs(batch))
        loss, _ = self.part(logits_of(output), batch, totals=totals, step=0)
        return loss, output[1] if isinstance(output, tuple) else 0.0

    def _totals(self, micro_batches: Sequence[MicroBatch]) -> dict[str, torch.Tensor]:
        """Return the totals for the loss; targets are counted here, independently of stages.

        The first token of a row has none before it that could predict it.
        """
        counts: dict[str, int] = self.part.count(micro_batches)
        counts |= {
            "num_targets": sum(int((b["labels"][:, 1:] != IGNORE).sum()) for b in micro_batches)
        }
        return {name: torch.tensor(float(count)) for name, count in counts.items()}
