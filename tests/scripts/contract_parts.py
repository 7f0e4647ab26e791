"""Parts that break what their register expects, one way each. For test_contracts.py."""

import os

import torch
from torch import nn
from torch.nn import functional

from dataset import sft as collate_sft
from pp_models import CausalLMStage, StageModel
from prompt_fn import fill
from register import (
    collate_fn_register,
    dataset_register,
    image_token_register,
    loss_fn_register,
    lr_scheduler_register,
    optimizer_register,
    prompt_fn_register,
    sim_fn_register,
    tracker_register,
    train_model_register,
)
from stageline.modules.pass_through import PassThrough

# -- datasets ------------------------------------------------------------------------------------


class Rows:
    """Good rows; each one below breaks one thing.

    Args:
        number: of rows.
    """

    def __init__(self, *, dataset_path=None, split="train", number: int = 24):
        self.number = number

    def __len__(self):
        return self.number

    def __getitem__(self, row):
        if not 0 <= row < self.number:
            raise IndexError(row)
        return None, self.sample(row)

    def sample(self, row):
        return {"id": str(row), "question": f"{row}?", "answer": "!" * (1 + row % 5)}


dataset_register["rows"] = Rows


@dataset_register("row_is_a_dict")
class RowIsADict(Rows):
    """A row without images."""

    def __getitem__(self, row):
        return self.sample(row)


@dataset_register("row_is_a_dict_of_two")
class RowIsADictOfTwo(Rows):
    """A row of two fields, which would come apart as a pair of names."""

    def __getitem__(self, row):
        return {"question": "1?", "answer": "!"}


@dataset_register("row_is_swapped")
class RowIsSwapped(Rows):
    """The sample first."""

    def __getitem__(self, row):
        return self.sample(row), None


@dataset_register("row_has_text_for_images")
class RowHasTextForImages(Rows):
    """A path where an image belongs."""

    def __getitem__(self, row):
        return "0.png", self.sample(row)


@dataset_register("row_has_paths_for_images")
class RowHasPathsForImages(Rows):
    """A list of paths where images belong."""

    def __getitem__(self, row):
        return ["0.png"], self.sample(row)


@dataset_register("row_is_three")
class RowIsThree(Rows):
    """Something more."""

    def __getitem__(self, row):
        return None, self.sample(row), row


@dataset_register("row_is_none")
class RowIsNone(Rows):
    """A forgotten return."""

    def __getitem__(self, row):
        self.sample(row)


@dataset_register("sample_is_a_text")
class SampleIsAText(Rows):
    """A text where a dict belongs."""

    def __getitem__(self, row):
        return None, "0? !"


@dataset_register("row_has_one_image")
class RowHasOneImage(Rows):
    """One image where a list belongs."""

    def __getitem__(self, row):
        from PIL import Image

        return Image.new("RGB", (24, 24)), self.sample(row)


@dataset_register("row_has_tensor_images")
class RowHasTensorImages(Rows):
    """A tensor where an image belongs."""

    def __getitem__(self, row):
        return [torch.zeros(3, 24, 24)], self.sample(row)


@dataset_register("row_has_a_tensor")
class RowHasATensor(Rows):
    """A tensor where a list belongs."""

    def __getitem__(self, row):
        return torch.zeros(3, 24, 24), self.sample(row)


@dataset_register("row_raises")
class RowRaises(Rows):
    """A mistake of its own."""

    def __getitem__(self, row):
        return None, {"id": str(row), "question": self.no_such_table[row]}


@dataset_register("takes_no_split")
class TakesNoSplit(Rows):
    """A class without `split`."""

    def __init__(self, *, dataset_path=None):
        self.number = 24


@dataset_register("takes_no_path")
class TakesNoPath(Rows):
    """A class without `dataset_path`."""

    def __init__(self, *, split="train"):
        self.number = 24


@dataset_register("needs_a_path")
class NeedsAPath(Rows):
    """A class that opens what --dataset-path names."""

    def __init__(self, *, dataset_path, split="train"):
        self.number = len(open(dataset_path).readlines())


