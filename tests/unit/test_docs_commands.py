"""Every command of the pages: program, sub-command, options, components and files exist.

Nothing is run here. Commands of training, evaluation, inference, chat and serving are parsed, with
empty stand-ins for the files that a reader brings (`MINE`); other programs are read for the options
that they name. tests/scripts/test_docs_jobs.py runs the pages about jobs.
"""

import contextlib
import io
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from commands import option_names
from commands.command_line import COMMANDS, rewritten
from options.corpus import ACTIONS
from options.export import ExportConfig
from options.fields import option_fields, spelled
from parse_args import (
    parse_chat_args,
    parse_check_args,
    parse_evaluate_args,
    parse_infer_args,
    parse_lm_eval_args,
    parse_serve_args,
    parse_train_args,
)
from register import ALL_REGISTERS, import_parts
from tests.helpers.docs_reference import part_options
from tests.helpers.registers import restored_registers

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("*.md"), *ROOT.glob("examples/*.md")])
PAGES = [page for page in PAGES if page.name != "CHANGELOG.md"]
EXAMPLES = sorted(ROOT.glob("examples/*.yaml"))
PARSERS = {
    **dict.fromkeys(("train", "plan", "validate"), parse_train_args),
    **{"eval": parse_evaluate_args, "infer": parse_infer_args, "chat": parse_chat_args},
    **{"serve": parse_serve_args, "lm-eval": parse_lm_eval_args, "check": parse_check_args},
}
# scripts that pass their options on -> the command that gets them
RECIPES = {
    **dict.fromkeys(("train_pp.sh", "train_pp.slurm", "train_pp_multinode.sh"), "train"),
    **dict.fromkeys(("train_smollm2_lora.sh", "train_streaming.sh", "train_elastic.sh"), "train"),
    **dict.fromkeys(("train_grpo_digits.sh", "train_grpo_scenes.sh"), "train"),
    **{"study_spatial.sh": "train", "train_corpus.sh": "train", "evaluate.sh": "eval"},
}
# other programs read their options from these files
READS = {"gpu_check.sh": ("benchmarks/gpu_check.py",), "study_spatial.sh": ()}
PROGRAMS = ("stageline", "bash", "python", "source", "cd", "git", "sbatch", "torchrun", "lm_eval")
# files that a reader has or makes; what runs and set-up write
MINE = re.compile(
    r"(runs|\.cache|my_\w*|results|merged|vsr|images|data/(both|rest|english|chinese))(/.*|\b.*)"
    r"|(rows|questions|texts|pairs|corpus|sums)\.(jsonl|txt)|(run|job|piece|qwen3_lora_sft)\.yaml"
    r"|(chain|key|my_authority)\.pem|(keys\.txt|seen\.npy|InternVL2-8B.*|/opt/.*)"
)
HUB = re.compile(r"(Qwen|org|owner|my-group)/[\w.@-]+")  # stand-ins for what a hub has
# options of other programs, and of the example on a page
FOREIGN = """
--collate-fn.carry_weight --parts.X.frozen --parts.X.lora_rank --nproc-per-node --max-restarts
--signals-to-handle --shutdown-timeout --signal --nodes --gpus-per-node --gpus --shm-size
--tasks --model_args --apply_chat_template --batch_size --model --dest --constraint --no-index
--no-deps --target --all --pieces
""".split()


def commands_of(text):
    """The commands of the bash blocks of a page, without comments and continued lines."""
    for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL):
        block = block.replace("\\\n", " ")
        for line in block.splitlines():
            words = shlex.split(line, comments=True)
            while words:
                end = next((at for at, one in enumerate(words) if one in ("&&", "&")), len(words))
                one, words = words[:end], words[end + 1 :]
                while one and re.fullmatch(r"[A-Z0-9_]+=.*", one[0]):
                    one = one[1:]
                if one:
                    yield one


def there(path):
    return bool(list(ROOT.glob(path))) if not path.startswith("/") else False


def check_file(path):
    assert there(path) or MINE.fullmatch(path), f"{path} is not in the repository"


def own_options(file):
    text = (ROOT / file).read_text(encoding="utf-8")
    return set(re.findall(r"(--[a-z][\w-]*)", text))


@pytest.fixture(scope="module")
def known():
    """Every option of a command or component, as it is typed."""
    with restored_registers():
        import_parts(["examples.spatial.parts"])
        found = set(option_names().values()) | {"--config", "--list", "--help"}
        for register in ALL_REGISTERS.values():
            for key in register:
                found |= {name for name, *_ in part_options(register, key)}
        found |= {spelled(name) for one in ACTIONS.values() for name in option_fields(one)}
        found |= {spelled(name) for name in option_fields(ExportConfig)}
        yield found


def check_options(words, allowed):
    for word in words:
        if word.startswith("--") and word != "--":
            name = word.partition("=")[0]
            assert name in allowed or name.replace("_", "-") in allowed, f"{name} is unknown"


