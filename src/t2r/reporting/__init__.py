"""Results for people: what a swap changes, this machine, pages."""
