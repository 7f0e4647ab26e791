"""Prompt components: templates with [PLACEHOLDERS], which prompt_fn.py fills.

[IMAGE] stands for all images of a sample, [NAME] for its field `name`. [ANSWER] is in the
loss, or without it the [CAPTION] or [TEXT] that ends the template. [[NAME]] is literal.
"""

from register import prompt_register

prompt_register["vqa"] = "[IMAGE]\n[QUESTION]\n[ANSWER]"
prompt_register["digits"] = "[IMAGE]\n[QUESTION]\nAnswer: [ANSWER]"
prompt_register["caption"] = "[IMAGE]\n[CAPTION]"
prompt_register["choices"] = "[IMAGE]\n[QUESTION]\n[CHOICES]\nAnswer: [ANSWER]"
prompt_register["question"] = "Question: [QUESTION]\nAnswer: [ANSWER]"
prompt_register["instruction"] = "### Instruction:\n[QUESTION]\n\n### Response:\n[ANSWER]"
prompt_register["text"] = "[TEXT]"
# for --prompt-fn chat: what comes before [ANSWER] is the user's turn
prompt_register["chat"] = "[IMAGE][QUESTION][ANSWER]"
prompt_register["chat_choices"] = "[IMAGE][QUESTION]\n[CHOICES][ANSWER]"
