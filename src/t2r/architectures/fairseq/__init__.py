"""Models that fairseq trained, as ordinary models: of its checkpoints we read the numbers and run nothing.

`checkpoint` reads a file and hands out its settings and tensors, `dictionary` its words; `language_model` and
`translation` know one architecture each, and refuse by name what theirs cannot say.
"""
