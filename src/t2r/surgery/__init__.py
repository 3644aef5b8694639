"""Making a model recurrent: adapters of model families, the swap of their attention, and its equivalence check."""
