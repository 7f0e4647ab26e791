"""Finds the parts of a transformers model by what they are, not by a table of names.

Works for every decoder and vision-language model of transformers 5 whose layers lie in one list
beside the token embeddings.
"""

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from stageline.errors import UserError

POSITION_EMBEDDINGS = ("wpe", "embed_positions")
EMBEDDING_DROPOUTS = ("drop", "emb_dropout", "embed_dropout")
FINAL_NORMS = ("norm", "ln_f", "final_layer_norm", "final_layernorm")
VISION_TOWERS = ("vision_tower", "visual", "vision_model")
PROJECTORS = ("multi_modal_projector", "connector", "visual.merger")
MORE_PROJECTORS = ("visual.deepstack_merger_list",)


@dataclass(frozen=True)
class ModelPaths:
    """Where the parts of a model lie: module paths, empty when the model has no such part.

    Attributes:
        beside_projector: what else turns features into embeddings: projectors of features that
            go to deeper layers, and parameters that lie on the base model itself (the line end
            of LLaVA-NeXT). Like the projector, the first stage alone has them.
    """

    text_model: str
    embedding: str
    layers: str
    final_norm: str
    head: str
    vision_tower: str
    projector: str
    beside_projector: tuple[str, ...] = ()


def find_paths(whole: PreTrainedModel) -> ModelPaths:
    """Finds the paths of embedding, layers, final norm, head, vision tower and projector.

    Raises:
        UserError: the model has no single list of layers beside its embeddings; subclass.
    """
    names = {id(module): name for name, module in whole.named_modules()}
    embedding = names[id(whole.get_input_embeddings())]
    text_model = embedding.rpartition(".")[0]
    parent = whole.get_submodule(text_model)
    num_layers = whole.config.get_text_config(decoder=True).num_hidden_layers
    lists = [
        name
        for name, child in parent.named_children()
        if isinstance(child, nn.ModuleList) and len(child) == num_layers
    ]
    if len(lists) != 1:
        raise UserError(
            f"{type(whole).__name__} has {len(lists)} lists of {num_layers} layers beside its "
            "embeddings, the generic stage model expects one: write a subclass of StageModel, "
            "docs/add_a_model.md shows how."
        )
    head = whole.get_output_embeddings()
    base = whole.base_model_prefix
    vision_tower = _first_child(whole, base, VISION_TOWERS)
    return ModelPaths(
        text_model=text_model,
        embedding=embedding,
        layers=f"{text_model}.{lists[0]}",
        final_norm=_first_child(whole, text_model, FINAL_NORMS),
        head=names[id(head)] if head is not None else "",
        vision_tower=vision_tower,
        projector=_first_child(whole, base, PROJECTORS),
        beside_projector=_beside_projector(whole, base) if vision_tower else (),
    )


def _first_child(whole: PreTrainedModel, parent: str, names: tuple[str, ...]) -> str:
    paths = {path for path, _ in whole.named_modules()}
    return next((f"{parent}.{name}" for name in names if f"{parent}.{name}" in paths), "")


def _beside_projector(whole: PreTrainedModel, base: str) -> tuple[str, ...]:
    more = [_first_child(whole, base, (name,)) for name in MORE_PROJECTORS]
    lone = [f"{base}.{name}" for name, _ in whole.base_model.named_parameters(recurse=False)]
    return tuple(path for path in (*more, *lone) if path)
