"""What to speculate, from what it has lately cost and brought. Pure but for the clock that is handed in."""
