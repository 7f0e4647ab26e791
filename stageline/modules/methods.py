"""How a model is trained where it is not simply trained whole: what a stage is told beside LoRA.

Plain objects; the options are in `options/method_options.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from stageline.errors import UserError
from stageline.modules.freeze import FreezeRule
from stageline.modules.part_precision import norms_to_float32, upcast_output
from stageline.modules.pass_through import DONE, PassThrough
from stageline.modules.quantised import Quantization, base_bytes, quantise_layers
from stageline.modules.rope_scaling import RopeScaling, scale_rope

LANGUAGE = ("llm", "lm_head")


@dataclass(frozen=True)
class Methods:
    """What is asked for; nothing by default.

    Attributes:
        freeze: which layers of the language model train.
        rope_scaling: positions for longer texts.
        norms_fp32: norms of a half model are kept and computed in float32.
        upcast_lm_head: logits are float32.
        quantization: of the frozen linear layers below LoRA.
    """

    freeze: FreezeRule | None = None
    rope_scaling: RopeScaling | None = None
    norms_fp32: bool = False
    upcast_lm_head: bool = False
    quantization: Quantization | None = None

    @classmethod
    def of(cls, given: "Methods | Mapping[str, Any] | None") -> "Methods":
        """Of plain values: for `freeze`, `rope_scaling` and `quantization` those of their fields.

        A dtype may be its name.
        """
        if isinstance(given, cls):
            return given
        values = dict(given or {})
        for name, kind in (
            ("freeze", FreezeRule),
            ("rope_scaling", RopeScaling),
            ("quantization", Quantization),
        ):
            if isinstance(values.get(name), Mapping):
                values[name] = kind(**values[name])
        return cls(**values)

    @property
    def is_asked(self) -> bool:
        """Whether anything is to be done in another way."""
        return self != Methods()

    def prepare(self, config: PretrainedConfig) -> dict[str, Any]:
        """Changes a configuration before a stage is built of it; returns what `finish` takes."""
        facts: dict[str, Any] = {"notes": ()}
        if self.rope_scaling is not None:
            text = config.get_text_config(decoder=True)
            before = getattr(text, "rope_parameters", None)
            facts["notes"] = (scale_rope(config, self.rope_scaling),)
            facts["changes_config"] = text.rope_parameters != before
        return facts

    def quantise(self, model: Any, *, device: torch.device | str) -> None:
        """Quantises the layers of a filled stage, and brings the rest of it to the device."""
        if self.quantization is None:
            return
        layers = [layer for _, layer in model.layer_list() if not isinstance(layer, PassThrough)]
        before = base_bytes(layers)
        where = {"dtype": model.dtype, "device": device}
        count = quantise_layers(layers, self.quantization, **where)
        if layers and not count:
            raise UserError(
                f"--quantization {self.quantization.kind} came with a {model.config.model_type} "
                "model, whose layers hold no plain linear layer; one at least was expected, as "
                "those are what is quantised. Leave it out for this model."
            )
        after = base_bytes(layers)
        model.notes += (
            f"stage {model.stage}: {count} linear layers are kept as {self.quantization.kind}, "
            f"{after / 2**20:.3g} MiB instead of {before / 2**20:.3g}",
        )
        move_others(model, torch.device(device))

    def finish(self, model: Any, facts: dict[str, Any]) -> None:
        """Changes what a filled stage computes in, and tells it what `prepare` found."""
        model.changes_config = facts.get("changes_config", False)
        model.notes += facts["notes"] if model.stage == 0 else ()
        if self.norms_fp32:
            norms_to_float32(model)
        if self.upcast_lm_head and model.is_last and model.whole is not None:
            upcast_output(model.whole.get_output_embeddings())

    def trained_names(self, model: Any) -> frozenset[str] | None:
        """Parameters of language model and head that train, of all stages; None: no rule."""
        if self.freeze is None:
            return None
        names = [name for name in model.parameter_order if model.part_of(name) in LANGUAGE]
        embedding, head = (*model.vocabulary, "", "")[:2]
        return self.freeze.names(
            names,
            layers=model.layer_name(0).rpartition(".")[0],
            total=model.num_layers(),
            embedding=embedding,
            head=head,
        )


def move_others(model: nn.Module, device: torch.device) -> None:
    """Moves what is not quantised; what is tied stays tied."""
    for module in model.modules():
        if not getattr(module, "is_quantised", False):
            module._apply(lambda tensor: tensor.to(device), recurse=False)
            for name, value in vars(module).items():
                # zeros in the place of others' weights take no memory where they are
                if isinstance(value, torch.Tensor) and not hasattr(value, DONE):
                    module.__dict__[name] = value.to(device)
