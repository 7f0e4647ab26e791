"""An export and its comparison with the checkpoint, one after the other."""

from types import SimpleNamespace

from stageline.checkpoint.export_files import find_source
from stageline.checkpoint.plain_folder import export_folder as export_alone
from stageline.verify.export import check_export


def export_folder(source, target, *, make_stages=None, **options):
    """Return the report of `stageline export` with the verdict of `stageline check --exported`."""
    report = export_alone(source, target, **options)
    both = ("adapter_paths", "adapter_weights", "trust_remote_code")
    kept = {name: options[name] for name in both if name in options}
    verdict = check_export(find_source(source), report.folder, make_stages=make_stages, **kept)
    return SimpleNamespace(
        folder=report.folder,
        is_adapter=report.is_adapter,
        notes=(*report.notes, *verdict.notes),
        verdict=verdict,
    )
