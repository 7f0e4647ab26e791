"""How many rows embedding and head have in a folder of a model or an adapter; reads no weights."""

from pathlib import Path

from stageline.checkpoint.adapter import find_base, read_adapter_config
from stageline.checkpoint.adapter_rows import INDICES
from stageline.checkpoint.files import ADAPTER_CONFIG, ADAPTER_FILE, open_tensors
from stageline.model_folder import load_config
from stageline.modules.new_rows import vocab_size_of

VOCABULARIES = ("embed_tokens", "wte", "embed_in", "head", "embed_out")  # last names of both


def num_rows_on_disk(
    folder: Path, *, of_base: bool = False, trust_remote_code: bool = False
) -> int:
    """Rows that a model with these weights has; 0: not known.

    Args:
        of_base: of an adapter, those of its base as it is before the adapter is put on.
    """
    is_adapter = (folder / ADAPTER_CONFIG).exists()
    base = find_base(folder) if is_adapter else folder
    if not (base / "config.json").exists():
        return 0
    config = load_config(base, trust_remote_code=trust_remote_code)
    num_rows = vocab_size_of(config) or 0
    if of_base or not is_adapter:
        return num_rows
    width = getattr(config.get_text_config(decoder=True), "hidden_size", None)
    return max([num_rows, *rows_of_adapter(folder, width)])


def token_ids_on_disk(folder: Path) -> list[int]:
    """The new tokens whose rows an adapter folder holds; of another folder none."""
    if not (folder / ADAPTER_CONFIG).exists():
        return []
    indices = read_adapter_config(folder).get(INDICES) or {}
    lists = list(indices.values()) if isinstance(indices, dict) else [indices]
    return sorted({token for ids in lists for token in ids})


def rows_of_adapter(folder: Path, width: int | None) -> list[int]:
    """The sizes that it asks of the vocabulary: by rows, or by a matrix that was trained whole."""
    sizes = [token + 1 for token in token_ids_on_disk(folder)[-1:]]
    kept = tuple(read_adapter_config(folder).get("modules_to_save") or ())
    file = folder / ADAPTER_FILE
    if not kept or not file.exists():
        return sizes
    with open_tensors(file) as tensors:
        for name in list(tensors.keys()):
            module = name.removesuffix(".weight")
            is_matrix = module.endswith(VOCABULARIES) and module.endswith(kept)
            shape = tensors.get_slice(name).get_shape() if is_matrix and module != name else []
            sizes += [shape[0]] if shape[1:] == [width] else []
    return sizes
