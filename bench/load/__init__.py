"""Load with NVIDIA's perf_analyzer: obtaining it, its inputs, its exports, and what they say."""
