"""The pace of hardware: kernel tables of NVIDIA's, what they lack, and the time of one iteration from both. A leaf."""
