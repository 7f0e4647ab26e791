"""A mixture of experts through the entry file: the log shows the router loss, as asked."""

from tests.helpers.small_run import Job


def test_the_option_shows_in_the_log(tmp_path):
    job = Job(tmp_path, family="qwen3_moe", num_layers=4)
    steps = ("--total-steps", 3)
    done = job.train("plain", *steps, ranks=1)
    plain = job.records("plain")
    assert "router" not in done.out and not any("router_loss" in record for record in plain)
    asked = "--train-model.output_router_logits true --train-model.router_aux_loss_coef 0.25"
    done = job.train("routed", *steps, *asked.split())
    assert "router_loss 0." in done.out
    routed = job.records("routed")
    # two of four experts per token: about 2, times the weight
    assert all(0.4 < record["router_loss"] < 0.8 for record in routed)
    assert routed[0]["loss"] == plain[0]["loss"]  # it is only the token loss
    assert routed[2]["loss"] != plain[2]["loss"]  # and yet it is trained on
