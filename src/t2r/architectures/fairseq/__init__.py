"""Import of fairseq checkpoints as transformers models, without running code from the files.

`checkpoint` reads the settings and tensors of a file, and `dictionary` its words. `language_model` and `translation`
convert one architecture each, and raise an error for settings that it does not support.
"""