@dataset_register("has_no_len")
class HasNoLen:
    """An iterable."""

    def __init__(self, *, dataset_path=None, split="train"):
        pass

    def __getitem__(self, row):
        return None, {"question": f"{row}?", "answer": "!"}


@dataset_register("has_no_getitem")
class HasNoGetitem:
    """A length and nothing else."""

    def __init__(self, *, dataset_path=None, split="train"):
        pass

    def __len__(self):
        return 24


@dataset_register("makes_none")
def makes_none(*, dataset_path=None, split="train"):
    """A function that forgot its return."""
    Rows(split=split)


@dataset_register("is_empty")
class IsEmpty(Rows):
    """No rows."""

    def __init__(self, *, dataset_path=None, split="train"):
        self.number = 0


@dataset_register("long_test_rows")
class LongTestRows(Rows):
    """Held-out rows that are all too long."""

    def __init__(self, *, dataset_path=None, split="train"):
        self.number, self.is_test = 24, split == "test"

    def sample(self, row):
        return {**super().sample(row), "answer": "!" * (90 if self.is_test else 1 + row % 5)}


@dataset_register("some_long_rows")
class SomeLongRows(Rows):
    """Four of five rows are too long."""

    def sample(self, row):
        return {**super().sample(row), "answer": "!" * (3 if row % 5 == 0 else 90)}


# -- texts ---------------------------------------------------------------------------------------


@prompt_fn_register("gives_a_str")
def gives_a_str(sample, prompt, *, processor=None, for_generation=False):
    """The text alone."""
    return f"{sample['question']} {sample['answer']}"


@prompt_fn_register("gives_none")
def gives_none(sample, prompt, *, processor=None, for_generation=False):
    """A forgotten return."""


@prompt_fn_register("gives_pieces")
def gives_pieces(sample, prompt, *, processor=None, for_generation=False):
    """A list of pieces."""
    return list(fill(sample, prompt))


@prompt_fn_register("takes_one")
def takes_one(sample):
    """Another signature."""
    return fill(sample, "[QUESTION] [ANSWER]")


@prompt_fn_register("raises_key_error")
def raises_key_error(sample, prompt, *, processor=None, for_generation=False):
    """A field that no row has."""
    return fill({**sample, "question": sample["title"]}, prompt)


@image_token_register("image_token_str")
def image_token_str(rendered, images, *, processor):
    """A text."""
    return rendered.text


@image_token_register("image_token_one")
def image_token_one(rendered):
    """Another signature."""
    return rendered


# -- collate functions ---------------------------------------------------------------------------


@collate_fn_register("collate_list")
def collate_list(samples, *, num_stages, **common):
    """A list of rows."""
    return list(collate_sft(samples, num_stages=num_stages, **common).values())


@collate_fn_register("collate_none")
def collate_none(samples, *, num_stages, **common):
    """A forgotten return."""


@collate_fn_register("collate_lists")
def collate_lists(samples, *, num_stages, **common):
    """Lists where tensors belong."""
    batch = collate_sft(samples, num_stages=num_stages, **common)
    return {name: value.tolist() for name, value in batch.items()}


@collate_fn_register("collate_no_labels")
def collate_no_labels(samples, *, num_stages, **common):
    """Without labels."""
    batch = collate_sft(samples, num_stages=num_stages, **common)
    del batch["labels"]
    return batch


@collate_fn_register("collate_no_mask")
def collate_no_mask(samples, *, num_stages, **common):
    """Without attention_mask."""
    batch = collate_sft(samples, num_stages=num_stages, **common)
    del batch["attention_mask"]
    return batch


@collate_fn_register("collate_float_ids")
def collate_float_ids(samples, *, num_stages, **common):
    """Token ids as floats."""
    batch = collate_sft(samples, num_stages=num_stages, **common)
    return {**batch, "input_ids": batch["input_ids"].float()}


@collate_fn_register("collate_flat")
def collate_flat(samples, *, num_stages, **common):
    """One dimension."""
    batch = collate_sft(samples, num_stages=num_stages, **common)
    return {name: value.flatten() for name, value in batch.items()}


