"""The private names of torch in use: a version of torch that changes them fails this test.

They are the runtime that carries out a list of actions, with these, and the split of a backward
pass into its two halves. Neither has a public name in torch 2.11 to 2.15.
"""

import ast
import inspect
from pathlib import Path

from torch.distributed.pipelining import _backward
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    _Action,
    _ComputationType,
    _PipelineScheduleRuntime,
)

from stageline.pipeline.plan import Kind

ROOT = Path(__file__).resolve().parents[2]
ALLOWED = {
    "torch.distributed.pipelining._backward",
    "torch.distributed.pipelining.schedules._Action",
    "torch.distributed.pipelining.schedules._ComputationType",
    "torch.distributed.pipelining.schedules._PipelineScheduleRuntime",
    # to count what is alive; public in all but the name
    "torch.utils._python_dispatch",
    "torch._subclasses",  # fake devices in tests
    "torch.utils._pytree",
    # specs of micro-batches, which users of its schedules have already
    "torch.distributed.pipelining.microbatch._CustomReducer",
    "torch.nn.modules.module._forward_unimplemented",  # whether a module has a forward
}


def test_names_and_parameters():
    parameters = inspect.signature(_backward.stage_backward_input).parameters
    assert list(parameters) == ["stage_outputs_or_loss", "output_grads", "input_values", "weights"]
    parameters = inspect.signature(_backward.stage_backward_weight).parameters
    assert list(parameters)[:2] == ["weights", "param_groups"]


def test_the_runtime_has_what_a_plan_uses():
    """Check the place of the order, what is waited for, and a function for each kind."""
    parameters = inspect.signature(_PipelineScheduleRuntime._step_microbatches).parameters
    assert list(parameters)[:6] == [
        *("self", "arg_mbs", "kwarg_mbs", "target_mbs", "losses", "return_outputs")
    ]
    source = inspect.getsource(_PipelineScheduleRuntime)
    for name in ("pipeline_order_with_comms", "fwd_recv_ops", "bwd_recv_ops"):
        assert f"self.{name}" in source, name
    assert "_initialize_stages" in vars(PipelineScheduleMulti)
    assert {"F", "B", "I", "W"} == {_ComputationType(kind.value).value for kind in Kind}
    assert str(_Action(2, _ComputationType("RECV_F"), 0)) == "2RECV_F0"


def test_no_other_private_module_is_used():
    found = set()
    for path in [
        *ROOT.glob("*.py"),
        *(ROOT / "stageline").rglob("*.py"),
        *ROOT.glob("pp_models/*"),
    ]:
        if path.suffix != ".py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names] + [node.module]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                parts = name.split(".")
                if parts[0] == "torch" and any(part.startswith("_") for part in parts):
                    private = next(i for i, part in enumerate(parts) if part.startswith("_"))
                    found.add(".".join(parts[: private + 1]))
    assert found == ALLOWED
