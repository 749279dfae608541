"""The download of models by Hugging Face id. huggingface_hub does it, with its cache, HF_ENDPOINT, HF_HUB_OFFLINE and
tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pdserve.core.errors import ConfigError

_FILES: Final = ("*.json", "*.safetensors", "*.jinja")
WITHOUT_WEIGHTS: Final = ("*.json", "*.jinja")
_SUBFOLDERS: Final = "*/*"  # these hold the same weights in other formats
_INSTEAD: Final = "Give a directory in Hugging Face layout or a GGUF file instead"


def download(model_id: str, only: Sequence[str] = _FILES) -> Path:
    """Return the directory of the newest snapshot. Files that are not in huggingface_hub's cache are downloaded first.

    only: patterns of the files that are needed. Raises `ConfigError` that says whether the id is wrong, a login is needed, or
    the hub cannot be reached.
    """
    from huggingface_hub import constants, errors, snapshot_download  # a slow import that is seldom needed

    transport_error: type[Exception] = errors.HTTPError  # type: ignore[attr-defined]  # the error of its HTTP client

    try:
        away = not _answers(model_id)
        return Path(snapshot_download(model_id, local_files_only=away, allow_patterns=list(only), ignore_patterns=_SUBFOLDERS))
    except errors.HFValidationError as exc:
        raise ConfigError(f"{model_id!r} is not a Hugging Face id: {exc}") from exc
    except errors.GatedRepoError as exc:
        raise ConfigError(f"{model_id} needs its licence to be accepted and a login: set HF_TOKEN. {_INSTEAD}") from exc
    except errors.RepositoryNotFoundError as exc:
        raise ConfigError(
            f"there is no model {model_id} at {constants.ENDPOINT}, or it is private (set HF_TOKEN). {_INSTEAD}"
        ) from exc
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as exc:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} cannot be reached"
        raise ConfigError(
            f"{model_id} is not in the local Hugging Face cache and {why}. {_INSTEAD}, or make the hub reachable "
            "(HF_ENDPOINT names a mirror)"
        ) from exc
    except (transport_error, OSError) as exc:
        raise ConfigError(f"downloading {model_id} from {constants.ENDPOINT} failed: {exc}. {_INSTEAD}") from exc


def _answers(model_id: str) -> bool:
    """Tell whether the hub answers a question about this model within HF_HUB_ETAG_TIMEOUT seconds.

    `snapshot_download` asks the same question without a limit, and would wait for ever for a server that never answers.
    """
    from huggingface_hub import HfApi, constants, errors, get_session

    wait_s = constants.HF_HUB_ETAG_TIMEOUT
    get_session().timeout = wait_s  # the limit of the next question, the list of files
    try:
        HfApi().model_info(model_id, timeout=wait_s)
    except (errors.HfHubHTTPError, errors.OfflineModeIsEnabled):
        return True  # this is an answer, which `snapshot_download` gets too
    except errors.HTTPError:  # type: ignore[attr-defined]  # the error of its HTTP client
        return False
    return True