@collate_fn_register("collate_short_labels")
def collate_short_labels(samples, *, num_stages, **common):
    """Labels shifted already, and so a token shorter."""
    batch = collate_sft(samples, num_stages=num_stages, **common)
    return {**batch, "labels": batch["labels"][:, 1:]}


@collate_fn_register("collate_fewer_rows")
def collate_fewer_rows(samples, *, num_stages, **common):
    """A row is lost."""
    batch = collate_sft(samples, num_stages=num_stages, **common)
    return {name: value[:-1] for name, value in batch.items()} if len(samples) > 1 else batch


@collate_fn_register("collate_no_targets")
def collate_no_targets(samples, *, num_stages, **common):
    """Nothing is learnt."""
    batch = collate_sft(samples, num_stages=num_stages, **common)
    return {**batch, "labels": torch.full_like(batch["labels"], -100)}


@collate_fn_register("collate_one")
def collate_one(samples):
    """Another signature."""
    return collate_sft(samples)


@collate_fn_register("collate_raises")
def collate_raises(samples, *, num_stages, **common):
    """A mistake of its own."""
    return {"labels": [sample["no_such_field"] for _, sample in samples]}


@collate_fn_register("collate_other_ids")
def collate_other_ids(samples, *, num_stages, stage, **common):
    """Other ids on each stage."""
    batch = collate_sft(samples, num_stages=num_stages, stage=stage, **common)
    return {**batch, "input_ids": batch["input_ids"].roll(stage)}


# -- losses --------------------------------------------------------------------------------------


def cross_entropy(logits, batch, reduction="sum"):
    return functional.cross_entropy(
        logits[:, :-1].float().flatten(0, 1),
        batch["labels"][:, 1:].flatten(),
        ignore_index=-100,
        reduction=reduction,
    )


@loss_fn_register("loss_of_two")
def loss_of_two(logits, labels):
    """The signature of torch's losses."""
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@loss_fn_register("loss_of_outputs")
def loss_of_outputs(outputs, labels, num_items_in_batch=None):
    """The signature of the library's Trainer."""
    return functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())


@loss_fn_register("loss_vector")
def loss_vector(logits_BTV, micro_batch, *, num_targets):
    """A loss for each token."""
    return cross_entropy(logits_BTV, micro_batch, "none") / num_targets


@loss_fn_register("loss_none")
def loss_none(logits_BTV, micro_batch, *, num_targets):
    """A forgotten return."""
    cross_entropy(logits_BTV, micro_batch)


@loss_fn_register("loss_mean")
def loss_mean(logits_BTV, micro_batch, *, num_targets):
    """A mean over the micro-batch."""
    return cross_entropy(logits_BTV, micro_batch, "mean")


@loss_fn_register("loss_half_mean")
def loss_half_mean(logits_BTV, micro_batch, *, num_targets):
    """A sum, and a regulariser that is a mean."""
    z = logits_BTV.float().logsumexp(-1).square().mean()
    return cross_entropy(logits_BTV, micro_batch) / num_targets + 0.01 * z


@loss_fn_register("loss_mean_over_count")
def loss_mean_over_count(logits_BTV, micro_batch, *, num_targets):
    """A mean that is divided again."""
    return cross_entropy(logits_BTV, micro_batch, "mean") / num_targets


@loss_fn_register("loss_float")
def loss_float(logits_BTV, micro_batch, *, num_targets):
    """A number of Python."""
    return float(cross_entropy(logits_BTV, micro_batch) / num_targets)


@loss_fn_register("loss_detached")
def loss_detached(logits_BTV, micro_batch, *, num_targets):
    """No gradient."""
    return (cross_entropy(logits_BTV, micro_batch) / num_targets).detach()


@loss_fn_register("loss_one_element")
def loss_one_element(logits_BTV, micro_batch, *, num_targets):
    """A tensor of one element."""
    return (cross_entropy(logits_BTV, micro_batch) / num_targets)[None]


@loss_fn_register("loss_integer")
def loss_integer(logits_BTV, micro_batch, *, num_targets):
    """Whole numbers."""
    return (cross_entropy(logits_BTV, micro_batch) / num_targets).long()


