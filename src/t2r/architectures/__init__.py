"""Models of our own, and checkpoints of others.

`adaptive_lm` is the paper's language model, which transformers lacks, as an ordinary Hugging Face model. It knows
nothing of recurrence: its adapter makes it an RNN, as with every other family. `fairseq` reads fairseq's checkpoints.
"""

from t2r.architectures.adaptive_lm.configuration import AdaptiveLMConfig
from t2r.architectures.adaptive_lm.modeling import AdaptiveLMForCausalLM, AdaptiveLMModel

__all__ = ["AdaptiveLMConfig", "AdaptiveLMForCausalLM", "AdaptiveLMModel"]
