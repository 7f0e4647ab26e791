"""Every vision-language family, two stages on a card, against plain transformers on that card.

On the CPU the angles of rotary embeddings, which transformers computes in float32, have other bits.
"""

import pytest

from loss_fn import sft
from tests.distributed import test_mllama as mllama
from tests.distributed import test_vision_parity as parity
from tests.distributed.test_mllama import folder  # noqa: F401 (a fixture)
from tests.distributed.test_vision_parity import true_float64  # noqa: F401 (for each test in here)
from tests.helpers.chain import run_chain
from tests.helpers.tiny_models import VISION_LANGUAGE

FAMILIES = [  # an emulated card adds nothing for a family but its kind of tower
    pytest.param(
        name, marks=() if name in ("qwen2_5_vl", "gemma3_vl", "smolvlm") else pytest.mark.real
    )
    for name in VISION_LANGUAGE
]


@pytest.mark.parametrize("family", FAMILIES)
def test_two_stages_of_a_vision_family_equal_the_unsplit_model(family):
    """Rows have no, one and several pictures."""
    expected = parity.reference_of(family, "full", "cuda")
    stages = [stage.cuda() for stage in parity.stages_of(family, "full", 2)]
    batches = parity.micro_batches_of(family)
    moved = [{name: value.cuda() for name, value in batch.items()} for batch in batches]
    num_targets, logits = parity.divisor_of(family).cuda(), []

    def loss_fn(output, batch):
        logits.append(output.detach().cpu())
        return sft(output, batch, num_targets=num_targets)

    losses = [loss.cpu() for loss in run_chain(stages, moved, loss_fn=loss_fn)]
    grads = {name: grad.cpu() for name, grad in parity.grads_of(stages).items()}
    parity.compare({"losses": losses, "logits": logits, "grads": grads}, expected)


def test_two_stages_of_mllama_equal_the_unsplit_model(request):
    model = request.getfixturevalue("folder")
    batches = mllama.micro_batches()
    moved = [{name: value.cuda() for name, value in batch.items()} for batch in batches]
    expected, grads = mllama.library_run(mllama.load_whole(model).train().cuda(), moved)
    stages = [stage.cuda() for stage in mllama.build_stages(model, 2)]
    losses = mllama.chained_run(stages, moved)
    assert losses == pytest.approx(expected, abs=mllama.TOLERANCE)
    mllama.assert_equal_grads(stages, grads)