@loss_fn_register("loss_dict")
def loss_dict(logits_BTV, micro_batch, *, num_targets):
    """A dict."""
    return {"loss": cross_entropy(logits_BTV, micro_batch) / num_targets}


@loss_fn_register("loss_three")
def loss_three(logits_BTV, micro_batch, *, num_targets):
    """Three values."""
    return cross_entropy(logits_BTV, micro_batch) / num_targets, {}, logits_BTV


@loss_fn_register("loss_figure_float")
def loss_figure_float(logits_BTV, micro_batch, *, num_targets):
    """A figure that is a Python number."""
    return cross_entropy(logits_BTV, micro_batch) / num_targets, {"mine": 1.0}


@loss_fn_register("loss_figure_mean")
def loss_figure_mean(logits_BTV, micro_batch, *, num_targets):
    """A figure that is a mean."""
    figures = {"entropy": cross_entropy(logits_BTV, micro_batch, "mean")}
    return cross_entropy(logits_BTV, micro_batch) / num_targets, figures


@loss_fn_register("loss_raises")
def loss_raises(logits_BTV, micro_batch, *, num_targets):
    """A key that no micro-batch has."""
    return micro_batch["weights"].sum() / num_targets


@loss_fn_register("loss_nan")
def loss_nan(logits_BTV, micro_batch, *, num_targets):
    """Not a number."""
    return cross_entropy(logits_BTV, micro_batch) / num_targets * float("nan")


@sim_fn_register("sim_scalar")
def sim_scalar(a_NV, b_NV):
    """One number."""
    return (a_NV * b_NV).sum()


# -- optimizers ----------------------------------------------------------------------------------


@optimizer_register("optimizer_none")
def optimizer_none(param_groups, *, learning_rate, weight_decay):
    """A forgotten return."""


@optimizer_register("optimizer_class")
def optimizer_class(param_groups, *, learning_rate, weight_decay):
    """The class, not an object."""
    return torch.optim.AdamW


@optimizer_register("optimizer_lr")
def optimizer_lr(params, lr):
    """Another signature."""
    return torch.optim.AdamW(params, lr=lr)


@optimizer_register("optimizer_of_one")
def optimizer_of_one(param_groups, *, learning_rate, weight_decay):
    """Updates the first group alone."""
    return torch.optim.AdamW(param_groups[:1], lr=learning_rate)


@lr_scheduler_register("rate_is_a_number")
def rate_is_a_number(*, learning_rate, **others):
    """A number."""
    return learning_rate


@lr_scheduler_register("rate_is_an_object")
def rate_is_an_object(*, learning_rate, min_lr, warmup_steps, warmup_start_lr, total_steps):
    """torch's own scheduler."""
    weight = nn.Parameter(torch.zeros(1))
    return torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD([weight], lr=1.0), lambda step: 1.0)


@lr_scheduler_register("rate_none")
def rate_none(*, learning_rate, **others):
    """A function that forgot its return."""
    return lambda step: None


@tracker_register("tracker_str")
def tracker_str(*, folder, config, start_step):
    """A text."""
    return str(folder)


# -- stage models --------------------------------------------------------------------------------


@train_model_register("stage_dict")
def stage_dict(**kwargs):
    """A stage that returns a dict."""
    return DictStage.build(**kwargs)


class DictStage(CausalLMStage):
    """Every stage but the last."""

    def forward(self, hidden_or_ids, *extras, **batch):
        hidden = super().forward(hidden_or_ids, *extras, **batch)
        return hidden if self.is_last else {"hidden_states": hidden}


class LastDictStage(CausalLMStage):
    """The last stage returns the library's output."""

    def forward(self, hidden_or_ids, *extras, **batch):
        hidden = super().forward(hidden_or_ids, *extras, **batch)
        return {"logits": hidden} if self.is_last else hidden


class NoneStage(CausalLMStage):
    """A forgotten return."""

    def forward(self, hidden_or_ids, *extras, **batch):
        super().forward(hidden_or_ids, *extras, **batch)


