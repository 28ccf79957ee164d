"""Prediction of what step speculation gains, by simulation of the real loop on a virtual clock."""
