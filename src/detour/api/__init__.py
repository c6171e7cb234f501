"""HTTP in, HTTP out. Knows OpenAI's types and the Engine handle; no tensor, no scheduler."""
