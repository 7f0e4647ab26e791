"""A rank that is lost while it answers ends all ranks within seconds, and is named first.

Passes that fail, over stages in one process: tests/unit/test_decoding_faults.py.
"""

from pathlib import Path

import pytest

from tests.helpers.decoded_models import decoded_text_model
from tests.helpers.warm_start import WarmLauncher

ENTRY = Path(__file__).with_name("decoding_entry.py")
SECONDS = 60  # a rank that waits for a lost one would wait for days


@pytest.mark.timeout(3 * SECONDS)
def test_a_lost_rank_ends_all_and_is_named_first(tmp_path):
    decoded_text_model("llama", tmp_path, num_tokens=8)
    run = WarmLauncher([str(ENTRY), str(tmp_path)], {"OMP_NUM_THREADS": "1"})
    done = run.finish(SECONDS)
    assert done.code == 9
    line = "error[crash] rank=1 stage=1: killed by signal 9 (SIGKILL"
    assert done.err.startswith(line), done.err
    assert "onnection" not in done.err and done.err.count("Traceback") <= 1
