"""The option that shows samples before a run."""

from dataclasses import dataclass

from options.fields import option


@dataclass(kw_only=True)
class PreviewOptions:
    """Preview"""

    preview: int = option(
        0,
        "training samples to show before a model is loaded, coloured by what is learnt; with "
        "--check-only nothing else happens",
        at_least=0,
    )
