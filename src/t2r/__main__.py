"""`python -m t2r`, and `accelerate launch -m t2r`."""

from t2r.cli import main

main()
