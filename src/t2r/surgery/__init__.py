"""How a model becomes recurrent: families, the exchange of their attention, and its proof."""
