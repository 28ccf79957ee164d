"""An HTTP server that speaks OpenAI's API, in front of Triton: a process of its own, over the client's gRPC."""
