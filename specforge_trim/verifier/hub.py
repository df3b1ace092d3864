"""Asks once, before anything waits for it, whether a target named by its hub id is to be had."""

import logging

logger = logging.getLogger(__name__)


def check_hub(name: str) -> None:
    """Raises OSError when a hub id is neither in the hub's cache nor the hub reachable.

    transformers would find out too, after trying for half a minute.  What an answering hub refuses
    (no such model, no access) is left to transformers to explain.
    """
    from huggingface_hub import (
        constants,
        get_hf_file_metadata,
        hf_hub_url,
        try_to_load_from_cache,
    )
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return
    logger.info("target %s: no folder here; asking the hub at %s", name, constants.ENDPOINT)
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"))
    except HfHubHTTPError:
        return
    except Exception as error:  # the hub's client passes on whatever its HTTP library raises
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise OSError(
            f"target {name!r}: no such folder, not in the hub's cache, and the hub at "
            f"{constants.ENDPOINT} cannot be reached ({reason}); give a model folder, or fetch "
            "the target where there is a network"
        ) from error
