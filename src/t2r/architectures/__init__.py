"""Model architectures that transformers does not have, and import of fairseq checkpoints.

`adaptive_lm` is the language model of the paper as a transformers model. It is a plain transformer, which its adapter
makes recurrent, as for every other family. `fairseq` imports fairseq checkpoints.
"""

from t2r.architectures.adaptive_lm.configuration import AdaptiveLMConfig
from t2r.architectures.adaptive_lm.modeling import AdaptiveLMForCausalLM, AdaptiveLMModel

__all__ = ["AdaptiveLMConfig", "AdaptiveLMForCausalLM", "AdaptiveLMModel"]
