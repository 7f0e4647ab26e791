"""The contract of a stage model and what every stage of a transformers model shares.

A stage is the whole model, built on the meta device, without what other stages own. It knows its
stage and the number of stages, and no process group.

Shapes: B samples of a micro-batch, T tokens, H hidden size, V vocabulary.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from stageline.errors import PlanError, UserError
from stageline.model_folder import load_config
from stageline.modules import recompute
from stageline.modules.lora import is_lora_name, key_map_without_last_lora
from stageline.modules.methods import (
    LANGUAGE,
    Methods,
    find_whole_modules,
    forget_lengths,
    is_inside,
)
from stageline.modules.new_rows import (
    NewRows,
    set_vocab_size,
    vocabulary_paths,
)
from stageline.modules.part_lora import find_targets, lora_of_parts, wrap_parts
from stageline.modules.recompute import CheckpointMode, checkpoint_layers, tower_layers
from stageline.modules.stage_names import Names, names_in
from stageline.pipeline.topology import layer_range, no_tower, stage_layers
from stageline.stage import Loader, Stage, default_loader

PARTS = ("vit", "mlp", "llm", "lm_head")


class StageModel(Stage):
    """One stage of a model; subclass it for an architecture of your own.

    Parameter names are those of the whole model: a stage shares the registries of `whole`, the
    pruned transformers model, instead of wrapping it under a prefix.

    Attributes:
        whole: the pruned transformers model, or None for a subclass that builds its own modules.
        partition: layers per stage.
        layers: the global indices of this stage's layers.
        start: adapters that are there already, and modules trained whole, of the arguments `lora`.
        whole_modules: paths of these modules, of all stages.
        logits_chunk: above 0 the last stage returns hidden states in the place of logits, and
            the loss makes logits of this many tokens at a time (stageline/modules/chunked_loss.py).
        vocabulary: module paths of embedding and head in the whole model.
        cached_configs: parts of the configuration, "" for all of it, whose `use_cache` is off here
            and on in what is saved.
        fresh_names: weights that a checkpoint may lack: they start by the seed, as without one.
        unused_names: beginnings of names in a checkpoint that the model has no use for.
        shared_names: weights that several stages hold on purpose, under one name: their gradients
            are summed, one of them is saved. Those that `adopt` finds tied are added.
        whole_names: the weights of the whole model; None: a subclass builds its own modules.
        methods: what is done in another way than training the whole model; `notes` tell of it.
        changes_config: the configuration is not that of the weights' folder.
    """

    cached_configs: tuple[str, ...] = ()
    fresh_names: frozenset[str] = frozenset()
    unused_names: tuple[str, ...] = ()
    shared_names: frozenset[str] = frozenset()
    whole_names: Names | None = None
    logits_chunk = 0
    checkpoint_every = 1
    changes_config = False

    def __init__(
        self,
        config: PretrainedConfig,
        *,
        stage: int,
        num_stages: int,
        partition: list[int] | None = None,
        visual_gpu_ratio: float = 0.0,
        vision_stages: int = 0,
        frozen_vit: bool = False,
        frozen_mlp: bool = False,
        frozen_llm: bool = False,
        frozen_lm_head: bool = False,
        dtype: torch.dtype = torch.float32,
        is_piece: bool = False,
        methods: Methods | None = None,
        loader: Loader | None = None,
        **lora: Any,
    ) -> None:
        super().__init__()
        self.methods = methods or Methods()
        self.notes: tuple[str, ...] = ()
        self.config, self.dtype = config, dtype
        self.stage, self.num_stages = stage, num_stages
        frozen = (frozen_vit, frozen_mlp, frozen_llm, frozen_lm_head)
        self.frozen_parts = dict(zip(PARTS, frozen, strict=True))
        self.start = (loader or default_loader()).start(lora)
        self.whole_modules: frozenset[str] = frozenset()
        self.lora = lora_of_parts(**lora)
        self.has_wrapped = False
        if vision_stages and not hasattr(self, "tower_partition"):
            raise no_tower("vision_stages", vision_stages, config.model_type)
        self.vision_stages = vision_stages
        self.partition = stage_layers(
            partition,
            num_layers=self.num_layers(),
            num_stages=num_stages,
            vision_stages=vision_stages,
            visual_gpu_ratio=visual_gpu_ratio,
            least=0 if is_piece else 1,
        )
        self.layers = layer_range(self.partition, stage)
        self.whole: PreTrainedModel | None = None
        self.parameter_order: list[str] = []
        self.vocabulary: tuple[str, ...] = ()

    def forward(
        self, hidden_or_ids: torch.Tensor, *extras: torch.Tensor, **batch: torch.Tensor
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Runs the stage.

        Args:
            hidden_or_ids: token ids [B, T] on stage 0, else the hidden states [B, T, H] of the
                stage before.
            extras: what else the stage before sends: small float tensors.
            batch: the micro-batch without labels; pixels are there on stage 0 only.

        Returns:
            Hidden states [B, T, H], or a tuple of them and of extras, as `get_example_output` says;
            on the last stage logits [B, T, V], or a tuple of them and of an extra loss: a scalar
            of this micro-batch, weighted, that is trained on top of the loss_fn part.
        """
        raise NotImplementedError

    def get_example_input(
        self, micro_batch_size: int, max_token_num: int | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Return what this stage receives, as tensors on the meta device with their true dtypes.

        Args:
            max_token_num: tokens of a row; None: the context length of the configuration.
        """
        shape = (micro_batch_size, self.row_length(max_token_num))
        if self.is_first:
            return (torch.empty(shape, dtype=torch.long, device="meta"),)
        hidden_size = self.text_config.hidden_size
        return (torch.empty(*shape, hidden_size, dtype=self.dtype, device="meta"),)

    def row_length(self, max_token_num: int | None) -> int:
        """Return the tokens of a row: the number given, or the configuration's context length."""
        return max_token_num or self._setting("max_position_embeddings", "Pass max_token_num")

    def parts(self) -> dict[str, list[str]]:
        """Module path prefixes of the parts `vit`, `mlp` (projector), `llm` and `lm_head`."""
        name = type(self).__name__
        raise UserError(f"{name} has no parts(). Return the paths of vit, mlp, llm and lm_head.")

    def modules_to_shard(self) -> list[nn.Module]:
        """Modules with weights that are called one after the other: decoder layers.

        With `dp_shard` their weights are sent one by one, and all others in one piece.
        """
        return []

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1

    @property
    def text_config(self) -> PretrainedConfig:
        """The configuration of the language model, which for a text model is the whole one."""
        return self.config.get_text_config(decoder=True)

    def num_layers(self) -> int:
        """Return the number of layers that are split over the stages."""
        return self._setting("num_hidden_layers", "Add it, or override num_layers()")

    def _setting(self, name: str, cure: str) -> int:
        value = getattr(self.text_config, name, None)
        if value is None:
            raise UserError(f"{type(self.text_config).__name__} has no {name}. {cure}.")
        return int(value)

    def layer_name(self, index: int) -> str:
        """The module path of a layer, for the planner."""
        lists = [
            name
            for name, module in self.named_modules()
            if isinstance(module, nn.ModuleList) and len(module) == self.num_layers()
        ]
        if len(lists) != 1:
            raise PlanError(
                f"{type(self).__name__} has {len(lists)} lists of its number of layers, not one. "
                "Override layer_name(index), or give `partition` as numbers."
            )
        return f"{lists[0]}.{index}"

    def layer_kind(self, index: int) -> object:
        """Return a key that tells apart layers with parameters of the same shapes."""
        types = getattr(self.text_config, "layer_types", None)
        return types[index] if types else None, index % self.checkpoint_every == 0

    def get_example_output(
        self, micro_batch_size: int, max_token_num: int | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Return what this stage sends on, on the meta device; empty on the last stage."""
        if self.is_last:
            return ()
        return self._successor().get_example_input(micro_batch_size, max_token_num)

    def _successor(self) -> "StageModel":
        # not copy.copy: FSDP, which shards stages, gives a class another __new__
        successor = object.__new__(type(self))
        successor.__dict__.update(self.__dict__)
        successor.stage = self.stage + 1
        return successor

    def get_batch_input(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return what this stage receives for one micro-batch, as tensors on the meta device.

        Override it where shapes depend on images, by their small integers: only the first stage
        has pixels.
        """
        return self.get_example_input(*batch["input_ids"].shape)

    def head_runs_alone(self) -> bool:
        """Whether the loss can run the head over a few hidden states, as `logits_chunk` asks."""
        return False

    def host_facts(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return more entries for a micro-batch, made on the host, the same on all stages."""
        return {}

    def get_batch_output(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return what this stage sends on for one micro-batch; empty on the last stage."""
        return () if self.is_last else self._successor().get_batch_input(batch)

    def part_of(self, name: str) -> str | None:
        """The part that a parameter belongs to; the longest prefix wins. None: in no part."""
        plain = name.replace(".lora_module", "") + "."
        prefixes = [(len(one), part, one) for part, own in self.parts().items() for one in own]
        matches = [part for _, part, one in sorted(prefixes) if plain.startswith(one + ".")]
        return matches[-1] if matches else None

    def frozen(self) -> None:
        """Set `requires_grad` on every parameter by part.

        A part with LoRA trains only its outermost adapter, and modules that are to be trained
        whole; above a quantized base nothing else trains. A tied head follows the embeddings.
        """
        trains = self.trained_rule()
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(trains(name))

    def trained_rule(self) -> Callable[[str], bool]:
        """Return a function that tells, from a parameter's name on any stage, whether it trains."""
        chosen = self.methods.trained_names(self)

        def trains(name: str) -> bool:
            part = self.part_of(name)
            has_lora = part in self.lora and self.lora[part].num > 0
            if is_inside(name, self.whole_modules):
                return True
            if has_lora or self.methods.quantization is not None:
                return has_lora and is_lora_name(name) and ".lora_module." not in name
            if chosen is not None and part in LANGUAGE:
                return name in chosen
            return not self.frozen_parts.get(part or "", False)

        return trains

    def get_key_map_without_last_lora(self) -> dict[str, str]:
        """Map names in a checkpoint without the outermost LoRA to parameter names here.

        A subclass may also return the reverse: see `names_on_disk`.
        """
        return key_map_without_last_lora(list(self.state_dict()))

    def train(self, mode: bool = True) -> "StageModel":
        if self.whole is not None:
            self.whole.training = mode
        return super().train(mode)

    def adopt(self, whole: PreTrainedModel) -> None:
        """Prunes `whole` to this stage and shares its modules; then puts LoRA on."""
        self.parameter_order = [name for name, _ in whole.named_parameters()]
        self.whole_names = names_in(whole)
        # every stage has the buffers outside of the layers
        self.shared_names |= self.whole_names.tied | self.whole_names.buffers
        self.vocabulary = vocabulary_paths(whole)
        lora = self.start.lora_of(self.lora, self.part_of, self.parameter_order)
        self.whole_modules = find_whole_modules(whole, self.start.modules_to_save)
        self.lora = find_targets(
            whole, self.parts(), lora, kept=self.whole_modules, notes=self.start.notes
        )
        self.prune(whole)
        forget_lengths(whole)
        self.__dict__["whole"] = whole  # not a child: this stage has its children
        self.__dict__["_modules"] = whole._modules
        self.__dict__["_parameters"] = whole._parameters
        self.__dict__["_buffers"] = whole._buffers
        self.__dict__["_non_persistent_buffers_set"] = whole._non_persistent_buffers_set
        self.wrap_lora()

    def prune(self, whole: PreTrainedModel) -> None:
        """Drops from a whole model, in place, what other stages own."""
        raise NotImplementedError

    def wrap_lora(self) -> None:
        """Wrap the targets in each part `*_lora_num` times."""
        self.has_wrapped = True
        wrap_parts(self, self.parts(), self.lora)

    def layer_list(self) -> list[tuple[int, nn.Module]]:
        """(index in the whole model, layer) of the split layers; others' may be among them."""
        raise UserError(
            f"{type(self).__name__} has no layer_list(), which `gradient_checkpointing` and "
            "`compile_layers` require. Return [(index, layer), ...] from it."
        )

    def enable_gradient_checkpointing(
        self, *, every: int = 1, mode: CheckpointMode = "full"
    ) -> None:
        """Recompute layers, those of a vision tower too, instead of keeping their activations."""
        self.checkpoint_every = every
        layers = self.layer_list()
        layers += tower_layers(self, but=[layer for _, layer in layers])
        checkpoint_layers(layers, every=every, mode=mode)

    @classmethod
    def build(
        cls,
        *,
        config_path: str | None,
        processor_path: str | None,
        checkpoint_path: str | None,
        stage: int,
        num_stages: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        seed: int = 0,
        gradient_checkpointing: bool = False,
        checkpoint_every: int = 1,
        checkpoint_mode: CheckpointMode = "full",
        offload_activations: bool = False,
        compile_layers: bool = False,
        logits_chunk: int = 0,
        trust_remote_code: bool = False,
        model_types: tuple[str, ...] | None = None,
        is_piece: bool = False,
        new_rows: NewRows | None = None,
        neftune_alpha: float = 0.0,
        methods: Methods | Mapping[str, object] | None = None,
        loader: Loader | None = None,
        **model_kwargs: Any,
    ) -> tuple["StageModel", Any, int]:
        """Build one stage and fill it; the body of most train_model parts.

        Without a checkpoint the start is random, and the same for every number of stages.

        Args:
            model_types: the architectures that the chosen key serves; None: any.
            is_piece: for the planner: it needs no layers, no processor, on meta no weights.
            new_rows: tokens that the tokenizer got for this run.
            neftune_alpha: noise on the embeddings in training; 0: none.
            methods: `Methods`, or what `Methods.of` takes.
            loader: reads the folders; None: `stageline.folder_loader()`.

        Returns:
            The stage on `device`, the processor, and the id of the padding token.
        """
        # the configuration
        disk = loader or default_loader()
        config_path = config_path or checkpoint_path
        if config_path is None:
            raise UserError(
                "Neither `model_path` nor `config_path` was given. `model_path` continues from "
                "weights, `config_path` starts at random."
            )
        config = load_config(config_path, trust_remote_code=trust_remote_code)
        if model_types is not None and config.model_type not in model_types:
            raise UserError(
                f"{config_path} holds a model of type {config.model_type!r}, `train_model` serves "
                f"{' or '.join(model_types)}. Choose its key, causal_lm or vision_language."
            )
        if new_rows is not None and checkpoint_path is not None:
            # it may have more rows than the configuration that its run began with
            folder, code = Path(checkpoint_path), trust_remote_code
            if saved := disk.num_rows(folder, of_base=True, trust_remote_code=code):
                set_vocab_size(config, saved)
        facts = (methods := Methods.of(methods)).prepare(config)
        # the stage and its weights
        asked = {"is_piece": is_piece, "methods": methods.is_asked and methods, "loader": loader}
        model_kwargs |= {name: value for name, value in asked.items() if value}
        model = cls(config, stage=stage, num_stages=num_stages, dtype=dtype, **model_kwargs)
        if any(one.num for one in model.lora.values()) and not model.has_wrapped:
            raise UserError(
                f"{cls.__name__} makes no LoRA layers. Call self.wrap_lora() at the end of its "
                "__init__, or drop the LoRA options."
            )
        is_bare = is_piece and torch.device(device).type == "meta"
        where: dict[str, Any] = {"device": device, "dtype": dtype, "is_bare": is_bare}
        rows: dict[str, Any] = {"new_rows": new_rows, "neftune_alpha": neftune_alpha}
        disk.fill(model, checkpoint_path, seed=seed, **where, **rows)
        methods.finish(model, facts)
        if logits_chunk and model.is_last and model.head_runs_alone():
            model.logits_chunk = logits_chunk
        # from the inside out: what is compiled can be recomputed, what that keeps be offloaded
        if compile_layers:
            recompute.compile_layers(model.layer_list())
        if gradient_checkpointing:
            model.enable_gradient_checkpointing(every=checkpoint_every, mode=checkpoint_mode)
        if offload_activations:
            recompute.offload_activations(model)
        if is_piece:
            return model, None, 0
        path = processor_path or checkpoint_path or config_path
        processor = disk.processor(path, trust_remote_code=trust_remote_code)
        return model, processor, disk.pad_token_id(processor)
