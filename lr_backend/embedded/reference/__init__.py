"""The decoder in plain torch: the oracle of the decoder in C, and what computes where that cannot."""
