"""`--import`: components outside of the repository."""

import importlib.metadata
import pickle
import sys

import pytest

from register import RegisterError, import_parts, metric_register


@pytest.fixture(autouse=True)
def _modules_restored():
    modules, path = set(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


GOOD = """
from register import metric_register

@metric_register("outside")
def outside(predictions, samples):
    "From outside."

class Row:
    pass
"""


def test_a_file_is_imported_by_its_stem(tmp_path):
    file = tmp_path / "stem_of_mine.py"
    file.write_text(GOOD)
    (module,) = import_parts([str(file)])
    assert sys.modules["stem_of_mine"] is module
    assert metric_register.entry("outside").home == f"{file}:4"
    # a worker process looks the class up under its module's name
    assert isinstance(pickle.loads(pickle.dumps(module.Row())), module.Row)


def test_an_entry_point_is_loaded_only_when_named(tmp_path, monkeypatch):
    (tmp_path / "entry_of_mine.py").write_text(GOOD)
    info = tmp_path / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[stageline.parts]\nmy-plug-in = entry_of_mine\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.metadata.entry_points(group="stageline.parts", name="my-plug-in")
    import_parts([])
    assert "outside" not in metric_register
    import_parts(["my-plug-in"])
    assert "outside" in metric_register


@pytest.mark.parametrize("stem", ["json", "torch", "register", "wave"])
def test_a_taken_stem_is_an_error(tmp_path, stem):
    file = tmp_path / f"{stem}.py"
    file.write_text(GOOD)
    with pytest.raises(RegisterError, match=f"'{stem}' is already the module") as error:
        import_parts([str(file)])
    assert "Rename the file" in str(error.value)
    assert "outside" not in metric_register


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(RegisterError, match=r"nowhere\.py: there is no such file"):
        import_parts([str(tmp_path / "nowhere.py")])


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("\n\n1 / 0\n", "ZeroDivisionError"),
        ("\n\nimport no_such_package_at_all\n", "ModuleNotFoundError"),
        ("from register import loss_fn_register as r\nr['dup'] = len\nr['dup'] = abs\n", "twice"),
    ],
)
def test_a_failing_import_names_cause_file_and_line(tmp_path, text, cause):
    file = tmp_path / "fails_to_import.py"
    file.write_text(text)
    with pytest.raises(RegisterError, match=cause) as error:
        import_parts([str(file)])
    assert f"{file}:3" in str(error.value)
    assert error.value.exit_code == 2
    assert "fails_to_import" not in sys.modules
