"""Engines that take the time of other hardware: a timeline of iterations over texts that come from elsewhere."""
