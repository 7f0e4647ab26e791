"""Prompt_fn components, which fill a template, and image_token components.

Both return a `Rendered`: text with marks on what came from the data and what is in the loss.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from register import image_token_register, prompt_fn_register
from stageline.data.text.chat import prepare_chat, render_chat
from stageline.data.text.chat_template import use_template
from stageline.data.text.messages import (
    Conversation,
    not_learnt,
    only_last_answer,
    tools_of,
    turns_of,
    with_examples,
)
from stageline.data.text.rendered import Piece, Rendered, place_image_text, plain_image_text
from stageline.data.text.template import fill_parts, parse_template
from stageline.errors import UserError


@prompt_fn_register("fill")
def fill(
    sample: Mapping[str, Any],
    prompt: str,
    *,
    processor: Any = None,
    for_generation: bool = False,
    examples: Sequence[Mapping[str, Any]] = (),
) -> Rendered:
    """The template with the sample's fields in its placeholders; the answer ends with EOS.

    Examples are filled in before it, with an empty line after each.
    """
    parts = parse_template(prompt)
    pieces = []
    for example in examples:
        pieces += not_learnt(fill_parts(parts, {**example, "num_images": 0}))
        pieces.append(Piece("\n\n"))
    pieces += fill_parts(parts, sample, for_generation=for_generation)
    return Rendered(tuple(pieces), for_generation=for_generation)


@prompt_fn_register("chat", prepare=prepare_chat)
def chat(
    sample: Mapping[str, Any],
    prompt: str,
    *,
    processor: Any = None,
    for_generation: bool = False,
    system: str | None = None,
    template: str | None = None,
    template_options: dict[str, Any] | None = None,
    mask_history: bool = False,
    train_on_prompt: bool = False,
    mask_system: bool = False,
    examples: Sequence[Mapping[str, Any]] = (),
) -> Rendered:
    """The model's own chat template, for question and answer or rows with `messages`.

    The loss is on the answers: content, reasoning and tool calls, and the token that ends a turn;
    not on messages with `"weight": 0`. A remote model, which has no processor here, gets the
    messages as they are.

    Args:
        system: system message of rows without one.
        template: chat template by name, for a tokenizer without one: alpaca, chatml, deepseek,
            gemma, llama2, llama3, mistral, phi3, phi4, plain, qwen, vicuna, zephyr.
        template_options: variables of the chat template, such as enable_thinking.
        mask_history: compute the loss only on the last answer of a row.
        train_on_prompt: compute the loss on all text: system, user and markup too; not images.
        mask_system: with train_on_prompt, leave the system message out of the loss.
    """
    if mask_history and train_on_prompt:
        raise UserError(
            "--prompt-fn.mask_history excludes --prompt-fn.train_on_prompt: the first trains on "
            "the last answer only, the second on all text. Leave one out."
        )
    if mask_system and not train_on_prompt:
        raise UserError(
            "--prompt-fn.mask_system requires --prompt-fn.train_on_prompt, which trains on the "
            "system message. Leave it out, or give both."
        )
    turns = turns_of(sample, prompt, system=system, for_generation=for_generation)
    turns = with_examples(turns, examples, prompt)
    tools = tools_of(sample)
    if mask_history:
        turns = only_last_answer(turns)
    if processor is None:
        return Conversation.of(turns, for_generation=for_generation, tools=tools)
    use_template(processor, template=template)
    return render_chat(
        turns,
        processor,
        for_generation=for_generation,
        template_options=template_options,
        tools=tools,
        learnt=("all_but_system" if mask_system else "all") if train_on_prompt else "answers",
        source=sample.get("source", ""),
    )


@image_token_register("auto")
def auto(rendered: Rendered, images: Sequence[Any] | None, *, processor: Any) -> Rendered:
    """The processor's own image placeholder, with the markup of the model around it.

    A remote model gets images next to the text, without a placeholder.
    """
    has_text = bool(images) and processor is not None
    return place_image_text(rendered, plain_image_text(processor) if has_text else "")


@image_token_register("none")
def none(rendered: Rendered, images: Sequence[Any] | None, *, processor: Any) -> Rendered:
    """No placeholder: the model takes images next to the text."""
    return place_image_text(rendered, "")


@image_token_register("image")
def image(rendered: Rendered, images: Sequence[Any] | None, *, processor: Any) -> Rendered:
    """<image>, as LLaVA, Idefics3 and SmolVLM write it."""
    return place_image_text(rendered, "<image>")


@image_token_register("internvl")
def internvl(rendered: Rendered, images: Sequence[Any] | None, *, processor: Any) -> Rendered:
    """<IMG_CONTEXT>, as InternVL writes it."""
    return place_image_text(rendered, "<IMG_CONTEXT>")


@image_token_register("qwen_vl")
def qwen_vl(rendered: Rendered, images: Sequence[Any] | None, *, processor: Any) -> Rendered:
    """<|vision_start|><|image_pad|><|vision_end|>, as Qwen2-VL and later write it."""
    return place_image_text(rendered, "<|vision_start|><|image_pad|><|vision_end|>")


@image_token_register("gemma3")
def gemma3(rendered: Rendered, images: Sequence[Any] | None, *, processor: Any) -> Rendered:
    """<start_of_image>, as Gemma 3 writes it."""
    return place_image_text(rendered, "<start_of_image>")
