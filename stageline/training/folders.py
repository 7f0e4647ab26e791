"""The loader of stages that reads and writes folders on disk: weights, adapters, processor."""

from stageline.checkpoint.adapter import num_rows_on_disk
from stageline.checkpoint.adapter_start import AdapterStart
from stageline.checkpoint.load import fill_stage
from stageline.data.text.chat import stop_ids_with
from stageline.data.text.processor import get_pad_token_id, load_processor, save_processor
from stageline.data.text.tokenizers import processor_of_weights
from stageline.stage import Loader


def folder_loader() -> Loader:
    """Return the loader of folders on disk."""
    return Loader(
        start=AdapterStart.of,
        num_rows=num_rows_on_disk,
        fill=fill_stage,
        processor=load_processor,
        processor_of_weights=processor_of_weights,
        pad_token_id=get_pad_token_id,
        save_processor=save_processor,
        stop_ids=stop_ids_with,
    )
