"""The type of a swapped model, for annotations.

The class of a swapped model is built at runtime from the base model's class. For type checkers, `SwappedModel` has the
methods of `PreTrainedModel` and `T2RModel`. At runtime it is `T2RModel`.
"""

from typing import TYPE_CHECKING

from t2r.model.modeling import T2RModel

if TYPE_CHECKING:
    from transformers import GenerationMixin, PreTrainedModel

    class SwappedModel(T2RModel, PreTrainedModel, GenerationMixin):  # type: ignore[misc]
        """A swapped model: `generate`, `save_pretrained`, and `make_cache`, `continue_from`, `load_state`."""

else:
    SwappedModel = T2RModel
