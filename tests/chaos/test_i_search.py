"""I3 and I1 over the source: nothing that is shipped runs what others wrote."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def shipped():
    """Python files that users run."""
    folders = ("stageline", "models", "pp_models", "options", "scripts", "benchmarks")
    return [*ROOT.glob("*.py"), *(path for name in folders for path in (ROOT / name).rglob("*.py"))]


BANNED = {"eval", "exec", "os.system", "os.popen", "pickle.load", "pickle.loads", "yaml.load"}
BANNED |= {"yaml.unsafe_load", "torch.load", "marshal.loads", "dill.load", "joblib.load"}
BANNED_VALUES = {("trust_remote_code", True), ("shell", True), ("weights_only", False)}


def dangers(text):
    """Calls and values in Python code that run what others wrote."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            weights_only = ("weights_only", True) in _values(node)
            name = ast.unparse(node.func)
            if name in BANNED and not (name == "torch.load" and weights_only):
                yield f"line {node.lineno}: {name}"
            if name.endswith(".from_pretrained"):
                yield from _unsafe_load(node)
        for pair in _values(node):
            if pair in BANNED_VALUES:
                yield f"{pair[0]}={pair[1]} in {ast.unparse(node)[:60]}"


def _values(node):
    """Return (name, value) of keywords, of keys, and of defaults, where the value is a constant."""
    pairs = []
    if isinstance(node, ast.Call):
        pairs = [(keyword.arg, keyword.value) for keyword in node.keywords]
    elif isinstance(node, ast.Dict):
        names = [getattr(key, "value", None) for key in node.keys]
        pairs = list(zip(names, node.values, strict=True))
    elif isinstance(node, ast.arguments):
        names = [argument.arg for argument in [*node.posonlyargs, *node.args]]
        pairs = list(zip(reversed(names), reversed(node.defaults), strict=False))
        names = [argument.arg for argument in node.kwonlyargs]
        pairs += zip(names, node.kw_defaults, strict=True)
    return [(name, value.value) for name, value in pairs if isinstance(value, ast.Constant)]


def _unsafe_load(node):
    names = {keyword.arg for keyword in node.keywords}
    # None stands for **options, which the caller has filled
    if not {"local_files_only", None} & names:
        yield f"line {node.lineno}: from_pretrained may look on the network"


# this is its purpose; benchmarks read what they are given
MAY_FETCH = {"scripts/prepare_smollm2.py"}


def test_i03_nothing_runs_what_others_wrote():
    for path in shipped():
        found, name = list(dangers(path.read_text())), str(path.relative_to(ROOT))
        if name in MAY_FETCH or name.startswith("benchmarks/"):
            found = [line for line in found if "network" not in line]
        assert found == [], name


def test_i03_the_search_finds():
    for text in (
        "eval('1')",
        "A.from_pretrained(path, local_files_only=True, trust_remote_code=True)",
        "A.from_pretrained(path)",
        "options = {'trust_remote_code': True}",
        "def load(path, *, trust_remote_code=True): pass",
        "torch.load(path)",
    ):
        assert list(dangers(text)), text
    assert not list(dangers("model.eval(); torch.load(path, weights_only=True)"))
