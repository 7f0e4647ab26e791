"""Rewards on GPUs: a part computes on its rank's card, and a reward model scores as on the host."""

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from stageline.training.reward_model import reward_model
from stageline.training.rewards import Reward, Rewards
from tests.helpers.tiny_models import tiny_config, tiny_tokenizer


@pytest.mark.cards(2, needs=2)
def test_a_reward_computes_on_the_card_of_its_rank():
    def card(prompts, completions, samples):
        return [float(torch.zeros(1, device="cuda").device.index)]

    for index in (1, 0):
        torch.cuda.set_device(index)
        assert Rewards([Reward("card", card)])([""], ["x"], [{}]).item() == index


def test_a_reward_model_scores_as_on_the_host(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    config = tiny_config("llama", vocab_size=len(tokenizer), num_labels=1, pad_token_id=0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    samples, answers = [{"question": "Which digit is this?"}] * 3, ["7", "no and not", ""]
    scores = {}
    for device in ("cpu", "cuda"):
        model = reward_model(str(tmp_path), device=device)
        assert model.model.device.type == device
        scores[device] = torch.tensor(model(samples, answers, prompt="[QUESTION][ANSWER]"))
    torch.testing.assert_close(scores["cuda"], scores["cpu"], rtol=1e-4, atol=1e-5)
