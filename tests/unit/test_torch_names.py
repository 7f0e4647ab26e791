"""The private modules of torch that are used here: no other may come unseen."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ALLOWED = {
    # the two halves of a backward pass: no public name in torch 2.11 to 2.15
    "torch.distributed.pipelining._backward",
    # the runtime that carries out a list of actions
    "torch.distributed.pipelining.schedules._Action",
    "torch.distributed.pipelining.schedules._ComputationType",
    "torch.distributed.pipelining.schedules._PipelineScheduleRuntime",
    # to count what is alive; public in all but the name
    "torch.utils._python_dispatch",
    "torch._subclasses",  # fake devices in tests
    "torch.utils._pytree",
    # specs of micro-batches, which users of its schedules have already
    "torch.distributed.pipelining.microbatch._CustomReducer",
    "torch.distributed.pipelining.microbatch._Replicate",
    "torch.nn.modules.module._forward_unimplemented",  # whether a module has a forward
}


def private_part(name):
    """The name up to its first private part; None where it is not torch's, or public."""
    parts = name.split(".")
    privates = [place for place, part in enumerate(parts) if part.startswith("_")]
    return ".".join(parts[: privates[0] + 1]) if parts[0] == "torch" and privates else None


def test_no_other_private_module_is_used():
    found = set()
    for path in [*ROOT.glob("*.py"), *(ROOT / "stageline").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names] + [node.module]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            found |= {private_part(name) for name in names}
    assert found - {None} == ALLOWED
