"""Sessions in a run folder: stages that are run or resumed, evaluation, and the result."""
