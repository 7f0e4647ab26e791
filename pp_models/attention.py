"""What a stage settles of attention before it is built: the kernel, and that nothing is cached."""

from transformers import PretrainedConfig

from stageline.errors import UserError


def cache_off(config: PretrainedConfig) -> tuple[str, ...]:
    """Turns the cache off in a model's configuration and in those of its parts.

    With a cache the library takes a packed row for one sample, and keeps keys and values that
    training has no use for.

    Returns:
        Which had it on, "" for the configuration itself: a saved model is to have it again.
    """
    found = []
    for name in ("", *config.sub_configs):
        one = getattr(config, name, None) if name else config
        if getattr(one, "use_cache", None):
            one.use_cache = False
            found.append(name)
    return tuple(found)


def refused_attention(
    config: PretrainedConfig, attn_implementation: str | None, error: Exception
) -> Exception:
    """The library's refusal of a kernel as the user's error; another error as it is."""
    text = str(error)
    if not attn_implementation or not ("attention" in text.lower() or "flash" in text.lower()):
        return error
    return UserError(
        f"{config.model_type} cannot be built with the attention {attn_implementation} "
        f"({text.splitlines()[0][:300]}). A kernel that this architecture has and this machine can "
        "run was expected: leave --attention (or --train-model.attn_implementation) out for the "
        "one that the library chooses, or use --attention eager."
    )
