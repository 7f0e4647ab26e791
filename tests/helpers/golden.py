"""Writes down what users see: help, lists, resolved configs, run folders, errors.

`golden.py FOLDER` writes text files into a folder, `golden.py --compare OLD NEW` shows what differs
between two of them (exit code 1 if anything does). Runs the entry files as a user does and imports
nothing of the project, so that it outlives any reshuffling; golden_inputs/resolve.py alone does.
"""

import argparse
import difflib
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INPUTS = Path(__file__).with_name("golden_inputs")
NUM_PROCESSES = 2
TIMEOUT = 600  # seconds a command
ROOMS = ("help", "list", "recipes", "run_folders", "errors")
ACTIONS = "write read merge remove find-trained stats verify pack convert".split()
ENTRIES = "train_pp evaluate infer chat serve corpus export check_model lm_eval_run".split()
LISTING = [name for name in ENTRIES if name != "export"]
SHORT = [f"{name}.py" for name in ENTRIES if name not in ("corpus", "export")]  # have --help all
HELPED = [f"{name}.py" for name in ENTRIES] + [f"corpus.py {action}" for action in ACTIONS]
RESOLVED = {"train": "train_pp.py", "eval": "evaluate.py"}
# without a file of their own: the word behind `stageline`
ACTIONS_OF_STAGELINE = {
    **{"infer.py": "infer", "chat.py": "chat"},
    **{"check_model.py": "check", "lm_eval_run.py": "lm-eval"},
}
NO_RECIPES = {"docs.sh", "gpu_check.sh", "setup.sh", "test.sh", "test_versions.sh"}
NO_RECIPES |= {"convert_internvl.sh", "expand_blocks.sh"}  # they only say where the program is
PREPARING = ("make_", "prepare_", "study_spatial_report")  # their calls depend on what is cached
Done = subprocess.CompletedProcess[str]
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "COLUMNS": "100",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "STAGELINE_PROVE_SPLIT": "never",  # else the first run says more than the second
    "CUDA_VISIBLE_DEVICES": "",
}


def run(command: list[str], *, cwd: Path, stdin: str = "", **environment: str) -> Done:
    """A command to its end."""
    return subprocess.run(
        command,
        cwd=cwd,
        input=stdin,
        env={**os.environ, **ENVIRONMENT, **environment},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=TIMEOUT,
    )


def python(words: str, folder: Path) -> Done:
    """`python words` in a folder; entry files are those of the repository."""
    first, *others = shlex.split(words)
    if first in ACTIONS_OF_STAGELINE:
        others = ["stageline", ACTIONS_OF_STAGELINE[first], *others]
    entry = first if first == "-m" else str(ROOT / first)
    entry = "-m" if first in ACTIONS_OF_STAGELINE else entry
    return run([sys.executable, entry, *others], cwd=folder)


