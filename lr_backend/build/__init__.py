"""From a deployment spec to a model repository that Triton loads. Imports only the leaves and the contract; no torch."""
