"""Media files: reading and writing pictures, videos and what they carry. Nodes, pipelines and the CLI use it."""
