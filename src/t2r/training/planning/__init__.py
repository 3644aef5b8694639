"""What a run will take, before it starts: measured speeds, memory, and the plan that fits into a budget."""