class WrongShape(CausalLMStage):
    """Says half of the width."""

    def get_example_input(self, micro_batch_size, max_token_num):
        (one,) = super().get_example_input(micro_batch_size, max_token_num)
        return (one if self.is_first else one[..., : one.shape[-1] // 2],)


class WrongDtype(CausalLMStage):
    """Says float64."""

    def get_example_input(self, micro_batch_size, max_token_num):
        (one,) = super().get_example_input(micro_batch_size, max_token_num)
        return (one if self.is_first else one.double(),)


class WrongCount(CausalLMStage):
    """Says two."""

    def get_example_input(self, micro_batch_size, max_token_num):
        (one,) = super().get_example_input(micro_batch_size, max_token_num)
        return (one,) if self.is_first else (one, one)


class ExampleIsATensor(CausalLMStage):
    """A tensor, no tuple."""

    def get_example_input(self, micro_batch_size, max_token_num):
        (one,) = super().get_example_input(micro_batch_size, max_token_num)
        return one


class ExampleIsNone(CausalLMStage):
    """A forgotten return."""

    def get_example_input(self, micro_batch_size, max_token_num):
        super().get_example_input(micro_batch_size, max_token_num)


class LostBuffer(CausalLMStage):
    """A table and a scale made under meta."""

    def __init__(self, config, **kwargs):
        super().__init__(config, **kwargs)
        with torch.device("meta"):
            self.bias_table = torch.zeros(4)
            self.register_buffer("scale", torch.ones(1), persistent=False)

    def forward(self, hidden_or_ids, *extras, **batch):
        hidden = super().forward(hidden_or_ids, *extras, **batch)
        return hidden * self.scale


for _name, _class in {
    "stage_last_dict": LastDictStage,
    "stage_none": NoneStage,
    "stage_wrong_shape": WrongShape,
    "stage_wrong_dtype": WrongDtype,
    "stage_wrong_count": WrongCount,
    "stage_example_tensor": ExampleIsATensor,
    "stage_example_none": ExampleIsNone,
    "stage_lost_buffer": LostBuffer,
}.items():
    train_model_register[_name] = _class.build


class Plain(nn.Module):
    """A module that is no StageModel, and has no get_example_input."""

    def __init__(self, stage, num_stages):
        super().__init__()
        self.stage, self.num_stages = stage, num_stages
        self.is_first, self.is_last = stage == 0, stage == num_stages - 1
        self.embed = nn.Embedding(300, 16)
        self.head = nn.Linear(16, 300)

    def forward(self, hidden, **batch):
        return self.embed(hidden) if self.is_first else self.head(hidden)


@train_model_register("stage_plain")
def stage_plain(*, stage, num_stages, **kwargs):
    """No StageModel."""
    return Plain(stage, num_stages), None, 0


@train_model_register("stage_alone")
def stage_alone(*, stage, num_stages, **kwargs):
    """The model alone, without processor and padding id."""
    return CausalLMStage.build(stage=stage, num_stages=num_stages, **kwargs)[0]


class OwnStage(StageModel):
    """An architecture of its own, with the width of hidden states under another name."""

    def __init__(self, config, **kwargs):
        super().__init__(config, **kwargs)
        with torch.device("meta"):
            self.embed = nn.Embedding(config.vocab_size, 8) if self.is_first else PassThrough()
            self.blocks = nn.ModuleList(
                nn.Linear(8, 8) if index in self.layers else PassThrough()
                for index in range(config.num_hidden_layers)
            )
            self.head = nn.Linear(8, config.vocab_size) if self.is_last else PassThrough()
            self.positions = torch.zeros(1, 1, 8)
            if os.environ.get("LOST") == "buffer":
                self.register_buffer("offset", torch.arange(8.0))
        self.wrap_lora()

    def parts(self):
        return {"vit": [], "mlp": [], "llm": ["embed", "blocks"], "lm_head": ["head"]}

    def forward(self, hidden, **batch):
        hidden = self.embed(hidden) + self.positions if self.is_first else hidden
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden) if self.is_last else hidden


class OwnStageWithout(OwnStage):
    """Without get_example_input, where the width of the config is not that of its states."""


train_model_register["stage_no_example"] = OwnStageWithout.build