def must(done: Done) -> Done:
    """Ends this program if the command failed: there is nothing to write down then."""
    if done.returncode:
        raise SystemExit(f"{done.args} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done


def normalized(text: str, folder: Path) -> str:
    """Without what differs from machine to machine, day to day, or with the place of a line."""
    places = {folder / "repo": "<repo>", folder: "<tmp>", sys.prefix: "<venv>", ROOT: "<repo>"}
    for path, name in places.items():
        for one in {str(path), str(Path(path).resolve())}:
            text = text.replace(one, name)
    text = re.sub(r"\[[\w./]+\.py:\d+\]", "[FILE:LINE]", text)
    text = re.sub(r"(<(?:repo|venv)>[^\s:]*\.py):\d+", r"\1:LINE", text)
    text = re.sub(r"\b20\d{6}-\d{6}\b", "<time>", text)
    text = re.sub(r"(?<=--master-port )\d+|(?<=tfevents\.).*", "<n>", text)
    return re.sub(r"(?<![\w.])\d+\.\d+\.\d+(?:\+\w+)?(?![\w.])", "<version>", text)


def write_inputs(folder: Path, *, with_models: bool) -> None:
    """The files that the bad command lines name."""
    shutil.copytree(INPUTS, folder, dirs_exist_ok=True)
    rows = [json.dumps({"id": str(i), "question": f"{i}?", "answer": f"{i}!"}) for i in range(40)]
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n")
    rows[16] = rows[16][:-5]
    (folder / "torn.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "parts.py").write_text("import register\n\nnot_defined\n")
    if with_models:
        must(python("scripts/make_digits_model.py digits-model", folder))
        shutil.copy(folder / "digits-model/tokenizer.json", folder / "text-model")


def shown_errors(words: str, inputs: Path) -> str:
    """A bad command line with what it gets, in a folder of its own: others leave runs behind."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place).resolve()
        shutil.copytree(inputs, folder, dirs_exist_ok=True)
        done = python(words.replace("TRAIN", "train_pp.py --config train.yaml"), folder)
        text = f"$ {words}\nexit code {done.returncode}\n{done.stderr.strip()}\n\n"
        return normalized(text, folder)


def error_files(inputs: Path, pool: ThreadPoolExecutor, *, quick: bool) -> Iterator:
    """The bad command lines, those of an entry file together."""
    places: dict[str, list[str]] = {}
    for line in (INPUTS / "commands.txt").read_text().splitlines()[2:]:
        is_quick, words = line.startswith("quick"), line.removeprefix("quick").strip()
        name = words.replace("TRAIN", "train_pp.py").replace("-m ", "").split(".py")[0].split()[0]
        if is_quick or not quick:
            places.setdefault("quick" if is_quick else name, []).append(words)
    for name, lines in places.items():
        yield f"errors/{name}.txt", "".join(pool.map(lambda one: shown_errors(one, inputs), lines))


def help_files(folder: Path, pool: ThreadPoolExecutor) -> Iterator:
    """`--help` of each entry file and action."""
    words = [f"{one} --help" for one in HELPED] + ["-m stageline --help"]
    words += [f"{one} --help all" for one in HELPED if one in SHORT]
    for command, done in zip(words, pool.map(lambda one: must(python(one, folder)), words)):
        name = re.sub(r"\.py|-m | --help", "", command).replace(" ", "-")
        yield f"help/{name}.txt", normalized(done.stdout, folder)


def list_files(folder: Path, pool: ThreadPoolExecutor, *, quick: bool) -> Iterator:
    """`--list`, which is the same everywhere: in full once, then what differs."""
    names = LISTING[:1] if quick else LISTING
    done = pool.map(lambda name: must(python(f"{name}.py --list", folder)).stdout, names)
    first, *others = (normalized(text, folder) for text in done)
    yield f"list/{names[0]}.txt", first
    for name, text in zip(names[1:], others):
        yield f"list/{name}.txt", changed_lines(first, text)


def changed_lines(old: str, new: str) -> str:
    """The lines that differ, without their places."""
    lines = difflib.unified_diff(old.splitlines(), new.splitlines(), n=0, lineterm="")
    return "".join(f"{line}\n" for line in list(lines)[2:] if not line.startswith("@@"))


def recorded_calls(script: Path, folder: Path) -> list[list[str]]:
    """The words of each call that a recipe makes of python, none of which is run."""
    home = folder / "recipes" / script.stem
    (home / "venv/bin").mkdir(parents=True)
    stand_in = home / "venv/bin/python"
    log = home / "calls.jsonl"
    stand_in.write_text(f"#!{sys.executable} -IS\n{(INPUTS / 'stand_in.py').read_text()}")
    stand_in.chmod(0o755)
    of_env = shlex.quote(str(ROOT / "scripts/_env.sh"))  # says by a sum that a venv is complete
    asking = f'eval "$(sed -n "/^stageline_fingerprint/,/^}}/p" {of_env})"; stageline_fingerprint'
    ready = must(run(["bash", "-c", asking], cwd=home, ROOT=str(ROOT))).stdout
    for purpose in ("", "-serve", "-remote", "-lm-eval"):
        (home / f"venv/.stageline-ready{purpose}").write_text(ready)
    places = {name: str(home / name.lower()) for name in ("RUN_DIR", "SAVE_PATH", "STUDY_DIR")}
    machine = {"NNODES": "1", "NODE_RANK": "0", "NPROC_PER_NODE": "2", "MASTER_ADDR": "127.0.0.1"}
    keys = {"STAGELINE_VENV": str(home / "venv"), "PYTHON": str(stand_in), "SEEDS": "0"}
    keys |= {"MODEL_PATH": "a-model", "GLOO_SOCKET_IFNAME": "lo"}
    keys |= {"GOLDEN_CALLS": str(log), "TMPDIR": str(folder)}
    must(run(["bash", str(script)], cwd=home, **keys, **places, **machine))
    calls = [json.loads(line) for line in log.read_text().splitlines()]
    return [words for words in calls if not Path(words[0]).name.startswith(PREPARING)]


def recipe_files(folder: Path) -> Iterator:
    """What the scripts call, and the resolved configs of them and of the examples."""
    home = folder / "repo"  # stands for the repository, since paths that are named have to exist
    shown, named, wanted = "", "", []
    for path in sorted((ROOT / "examples").glob("*.yaml")):
        entry = RESOLVED.get(path.read_text().split()[2])  # "# stageline train ..."
        if entry:
            named += path.read_text()
            wanted.append((f"examples/{path.name}", entry, ["--config", str(path)]))
    scripts = [*(ROOT / "scripts").glob("[!_]*.sh"), *(ROOT / "examples").glob("*/[!_]*.sh")]
    for script in sorted(scripts, key=lambda path: path.name):  # the others are sourced
        if script.name in NO_RECIPES:
            continue
        shown += f"# {script.name}\n"
        for words in recorded_calls(script, folder):
            shown += shlex.join(words).replace(" --", "\n  --") + "\n"
            words = [word.replace(str(ROOT), str(home)) for word in words]
            for place, word in enumerate(words):
                if Path(word).name in RESOLVED.values():
                    name = str(script.relative_to(ROOT))
                    wanted.append((name, Path(word).name, words[place + 1 :]))
    yield "recipes/commands.txt", normalized(shown, folder)
    for path in re.findall(r"-path:? (\S+)", named + shown.replace(str(ROOT), str(home))):
        (home / path).mkdir(parents=True, exist_ok=True)
    asked = json.dumps([one[1:] for one in wanted])
    done = must(run([sys.executable, str(folder / "resolve.py")], cwd=home, stdin=asked))
    first: dict[str, str] = {}  # in full; of the others, what differs
    differing = ""
    for (name, entry, _), text in zip(wanted, json.loads(done.stdout.splitlines()[-1])):
        text = normalized(text, folder)
        if entry not in first:
            yield f"recipes/{Path(entry).stem}.yaml", f"# {name}\n{text}"
        differing += f"# {name}: {entry}\n{changed_lines(first.setdefault(entry, text), text)}\n"
    yield "recipes/configs.txt", differing


def run_files(folder: Path) -> Iterator:
    """The folders of a training run of two steps and of what is done with its checkpoint."""
    best = "--model-path run/checkpoints/best --device cpu"
    config = f"--config {shlex.quote(str(ROOT))}/examples"
    small = "--total-steps 2 --warmup-steps 1 --eval-samples 8 --device cpu --timeline-step 2"
    words = "--prompt question --prompt-fn fill"  # the digits' tokenizer has no chat template
    for name, command in {
        "run": f"train_pp.py {config}/digits.yaml --config-path digits-model {small}",
        "evaluation": f"evaluate.py {config}/evaluate_digits.yaml {best} --limit 6",
        "answers": f"infer.py {config}/infer_smollm2.yaml {best} {words}",
    }.items():
        must(python(f"{command} --output-dir {name}", folder))
        found = sorted((folder / name).rglob("*"))  # of links to folders, `best`, the link itself
        paths = [path for path in found if path.is_symlink() or not path.is_dir()]
        text = "".join(f"{path.relative_to(folder)}\n" for path in paths)
        for path in paths:
            if path.suffix in (".json", ".jsonl") and path.name != "tokenizer.json":
                text += f"\n# {path.relative_to(folder)}\n"
                text += "".join(f"{key}\n" for key in sorted(keys_of(path)))
        yield f"run_folders/{name}.txt", normalized(text, folder)
        config_text = (folder / name / "config.yaml").read_text()
        yield f"run_folders/{name}.yaml", normalized(config_text, folder)


def keys_of(path: Path) -> set[str]:
    """The nested key paths of a JSON file; of JSON lines, with the kind of each."""
    if path.suffix == ".json":
        return set(key_paths(json.loads(path.read_text()), ""))
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return {key for one in records for key in key_paths(one, f"<{one.get('kind', 'line')}>")}


def key_paths(value: object, prefix: str) -> Iterator[str]:
    """Numbers, as keys or in names, are the same key: 24 layers say no more than one."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            name = re.sub(r"\b[0-9]+\b", "N", key)
            yield from key_paths(item, f"{prefix}.{name}")
    elif isinstance(value, list):
        for item in value or [None]:  # whether there is any depends on what a model says
            yield from key_paths(item, f"{prefix}[]")
    else:
        yield prefix.removeprefix(".")


def write(target: Path, *, quick: bool) -> None:
    """Writes all files into a folder, in place of what an earlier call has written there."""
    with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(NUM_PROCESSES) as pool:
        folder, inputs = Path(place).resolve() / "work", Path(place).resolve() / "inputs"
        write_inputs(inputs, with_models=not quick)
        shutil.copytree(inputs, folder)
        parts = [list_files(folder, pool, quick=quick), error_files(inputs, pool, quick=quick)]
        if not quick:
            parts = [recipe_files(folder), help_files(folder, pool), run_files(folder), *parts]
            for room in ROOMS:  # a case that is gone leaves nothing behind
                shutil.rmtree(target / room, ignore_errors=True)
        for name, text in itertools.chain(*parts):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_text(text, encoding="utf-8")


def compare(old: Path, new: Path) -> int:
    """Prints unified diffs; 1 if there are any."""
    texts = [
        {str(path.relative_to(top)): path.read_text() for path in top.rglob("*") if path.is_file()}
        for top in (old, new)
    ]
    differs = 0
    for name in sorted({*texts[0], *texts[1]}):
        before, after = (text.get(name, "").splitlines(keepends=True) for text in texts)
        lines = list(difflib.unified_diff(before, after, f"{old}/{name}", f"{new}/{name}"))
        sys.stdout.writelines(lines)
        differs |= bool(lines)
    return differs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", help="is written")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("OLD", "NEW"))
    parser.add_argument("--quick", action="store_true", help="--list and six bad command lines")
    options = parser.parse_args()
    if options.compare:
        return compare(*options.compare)
    if options.folder is None:
        parser.error("a folder to write, or --compare OLD NEW, was expected")
    write(options.folder, quick=options.quick)
    return 0


if __name__ == "__main__":
    sys.exit(main())
