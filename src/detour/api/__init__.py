"""HTTP in, HTTP out. Knows OpenAI's types and the Engine handle; knows no tensor and no scheduler."""
