"""Models by name."""

from __future__ import annotations

import importlib
from difflib import get_close_matches

from torch import nn

from planaria.errors import ConfigError
from planaria.models.dcn_v2 import DCNv2
from planaria.models.deepfm import DeepFM
from planaria.models.dlrm import DLRM
from planaria.models.wide_and_deep import WideAndDeep

MODELS: dict[str, type[nn.Module]] = {
    "dlrm": DLRM,
    "dcn_v2": DCNv2,
    "deepfm": DeepFM,
    "wide_and_deep": WideAndDeep,
}


def load_model(name: str) -> type[nn.Module]:
    """The class of one of the models above, or of the user's own by "module:Class"."""
    if name in MODELS:
        return MODELS[name]
    module_name, colon, class_name = name.partition(":")
    if not (colon and module_name and class_name):
        near = "".join(f"did you mean {one}? " for one in get_close_matches(name, MODELS, n=1))
        raise ConfigError(
            f"there is no model {name!r}; {near}"
            f"expected {', '.join(MODELS)}, or module:Class for one of your own"
        )
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # A module that theirs imports and that is missing is theirs to see, with its traceback.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(
            f"model {name!r}: there is no module {error.name}; start the job from its folder, "
            "or add the folder to PYTHONPATH"
        ) from None
    found = getattr(module, class_name, None)
    if found is None:
        raise ConfigError(f"model {name!r}: the module {module_name} has no {class_name}")
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ConfigError(
            f"model {name!r}: {class_name} must be a class derived from torch.nn.Module"
        )
    return found