def check_stageline(words, known, folder):
    if not words:
        return
    name, *rest = words
    assert name in COMMANDS or name == "env", f"stageline {name} is no command"
    if name == "env" or "--help" in rest:
        return
    if name == "corpus":
        assert rest[0] in ACTIONS
        check_options(rest[1:], known)
    elif name in PARSERS:
        if "--import" not in rest or "my_parts.py" not in rest:
            check_options(rest, known)
            if not any(word.endswith(".pem") for word in rest):
                parse(name, rest, folder)
    elif name == "runs":
        job = rest[rest.index("--") + 1 :] if "--" in rest else []
        assert set(re.findall(r"--\w+", " ".join(rest))) <= {"--metric", "--sweep"}
        parse("train", job, folder) if job else None
    else:
        check_options(rest, known)


def parse(name, words, folder):
    """Parse a command with an empty file or folder in place of what a reader brings."""
    words = ["my_model" if HUB.fullmatch(word) else word for word in words]
    named = [word.partition("=")[2] or word for word in words]
    for file in (word for word in words if there(word) and word.endswith(".yaml")):
        named += re.findall(r": (\S+)", (ROOT / file).read_text())
    # examples/digits.yaml, which replaces a reader's file, names this folder
    named += [".cache/digits-model"]
    for path in [one for group in named for one in group.split(",")]:
        if MINE.fullmatch(path) and not (folder / path).exists():
            stand_in(folder / path, is_folder=path.startswith((".cache", "runs")))
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        PARSERS[name](rewritten([*words, *COMMANDS[name].words]))


def stand_in(path, *, is_folder):
    """Make an empty file, or a model folder without weights."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".yaml":
        path.write_text((ROOT / "examples/digits.yaml").read_text())
    elif path.suffix and not is_folder:
        path.write_text("{}\n")
    else:
        path.mkdir()
        (path / "config.json").write_text('{"model_type": "llama"}')


def check_bash(file, words, known, folder):
    check_file(file)
    name = Path(file).name
    if name == "setup.sh":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        assert set(words) <= set(project["optional-dependencies"])
    elif name == "test.sh":
        for word in words:
            assert word in ("-k", "--all") or "/" not in word or there(word), word
    elif name in RECIPES:
        allowed = known | own_options(file)
        check_options(words, allowed)
        if name == "train_pp.sh" or name == "evaluate.sh":
            return
    elif name in READS:
        check_options(words, set().union(*map(own_options, (file, *READS[name]))))
    else:
        check_options(words, own_options(file) | known)


def check_command(words, known, folder):
    program, *rest = words
    assert program in PROGRAMS, f"{program} is not a program of the pages"
    if program == "stageline":
        check_stageline(rest, known, folder)
    elif program in ("bash", "sbatch", "torchrun"):
        file = next(word for word in rest if re.search(r"\.(sh|slurm|py)$", word))
        check_bash(file, rest[rest.index(file) + 1 :], known, folder)
    elif program == "python" and rest[0] != "-m":
        check_file(rest[0])
        check_options(rest[1:], own_options(rest[0]) if there(rest[0]) else set())


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name in ("examples", "data", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "data").unlink()
    (tmp_path / "data").mkdir()
    for file in (ROOT / "data").iterdir():
        (tmp_path / "data" / file.name).symlink_to(file)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT))
    with restored_registers():
        yield tmp_path


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_the_commands_of_a_page_exist(page, known, folder):
    for words in commands_of(page.read_text(encoding="utf-8")):
        try:
            check_command(words, known, folder)
        except (Exception, SystemExit) as error:
            pytest.fail(f"{shlex.join(words)}\n{type(error).__name__}: {error}")


def test_options_in_sentences_exist(known):
    """`--option` in code between backticks, in any sentence or table."""
    scripts = [
        *ROOT.glob("scripts/*.sh"),
        *ROOT.glob("examples/spatial/*.*"),
        *ROOT.glob("tools/*.py"),
        *ROOT.glob("benchmarks/*.py"),
    ]
    others = set().union(*map(own_options, scripts), FOREIGN)
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for span in [] if page.name == "options.md" else re.findall(r"`([^`\n]+)`", text):
            for name in re.findall(r"(?<![\w-])--[a-z][\w.-]*\w", span):
                is_there = name in known or name in others or "*" in span
                assert is_there or any(o.startswith(name + ".") for o in known), (page, name)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_commands_that_an_example_needs_first_exist(path, known, folder):
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("# First: "):
            check_command(shlex.split(line.removeprefix("# First: ")), known, folder)


@pytest.mark.parametrize(
    "command",
    [
        "stageline trian examples/digits.yaml",
        "stageline train examples/digits.yaml --loss-fm sft",
        "stageline train examples/digits.yaml --loss-fn stf",
        "stageline train examples/digits.yaml --batch-size many",
        "stageline train examples/nowhere.yaml",
        "stageline serve --model-path my_model --http.ssl_cert chain.pem",
        "stageline corpus wriet --file-path rows.jsonl",
        "bash scripts/train_qq.sh",
        "bash scripts/train_pp.sh --num-stagez 4",
        "bash scripts/setup.sh quantisation",
        "python tools/tiny_model.py qwen3 my_tiny --weights",
        "pip install something",
    ],
)
def test_a_wrong_command_is_found(command, known, folder):
    (words,) = commands_of(f"```bash\n{command}\n```")
    with pytest.raises((Exception, SystemExit)):
        check_command(words, known, folder)
