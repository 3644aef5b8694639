"""The type of a swapped model, for editors and type checkers: all of `PreTrainedModel`, and of `T2RModel`.

The class of a swapped model is made when it is swapped, from the base model's own. No class in the source has all its
methods, so this one is there to be named in annotations. At runtime it is `T2RModel`.
"""

from typing import TYPE_CHECKING

from t2r.model.modeling import T2RModel

if TYPE_CHECKING:
    from transformers import GenerationMixin, PreTrainedModel

    class SwappedModel(T2RModel, PreTrainedModel, GenerationMixin):  # type: ignore[misc]
        """A swapped model: `generate`, `save_pretrained`, and `make_cache`, `continue_from`, `load_state`."""

else:
    SwappedModel = T2RModel
