"""Begin a run with saved adapters: earlier ones are merged, training continues the last one.

A merged base is no longer the folder that it was read from, so that a run saves it next to its
adapters.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch

from stageline.checkpoint.adapter import (
    CONFIG,
    Adapter,
    adaptable_names,
    fill_earlier_lora,
    fit_vocabulary,
    put_extras,
    put_rows,
    read_adapter,
    read_stack,
    refuse_two_ways,
    refuse_unknown,
    untie_if_changed,
)
from stageline.checkpoint.init import init_lora
from stageline.errors import UserError, spelled
from stageline.modules.lora import RowChoice, RowLoRA, innermost, lora_stacks
from stageline.modules.lora_layer import Linear, Pair, dense_weight, put_weight
from stageline.modules.part_lora import LORA_PARTS, PartLoRA, module_at
from stageline.stage import Stage


@dataclass
class AdapterStart:
    """Adapters that a stage starts with, in addition to the weights of its base.

    Attributes:
        modules_to_save: names of modules that are trained whole.
        paths: adapter folders, innermost first.
        creates: all are merged and a new adapter is made; else the last one is trained further.
        taken_from: a checkpoint of this run, whose PiSSA start is that of this one.
        notes: lines to print, once the model is there.
    """

    modules_to_save: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    creates: bool = False
    taken_from: str | None = None
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, options: dict[str, Any]) -> "AdapterStart":
        """Take the arguments of an AdapterStart out of those of a stage model."""
        return cls(
            tuple(options.pop("modules_to_save", None) or ()),
            tuple(map(str, options.pop("adapter_path", None) or ())),
            bool(options.pop("create_new_adapter", False)),
            options.pop("lora_taken_from", None),
        )

    @property
    def merged(self) -> tuple[str, ...]:
        """Folders of the adapters that become part of the base."""
        return self.paths if self.creates else self.paths[:-1]

    @property
    def resumed(self) -> str | None:
        """The folder of the adapter that is trained further."""
        return None if self.creates or not self.paths else self.paths[-1]

    def lora_of(
        self,
        lora: Mapping[str, PartLoRA],
        part_of: Callable[[str], str | None],
        names_in_order: Sequence[str] = (),
    ) -> dict[str, PartLoRA]:
        """The LoRA of each part: as it was asked for, or as the resumed file has it.

        Raises:
            UserError: the file has adapters on layers of no part that can have some.
        """
        if self.resumed is None:
            return dict(lora)
        adapter = read_adapter(self.resumed, names_in_order)
        names: dict[str | None, list[str]] = {}
        for name in adapter.pairs:
            names.setdefault(part_of(name), []).append(name)
        others = {name for part in names.keys() - LORA_PARTS for name in names[part]}
        if others:
            raise UserError(
                f"{self.resumed} has LoRA on {', '.join(sorted(others)[:5])}, which is in none of "
                f"{', '.join(LORA_PARTS.values())}. Merge it instead (`create_new_adapter`)."
            )
        found = {}
        for part, one in lora.items():
            own = replace(one, num=0)
            if here := names.get(part):
                rank = adapter.rank(here[0])
                use_rslora = bool(adapter.config.get("use_rslora"))
                own = PartLoRA(
                    num=1,
                    rank=rank,
                    alpha=adapter.scale(here[0]) * (rank**0.5 if use_rslora else rank),
                    dropout=one.dropout,
                    target=frozenset(here),
                    use_rslora=use_rslora,
                    use_dora=bool(adapter.magnitudes),
                )
            found[part] = own
            what, told = LORA_PARTS[part], f"{self.resumed} decides: "
            if own.num:
                kind = "rank-stabilised LoRA" if own.use_rslora else "LoRA"
                kind = "DoRA" if own.use_dora else kind
                told += (
                    f"{kind} on {len(own.target or ())} layers of the {what}, rank {own.rank}, "
                    f"alpha {own.alpha:g}; `lora_rank`, `lora_alpha`, `lora_target` are those of "
                    "new ones"
                )
                self.notes.append(spelled(told))
            elif one.num:
                self.notes.append(f"{told}no LoRA on the {what}")
        self.modules_to_save += tuple(
            name.rpartition(".")[0] for name in adapter.extras if "." in name
        )
        return found

    def begin(self, model: Stage, stacked: Path | None, *, seed: int) -> None:
        """Merges, starts and fills the adapters of a stage whose base is filled.

        `stacked` is the adapter folder that came as the checkpoint; None: a whole model came.
        """
        if stacked is not None:
            refuse_two_ways(stacked, self.paths)
        for path in self.merged:
            merge_adapter(model, read_adapter(path, model.parameter_order))
            self.notes.append(f"merged {path} into the base, which the run saves beside its own")
        init_lora(model, seed=seed, only_outermost=stacked is None, taken=self.taken())
        if stacked is not None:
            fill_earlier_lora(model, stacked, read_stack(stacked, model.parameter_order))
        if self.resumed is not None:
            adapter = read_adapter(self.resumed, model.parameter_order)
            fill_earlier_lora(model, Path(self.resumed), [adapter])

    def taken(self) -> dict[str, Pair]:
        """Module -> what PiSSA took out of its weight, as a checkpoint of this run tells it."""
        if self.taken_from is None:
            return {}
        adapter = read_adapter(self.taken_from)
        return {
            name: (a[len(a) // 2 :].contiguous(), -b[:, len(a) // 2 :])
            for name, (a, b) in adapter.pairs.items()
        }


@torch.no_grad()
def merge_adapter(model: Stage, adapter: Adapter) -> None:
    """Add an adapter to the weights of a stage that are here, in place."""
    refuse_unknown(adapter, set(adapter.pairs) - adaptable_names(model), type(model).__name__)
    fit_vocabulary(model, [adapter])
    for name in adapter.pairs:
        path, leaf = adapter.place(name)
        module = module_at(model, path)
        if module is None or getattr(innermost(module), leaf or "weight", None) is None:
            continue  # another stage has it
        for ((layer, base),) in lora_stacks(adapter.wrap(name, innermost(module))).values():
            put_weight(base, layer.merged(dense_weight(base)), why="merging an adapter")
    here = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    wrapped = {name.replace(".lora_module.", ".") for name in here}
    put_extras(model, {n: v for n, v in adapter.extras.items() if n in here | wrapped})
    put_rows(model, adapter)
    untie_if_changed(model, adapter.extras)


def attach_beside(model: Stage, folders: Sequence[str]) -> None:
    """Put adapters next to the weights of a filled stage; each row of a pass has one or none.

    `model.row_choice` says which; the first folder has the number 1.

    Raises:
        UserError: one changes more than linear layers that every row goes through.
    """
    choice = RowChoice()
    names = adaptable_names(model)
    for number, folder in enumerate(folders, start=1):
        adapter = read_adapter(folder, model.parameter_order)
        refuse_unknown(adapter, set(adapter.pairs) - names, type(model).__name__)
        shared = {
            "weights that were trained whole": adapter.extras,
            "rows of new tokens": adapter.rows,
            "LoRA on experts": [
                n for n in adapter.pairs if n in adapter.num_experts or "experts" in n.split(".")
            ],
            "a configuration of its own": (adapter.folder / CONFIG).exists(),
        }
        if told := [what for what, is_there in shared.items() if is_there]:
            raise UserError(
                f"{adapter.folder} has {told[0]}, but models of several adapters share everything "
                "but LoRA on linear layers. Serve it by itself (`adapter_path` without a name)."
            )
        for name in adapter.pairs:
            module = module_at(model, name)  # None: another stage has it
            if getattr(module, "weight", None) is None or "weight" in vars(module):
                continue
            if not isinstance(module, RowLoRA):
                module = RowLoRA(cast(Linear, module), choice)
                model.set_submodule(name, module)
            module.adapters[str(number)] = adapter.wrap(name, module.lora_module).lora
    model.__dict__["row_choice"] = choice
