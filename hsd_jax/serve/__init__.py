"""`hsd serve`: requests in OpenAI's and vLLM's names over HTTP, answered by one `Session`."""
