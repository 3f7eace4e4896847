"""Other engines, each in a process and a venv of its own, measured through one small protocol."""
